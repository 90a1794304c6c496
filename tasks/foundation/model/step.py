"""Builds and traces train steps, and reports their errors; used when a run starts and when it trains.

`compile(jit_compile=True)` makes a step one program of XLA, as in `fit`. `auto` means what it means in Keras: no XLA on
a machine that has only CPUs, with deterministic operations, or within a distribution strategy. A TPU compiles every
step with XLA, whatever `compile` says. Evaluations are not compiled.

A custom train step creates layers' variables, metrics and optimizers at its first use. Keras traces `train_step` with
the first batch: layers that are called for the first time create their variables, and an optimizer is built with the
variables that it is first applied to. Here the step is traced into a graph that is thrown away, outside of any replica,
because a replica cannot create variables. Nothing runs, so no value changes.

With `train.accumulate` a step works on micro-batches, which needs less memory for the same global batch. Keras's own
`gradient_accumulation_steps` counts whole batches, and cannot be traced under a strategy; this one works inside a step.
It averages the gradients of the micro-batches. For a loss that is a mean over examples, that is the gradient of the
whole batch. A layer that works on the whole batch (batch normalization) works on each micro-batch.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.backend.tensorflow import core
from keras.src.losses import loss as losses
from keras.src.optimizers import base_optimizer
from tensorflow.python.distribute import values_util

from baton.tasks.foundation.errors import BatonError, InvalidInput, ModelError, StepFailed
from baton.tasks.foundation.machine.devices import DEVICE_LOST_ERRORS, Accelerator
from baton.tasks.foundation.model.hidden_state import require_no_hidden_state
from baton.tasks.foundation.model.keras_steps import (
    SEED_REMEDY,
    called_like_fit,
    reset_metrics,
    tracing_hints,
    with_python_state_put_back,
)
from baton.tasks.foundation.model.metrics import ReturnedMetrics
from baton.tasks.foundation.model.randomness import StepDraws, exact_draws, require_exact_draws
from baton.tasks.foundation.model.variables import Leaf, layers_of, other_optimizers, untracked_variables
from baton.tasks.foundation.text import listed, message
from baton.tasks.foundation.user_traceback import describe, describe_with_place, user_error

_LOSS = "loss"
# Relative. Sums in another order differ by less; a sum over half of the batch differs by far more.
_TOLERANCE = 1e-2
Step = Callable[[Any], dict[str, Any]]
# Keras ignores jit_compile=True with deterministic operations, because XLA lacks some of them. Baton's are
# deterministic by default, so it compiles, and refuses a step that has one of these.
_KERAS_WARNING = "Model doesn't support `jit_compile=True`"
_REMEDY = "remove jit_compile=True from compile()"
_LABEL_REMEDY = ". Set data.classes to have labels checked when the data is prepared"
# TensorFlow's message for a label out of range, where deterministic operations compute the loss.
_INDEX = re.compile(r"indices\[.*\] = -?\d+ is not in \[0, ")


def accumulating_step(
    model: keras.Model, micro_batches: int, returned: ReturnedMetrics | None = None
) -> Callable[[Any], dict[str, Any]]:
    """Return a train step that does what `model.train_step` does, in micro-batches.

    Args:
        model: compiled, with Keras's own `train_step`.
        micro_batches: number of micro-batches; must divide the per-replica batch size.
        returned: metrics of the values that a `compute_metrics` of the user's returns.

    Returns:
        A function of a batch `(x,)`, `(x, y)` or `(x, y, sample_weight)`, each tensor [per_replica_batch, ...]. It
        takes one step and returns the metrics; call it with `strategy.run`.
    """

    def step(batch: Any) -> Any:
        weights = model.trainable_weights
        pieces = tree.map_structure(lambda value: _pieces(value, micro_batches), batch)

        def add(index: Any, *sums: Any) -> tuple[Any, ...]:
            piece = tree.map_structure(lambda value: value[index], pieces)
            gradients = _gradients(model, weights, piece, returned)
            return index + 1, *(total + part for total, part in zip(sums, gradients, strict=True))

        begin = (tf.constant(0), *(tf.zeros(weight.shape, weight.dtype) for weight in weights))
        _, *sums = tf.while_loop(lambda index, *_: index < micro_batches, add, begin, parallel_iterations=1)
        mean = [total / tf.cast(micro_batches, total.dtype) for total in sums]
        model.optimizer.apply_gradients(zip(mean, weights, strict=True))
        return model.get_metrics_result()

    return with_python_state_put_back(model, step)


def require_accumulation(
    model: keras.Model, batch: Sequence[Any], micro_batches: int, *, reference: str, accelerator: Accelerator
) -> None:
    """Refuse a model whose step cannot be split into micro-batches, or would train differently.

    Args:
        batch: one per-replica batch; only its shapes and dtypes are used.
        micro_batches: number of micro-batches.
        reference: the function's name in the run file, for messages.
        accelerator: its replicas take the step.

    Raises:
        ModelError: names what prevents accumulation.
    """
    for name in ("train_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ModelError(
                f"{reference}: the model has a custom {name}, which Baton cannot split into micro-batches; remove "
                f"train.accumulate, and accumulate in {name}"
            )
    synchronized = [layer.path for layer in layers_of(model) if getattr(layer, "synchronized", False)]
    if synchronized and accelerator.replicas > 1 and accelerator.kind != "tpu":
        raise ModelError(
            f"{reference}: {synchronized[0]} is synchronized between replicas, which TensorFlow cannot trace within "
            "micro-batches; remove train.accumulate, or synchronized=True"
        )
    with accelerator.strategy.scope():
        whole = _loss_of_equal_examples(model, batch)
        pieces = _loss_of_equal_examples(
            model, tree.map_structure(lambda value: value[: len(value) // micro_batches], batch)
        )
        reset_metrics(model)
    # With equal examples, each micro-batch has the mean of the whole batch, but only a part of its sum.
    if abs(whole - pieces) > _TOLERANCE * max(abs(whole), abs(pieces)):
        raise ModelError(
            f"{reference}: its loss is {whole:.6g} for a batch of equal examples but {pieces:.6g} for one of its "
            f"{micro_batches} micro-batches, so it is not a mean over the examples, and micro-batches would train "
            "differently; make it a mean, or remove train.accumulate"
        )


def outputs_keras_mask(model: keras.Model, batch: Sequence[Any]) -> bool:
    """Whether the model outputs a Keras mask, so that losses are means over the unmasked values only."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(tuple(batch))
    return any(getattr(each, "_keras_mask", None) is not None for each in tree.flatten(model(x, training=False)))


