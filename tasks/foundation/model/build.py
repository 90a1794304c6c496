"""From the user's function to a built, compiled model whose every variable exists."""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tasks.foundation.accelerator.strategy import OUTER_CAUSES, Accelerator
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import ModelError
from tasks.foundation.messages import message
from tasks.foundation.model.batch_shapes import note_batch_sizes
from tasks.foundation.model.freezing import freeze
from tasks.foundation.model.keras_steps import as_fit_gives, has_own
from tasks.foundation.model.precision import policy_to_build_with, require_precision
from tasks.foundation.model.variables import layers_of
from tasks.foundation.seeding import own_seeds
from tasks.foundation.user_code import describe, load_function

_BUILD_IT = "if call is not meant for a batch, build the layers in the function that makes the model"

# The dtype policy right after a module of the user's was imported. Importing happens once in a process, and clearing
# Keras's session before each build would undo a policy that is set at the top of the module.
_policies: dict[tuple[str, Path], Any] = {}


def build_model(spec: RunSpec, *, code_folder: Path, accelerator: Accelerator) -> keras.Model:
    """Call the user's function in the strategy's scope, from a clean name scope and the run's seed.

    Raises:
        ModelError: the function raises, or returns something else than a compiled `keras.Model`.
    """
    reference = spec.model.build
    function, policy = _load(reference, code_folder, spec.train.seed)
    # Automatic names count up within a process; from zero they are the same in every process. Clearing resets the
    # dtype policy as well, so the seed, and whatever else is global, is set after it.
    keras.utils.clear_session(free_memory=False)
    keras.config.set_dtype_policy(policy_to_build_with(spec.train, policy, reference=reference))
    keras.utils.set_random_seed(spec.train.seed)
    source = random.Random(spec.train.seed)  # noqa: S311 - to be drawn again
    with accelerator.strategy.scope(), own_seeds(source):
        try:
            model = function(**spec.model.options)
        except OUTER_CAUSES:
            raise
        except (Exception, SystemExit) as fault:
            raise ModelError(f"{reference} raised {describe(fault)}") from fault
    if not isinstance(model, keras.Model):
        raise ModelError(f"{reference} returned {type(model).__name__}; it must return a compiled keras.Model")
    if not model.compiled or model.optimizer is None:
        raise ModelError(f"{reference} returned a model that is not compiled; call model.compile(optimizer, loss)")
    note_batch_sizes(model)
    require_precision(model, spec.train, reference=reference)
    _refuse_what_keras_cannot_do(model, reference, accelerator.replicas)
    return model


def unused_settings(model: keras.Model) -> str:
    """What the model is compiled with and Baton's loop makes nothing of; empty if that is nothing."""
    unused = []
    if model.run_eagerly:
        unused.append("run_eagerly=True")
    if model.steps_per_execution != 1:
        unused.append(f"steps_per_execution={model.steps_per_execution}")
    # With other devices than the CPU, Keras sets it by itself.
    if model.jit_compile and not any(device.device_type != "CPU" for device in tf.config.list_physical_devices()):
        unused.append("jit_compile=True")
    return ", ".join(unused)