def _loss_of_equal_examples(model: keras.Model, batch: Sequence[Any]) -> float:
    """Return the loss, without dropout, of a batch of these shapes whose examples are all equal."""

    def equal(value: Any) -> Any:
        return np.full_like(value, 0.5 if np.issubdtype(value.dtype, np.floating) else 0)

    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tree.map_structure(equal, tuple(batch)))
    predictions = model(x, training=False)
    return float(tf.reduce_sum(model.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight)))


def _gradients(model: keras.Model, weights: list[Any], piece: Any, returned: ReturnedMetrics | None) -> list[Any]:
    """Return the gradients of one micro-batch, and update metrics as Keras's `train_step` does."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(piece)
    with tf.GradientTape() as tape:
        predictions = model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight, training=True)
        examples = tf.shape(tree.flatten(x)[0])[0]
        _loss_tracker(model).update_state(losses.unscale_loss_for_distribution(loss), sample_weight=examples)
        scaled = model.optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, weights)
    logs = model.compute_metrics(x, y, predictions, sample_weight=sample_weight)
    if returned is not None:
        returned.keep(logs, piece)
    # A weight that does not affect the loss has no gradient; with zeros the optimizer applies weight decay only.
    return [
        tf.zeros(weight.shape, weight.dtype) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, weight in zip(gradients, weights, strict=True)
    ]


def _pieces(value: Any, count: int) -> Any:
    size = value.shape[0] // count
    return tf.reshape(value, [count, size, *value.shape[1:]])


def _loss_tracker(model: keras.Model) -> Any:
    return next(metric for metric in model.metrics if metric.name == _LOSS)


@contextmanager
def jit_compile_kept() -> Iterator[None]:
    """Use around the user's function: hides Keras's warning that it ignores `jit_compile=True`, because it is used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_KERAS_WARNING)
        yield


def asks_for_xla(model: keras.Model) -> bool:
    """Whether `compile` was called with `jit_compile=True`, or Keras's `auto` chooses XLA here."""
    asked = getattr(getattr(model, "_compile_config", None), "config", {}).get("jit_compile")
    return bool(not model.run_eagerly and (asked is True or model.jit_compile))


def why_not_xla(model: keras.Model, accelerator: Accelerator) -> str:
    """Why a step for which `jit_compile=True` asks cannot be compiled with XLA; empty if it can."""
    unsupported = sorted(layer.name for layer in layers_of(model) if not getattr(layer, "supports_jit", True))
    if unsupported:
        return f"XLA does not support layer {unsupported[0]}"
    if accelerator.replicas > 1 and accelerator.kind != "tpu":
        return f"{accelerator.replicas} replicas add up their gradients in the middle of the step, outside of XLA"
    return ""


def uses_xla(model: keras.Model, accelerator: Accelerator) -> bool:
    """Whether the train step is compiled with XLA."""
    return accelerator.kind != "tpu" and asks_for_xla(model) and not why_not_xla(model, accelerator)


def compile_words(model: keras.Model, accelerator: Accelerator) -> tuple[str, ...]:
    """Say what becomes of the settings of `compile` that are about how a step runs; nothing about defaults."""
    words = []
    unused = ["run_eagerly=True"] if model.run_eagerly else []
    if model.steps_per_execution != 1:
        unused.append(f"steps_per_execution={model.steps_per_execution}")
    if unused:
        words.append(f"compiled with {', '.join(unused)}, which is not used: steps run inside one compiled loop")
    if accelerator.kind != "tpu" and asks_for_xla(model):
        why = why_not_xla(model, accelerator)
        words.append(
            f"compiled with jit_compile=True, which is not used: {why}"
            if why
            else "XLA compiles the train step (jit_compile=True), which takes a while before the first step"
        )
    return tuple(words)


def flat_xla_function(
    step: Callable[..., Any], arguments: Sequence[Any], *, autograph: bool = True
) -> tuple[Any, list[tf.TensorSpec]]:
    """Return a step as a function whose XLA program can be read, and the flat arguments to read it with.

    `experimental_get_compiler_ir` accepts only tensors as arguments, no dicts of them.

    Args:
        step: Python function of as many arguments as `arguments` has.
        arguments: `tf.TensorSpec`s of static shapes, or structures of them.
        autograph: as in `tf.function`.
    """
    structure = tuple(arguments)
    function = tf.function(
        lambda *tensors: step(*tree.pack_sequence_as(structure, list(tensors))), jit_compile=True, autograph=autograph
    )
    return function, tree.flatten(structure)


def require_xla_step(model: keras.Model, step: Step, batch: Sequence[Any], *, reference: str, draws: StepDraws) -> None:
    """Check, before a run starts, that XLA can compile the step, if `jit_compile=True` asks for it.

    Args:
        step: see `build_train_step`.
        batch: see `create_variables`.
        reference: the function's name in the run file, for messages.
        draws: seeds of the step's random operations; it is compiled for their replicas.

    Raises:
        ModelError: there are several replicas, or an operation cannot be compiled.
    """
    accelerator = draws.accelerator
    if accelerator.kind == "tpu" or not asks_for_xla(model):
        return
    why = why_not_xla(model, accelerator)
    if why and accelerator.replicas > 1:
        raise ModelError(
            message(
                f"{reference}: compiled with jit_compile=True, which cannot be used: {why}",
                hints=[f"{_REMEDY}, or train on one replica (accelerator.replicas: 1)"],
            )
        )
    if why:
        return
    parts = tree.map_structure(tf.convert_to_tensor, tuple(batch))
    specs = tree.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), parts)
    function, flat = flat_xla_function(lambda *given: step(given), specs)
    try:
        with exact_draws(draws):
            function.experimental_get_compiler_ir(*flat)(stage="hlo")
    except DEVICE_LOST_ERRORS:
        raise
    except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as fault:
        what = f"{reference}: XLA cannot compile its train_step (jit_compile=True):"
        raise ModelError(user_error(what, fault, hints=[f"{_REMEDY}, or use operations that XLA supports"])) from fault