def make_variables(
    model: keras.Model,
    batch: Sequence[Any],
    *,
    reference: str,
    accelerator: Accelerator,
    freezing: Sequence[str] = (),
) -> frozenset[int]:
    """Make every variable exist, by public calls, before the loop is traced.

    Inside `strategy.run` a lazy build fails, and an optimizer that is built after restoring starts from nothing.

    Args:
        model: compiled.
        batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)` of NumPy arrays, [per_replica_batch, ...].
        reference: what the user calls the model, for messages.
        accelerator: whose scope variables are made in.
        freezing: `init.freeze`, which the optimizer must know of when it is built.

    Returns:
        What was frozen, see `freeze`.

    Raises:
        ModelError: the model does not take such a batch, or nothing is there to freeze.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tuple(batch))
    own_step = has_own(model, "train_step")
    shapes = ", ".join(f"{name} {_shapes(value)}" for name, value in (("x", x), ("y", y)) if value is not None)
    with accelerator.strategy.scope():
        predictions = None
        # Networks that only a train_step of its own knows how to use, such as two adversaries, have no `call`.
        if not (own_step and not has_own(model, "call")):
            built = own_step and all(layer.built for layer in layers_of(model) if layer is not model)
            try:
                with _as_model_error(f"{reference}: the model does not take a batch of {shapes}"):
                    predictions = model(x, training=False)
            except ModelError as fault:
                # Another `call` is for something else than a batch, which only the step knows.
                if not built:
                    raise ModelError(message(str(fault), hints=[_BUILD_IT] if own_step else [])) from fault
        frozen = freeze(model, freezing, reference=reference)
        with _as_model_error(f"{reference}: its optimizer cannot be built"):
            model.optimizer.build(model.trainable_variables)
        what = f"{reference}: its compiled loss and metrics cannot be computed from model(x) and y, for {shapes}"
        if own_step:
            what += "; a train_step of your own can keep its metrics as attributes of the model instead"
        # What a train_step of its own makes of y is not known; the usual is tried, as Keras itself does before `fit`.
        if predictions is not None and (y is not None or not own_step):
            with _as_model_error(what):
                model.compute_metrics(x, y, predictions, sample_weight=sample_weight)
                if model.loss is not None or not own_step:
                    _compute_loss(model, x, y, predictions, sample_weight)
        elif not all(getattr(metric, "built", True) for metric in model.metrics):
            raise ModelError(
                f"{reference}: compile(metrics=…) is for what model(x) and y give, and here a train_step of your own "
                "makes something else of its batch; keep metrics as attributes of the model, and update them there"
            )
        model.reset_metrics()
    return frozen


def require_test_step(model: keras.Model, batch: Sequence[Any], *, reference: str, accelerator: Accelerator) -> None:
    """See that a model whose steps are not all Keras's own can be evaluated, before anything is trained in vain.

    Args:
        model: with all its variables.
        batch: see `make_variables`.
        reference: what the user calls the model, for messages.
        accelerator: whose replicas the step is traced for.

    Raises:
        ModelError: `test_step` cannot be traced.
    """
    steps = ("train_step", "test_step", "compute_loss", "compute_metrics")
    if not any(has_own(model, name) for name in steps):
        return
    what = (
        f"{reference}: its test_step cannot be traced, so the validation examples would be of no use; give the model a "
        "test_step, or set data.validation_fraction to 0"
    )
    with _as_model_error(what):
        trace_test_step(model, batch, accelerator)


def trace_test_step(model: keras.Model, batch: Sequence[Any], accelerator: Accelerator) -> None:
    """Trace `test_step` with a batch; what it does to the metrics' sums stays in the graph, which is thrown away."""
    test_step = as_fit_gives(model.test_step)
    tf.function(
        lambda *parts: accelerator.strategy.run(test_step, args=(parts,)), jit_compile=False
    ).get_concrete_function(*tree.map_structure(tf.convert_to_tensor, tuple(batch)))


def _load(reference: str, code_folder: Path, seed: int) -> tuple[Callable[..., Any], Any]:
    """The user's function, and the dtype policy that its module is to begin with."""
    module = (reference.partition(":")[0], code_folder)
    if module not in _policies and _policies:
        # What an earlier build set for itself is not this module's.
        keras.utils.clear_session(free_memory=False)
    function = load_function(reference, code_folder, seed=seed)
    return function, _policies.setdefault(module, keras.config.dtype_policy())


def _compute_loss(model: keras.Model, x: Any, y: Any, predictions: Any, sample_weight: Any) -> None:
    """As Keras calls it: a `compute_loss` of the user's may have no `training`."""
    settings = {"training": False} if "training" in inspect.signature(model.compute_loss).parameters else {}
    model.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight, **settings)


@contextmanager
def _as_model_error(what: str) -> Iterator[None]:
    try:
        yield
    except OUTER_CAUSES:
        raise
    except (Exception, SystemExit) as fault:
        raise ModelError(f"{what}: {describe(fault)}") from fault


def _shapes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shapes(below) for key, below in value.items()}
    return f"{value.dtype}{list(value.shape)}"


def _refuse_what_keras_cannot_do(model: keras.Model, reference: str, replicas: int) -> None:
    if replicas == 1:
        return
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # It looks for an overflow in one replica's gradients, before they are summed: another's goes into the weights.
        raise ModelError(
            f"{reference}: optimizer {optimizer.name} scales the loss, which Keras gets wrong on {replicas} replicas; "
            "use the policy mixed_bfloat16, compile with auto_scale_loss=False, or train on one replica"
        )
    # Both fail to trace inside a replica ("merge_call called while defining a new graph").
    for setting, remedy in (
        ("gradient_accumulation_steps", "use a larger train.global_batch_size"),
        ("ema_overwrite_frequency", "leave it out: use_ema alone works"),
    ):
        value = getattr(optimizer, setting, None)
        if value:
            raise ModelError(
                f"{reference}: optimizer {optimizer.name} has {setting} = {value}, which Keras cannot do on {replicas} "
                f"replicas; {remedy}, or train on one replica"
            )