def build_train_step(
    model: keras.Model,
    batch: Sequence[Any],
    accumulate: int,
    *,
    reference: str,
    draws: StepDraws,
    returned: ReturnedMetrics | None = None,
) -> Step:
    """Return what one replica does with its batch: `model.train_step`, or the same in micro-batches.

    Args:
        batch: see `create_variables`.
        accumulate: number of micro-batches per step.
        reference: the function's name in the run file, for messages.
        draws: seeds of the step's random operations; their replicas take it.
        returned: metrics of the values that a step of the user's returns.

    Raises:
        ModelError: the model's step cannot be split into micro-batches.
    """
    if accumulate == 1:
        step = called_like_fit(model.train_step) if returned is None else returned.step
    else:
        require_accumulation(model, batch, accumulate, reference=reference, accelerator=draws.accelerator)
        step = accumulating_step(model, accumulate, returned)
    return draws.counted(step)


def run_train_step(step: Step, batch: Any, draws: StepDraws) -> tuple[Any, Any]:
    """Run one train step on every replica; call it inside a traced function.

    Args:
        step: see `build_train_step`.
        batch: the distributed batch.
        draws: seeds of the step's random operations.

    Returns:
        The sum of the replicas' losses, and the losses of this host's replicas, float32 [local_replicas]; (None, None)
        if the step returns no loss.
    """
    strategy = draws.accelerator.strategy
    with exact_draws(draws):
        logs = strategy.run(step, args=(batch,))
    if "loss" not in logs:
        return None, None
    # A custom step may return a loss per example.
    local = strategy.experimental_local_results(logs["loss"])
    of_replicas = [tf.reduce_mean(tf.cast(loss, tf.float32)) for loss in local]
    return strategy.reduce(tf.distribute.ReduceOp.SUM, logs["loss"], axis=None), tf.stack(of_replicas)


def trace_train_step(
    function: Any,
    arguments: Sequence[Any],
    *,
    leaves: Iterable[Leaf],
    draws: StepDraws,
    reference: str,
    hints: Callable[[BaseException], list[str]],
) -> Any:
    """Trace a `tf.function` that trains, and refuse a model with state that a checkpoint would miss.

    Args:
        function: calls `run_train_step`. It is only traced, so no variable changes.
        leaves: the variables that are saved.
        draws: seeds of the step's random operations.
        reference: the function's name in the run file, for messages.
        hints: returns hints for a tracing error, see `tracing_hints`.

    Returns:
        The concrete function.

    Raises:
        ModelError: the step cannot be traced, or uses a variable, or other state, that is not saved.
    """
    try:
        concrete = function.get_concrete_function(*arguments)
    except BatonError:
        raise
    except (Exception, SystemExit) as fault:
        raise ModelError(user_error(f"{reference}: train_step cannot be traced:", fault, hints=hints(fault))) from fault
    missed = untracked_variables(concrete, [*leaves, draws.leaf])
    if missed:
        raise ModelError(
            message(
                f"{reference}: train_step uses variables that no layer, optimizer or metric holds, so a checkpoint "
                f"would miss them: {listed(missed)}",
                hints=["keep them as attributes of a layer or of the model", SEED_REMEDY],
            )
        )
    require_no_hidden_state(concrete, f"{reference}: train_step")
    return concrete


def require_train_step(
    model: keras.Model,
    batch: Sequence[Any],
    *,
    accumulate: int,
    leaves: Iterable[Leaf],
    reference: str,
    draws: StepDraws,
) -> None:
    """Check that a model can be trained, before a run starts: a corrected model could not continue the run.

    Args:
        batch: see `create_variables`.
        accumulate: number of micro-batches per step.
        leaves: the variables that are saved.
        reference: the function's name in the run file, for messages.
        draws: seeds of the step's random operations; it is traced for their replicas.

    Raises:
        ModelError: see `trace_train_step`, `require_exact_draws` and `require_xla_step`.
    """
    own = build_train_step(model, batch, accumulate, reference=reference, draws=draws)
    step = tf.function(lambda *parts: run_train_step(own, parts, draws)[0], jit_compile=False)
    arguments = tree.map_structure(tf.convert_to_tensor, tuple(batch))
    hints = partial(tracing_hints, model, batch)
    concrete = trace_train_step(step, arguments, leaves=leaves, draws=draws, reference=reference, hints=hints)
    require_exact_draws(concrete, draws, f"{reference}: train_step")
    require_xla_step(model, own, batch, reference=reference, draws=draws)


@contextmanager
def invalid_input_as_step_failed() -> Iterator[None]:
    """Use around steps, callbacks and evaluations: after training has started, bad input is a failed step.

    Raises:
        StepFailed: the user's model, callbacks or data cannot be used.
    """
    try:
        yield
    except InvalidInput as fault:
        raise StepFailed(str(fault)) from fault


@contextmanager
def op_errors_as_model_error(what: str) -> Iterator[None]:
    """Use around running traced steps, outside of `original_read_errors`, which reports errors in the data.

    Args:
        what: what failed and where, for the message.

    Raises:
        ModelError: an operation failed, for instance on a label that the model does not have.
    """
    try:
        yield
    except DEVICE_LOST_ERRORS:
        raise  # a problem of the machine, not of the model
    except tf.errors.OpError as fault:
        text = describe(fault)
        is_label = "label" in text.lower() or _INDEX.search(text) is not None
        raise ModelError(user_error(f"{what}:", fault, end=_LABEL_REMEDY if is_label else "")) from fault


def all_layers_are_built(model: keras.Model) -> bool:
    """Whether all layers of a model have their variables; the model itself need not be built."""
    return all(layer.built for layer in layers_of(model) if layer is not model)


def optimizers_are_built(model: keras.Model) -> bool:
    """Whether all optimizers but the compiled one have their variables."""
    return all(optimizer.built for optimizer in other_optimizers(model).values())


def metrics_are_built(model: keras.Model) -> bool:
    """Whether all metrics of a model have their variables."""
    return all(getattr(metric, "built", True) for metric in model.metrics)


@contextmanager
def added_once() -> Iterator[None]:
    """Within the block, what code outside of a replica adds to a sum over replicas is added once.

    TensorFlow refuses it, although a layer that counts its calls, and an own train step, may do it when the model is
    used for the first time. The first replica's part takes it, so the sum is that of one replica.
    """

    def adding(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def add(variable: Any, value: Any, read_value: bool = True) -> Any:
            if variable.aggregation != tf.VariableAggregation.SUM:
                return original(variable, value, read_value=read_value)
            getattr(variable.values[0], name)(value)
            return variable.read_value() if read_value else None

        return add

    with ExitStack() as put_back:
        for name in ("assign_add", "assign_sub"):
            function = f"on_read_{name}_cross_replica"
            original = getattr(values_util, function)
            put_back.callback(setattr, values_util, function, original)
            setattr(values_util, function, adding(name, original))
        yield


class FirstUse:
    """The first use of a model's own train step, which is taken at most once.

    Attributes:
        fault: why the step could not be traced, as one line; "" if it was, or was not tried.
        applied: the variables that the compiled optimizer was applied to.
    """

    def __init__(self, model: keras.Model, batch: Sequence[Any], accelerator: Accelerator) -> None:
        """Nothing is traced yet.

        Args:
            batch: see `create_variables`.
            accelerator: the variables are created in its strategy's scope.
        """
        self._model = model
        self._batch = batch
        self._strategy = accelerator.strategy
        self._is_taken = False
        self._error: BaseException | None = None
        self.fault = ""
        self.applied: list[Any] = []

    def take(self) -> bool:
        """Trace the step if that has not been done. Returns whether it succeeded."""
        if not self._is_taken:
            self._is_taken = True
            try:
                self._trace()
            except DEVICE_LOST_ERRORS:
                raise
            except (Exception, SystemExit) as fault:  # noqa: BLE001 - user code may raise anything
                self._error, self.fault = fault, describe_with_place(fault)
        return not self.fault

    def require_created(self, reference: str, *, has_call: bool) -> None:
        """Refuse a model that still lacks variables because its step could not be traced.

        Args:
            reference: the function's name in the run file, for messages.
            has_call: whether the model has a `call`, which may create the variables of layers.

        Raises:
            ModelError: why the step cannot be traced. It names the optimizers that are not built if it can be where
                they are.
        """
        if self._error is None:
            return
        unbuilt = {path: each for path, each in other_optimizers(self._model).items() if not each.built}
        if not unbuilt and (has_call or all_layers_are_built(self._model)):
            return
        hints = tracing_hints(self._model, self._batch, self._error)
        if unbuilt and self._is_traced_with(unbuilt.values()):
            attributes = ", ".join(".".join(["model", *path.split("/")[1:]]) for path in unbuilt)
            hints = [f"call build(variables) of {attributes} in the function that builds the model", *hints]
        raise ModelError(
            user_error(f"{reference}: train_step cannot be traced:", self._error, hints=hints)
        ) from self._error

    def _is_traced_with(self, optimizers: Iterable[Any]) -> bool:
        """Whether replicas can trace the step once these optimizers are built; the model is not used afterwards."""
        step = called_like_fit(self._model.train_step)
        try:
            with self._strategy.scope():
                for each in optimizers:
                    each.build(self._model.trainable_variables)
            function = tf.function(lambda *parts: self._strategy.run(step, args=(parts,)), jit_compile=False)
            function.get_concrete_function(*tree.map_structure(tf.convert_to_tensor, tuple(self._batch)))
        except DEVICE_LOST_ERRORS:
            raise
        except (Exception, SystemExit):  # noqa: BLE001 - user code may raise anything
            return False
        return True

    def _trace(self) -> None:
        autograph = tf.__internal__.autograph
        step = autograph.tf_convert(called_like_fit(self._model.train_step), autograph.control_status_ctx())
        graph = tf.__internal__.FuncGraph("first_use")
        with self._strategy.scope(), graph.as_default(), self._variables_are_created():
            step(tree.map_structure(_placeholder, tuple(self._batch)))

    @contextmanager
    def _variables_are_created(self) -> Iterator[None]:
        """Within the block, variables are created outside of the graph; optimizers that are applied are built."""

        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
            del grads
            variables = list(trainable_variables or ())
            if optimizer is self._model.optimizer:
                self.applied.extend(variables)
            elif not optimizer.built:
                with keras.name_scope(optimizer.name):
                    optimizer.build(variables)

        create = core.Variable._initialize

        def create_outside(variable: Any, value: Any) -> None:
            with tf.init_scope():  # a strategy with several replicas creates no variables in a graph
                create(variable, value)

        replacements = (
            (tf.GradientTape, "gradient", _zeros),
            (base_optimizer.BaseOptimizer, "apply", apply),
            (keras.optimizers.LossScaleOptimizer, "apply", apply),
            (core.Variable, "_initialize", create_outside),
        )
        with ExitStack() as put_back:
            for kind, name, function in replacements:
                put_back.callback(setattr, kind, name, getattr(kind, name))
                setattr(kind, name, function)
            yield


def _zeros(tape: Any, target: Any, sources: Any, *settings: Any, **more: Any) -> Any:
    """Gradients of the right shapes; outside of a replica, TensorFlow computes none of distributed variables."""
    del tape, target, settings, more
    return tree.map_structure(lambda source: tf.zeros_like(tf.convert_to_tensor(source)), sources)


def _placeholder(value: Any) -> Any:
    return tf.compat.v1.placeholder(value.dtype, value.shape)
