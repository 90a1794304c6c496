"""Builds the user's model and creates all its variables."""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tasks.foundation.accelerator.strategy import DEVICE_LOST_ERRORS, Accelerator
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import ModelError
from tasks.foundation.messages import message
from tasks.foundation.model.batch_shapes import record_fixed_batch_size
from tasks.foundation.model.freezing import freeze
from tasks.foundation.model.keras_steps import called_like_fit, overrides
from tasks.foundation.model.precision import dtype_policy_for_build, require_precision
from tasks.foundation.model.variables import layers_of
from tasks.foundation.seeding import keras_seeds_from
from tasks.foundation.user_code import describe, load_function

_BUILD_HINT = "if call() does not take a batch, build the layers in the function that makes the model"

# The dtype policy right after the import of each user module. A module is imported once per process, and clearing
# Keras's session before each build would undo a policy that the module sets at its top, so this is a module global.
_policies: dict[tuple[str, Path], Any] = {}


def build_model(spec: RunSpec, *, code_folder: Path, accelerator: Accelerator) -> keras.Model:
    """Call the user's function in the strategy's scope, with fresh automatic names and the run's seed.

    Args:
        spec: the run file; names the function and its options.
        code_folder: the run file's folder.
        accelerator: the strategy to build in.

    Returns:
        A compiled model; its variables may not exist yet, see `create_variables`.

    Raises:
        ModelError: the function raises, or returns anything other than a compiled `keras.Model`.
    """
    reference = spec.model.build
    function, policy = _load_build_function(reference, code_folder, spec.train.seed)
    # Automatic names count up within a process; starting from zero they are the same in every process. Clearing also
    # resets the dtype policy, so global settings and the seed come after it.
    keras.utils.clear_session(free_memory=False)
    keras.config.set_dtype_policy(dtype_policy_for_build(spec.train, policy, reference=reference))
    keras.utils.set_random_seed(spec.train.seed)
    source = random.Random(spec.train.seed)  # noqa: S311 - must be reproducible
    with accelerator.strategy.scope(), keras_seeds_from(source):
        try:
            model = function(**spec.model.options)
        except DEVICE_LOST_ERRORS:
            raise
        except (Exception, SystemExit) as fault:
            raise ModelError(f"{reference} raised {describe(fault)}") from fault
    if not isinstance(model, keras.Model):
        raise ModelError(f"{reference} returned {type(model).__name__}; return a compiled keras.Model")
    if not model.compiled or model.optimizer is None:
        raise ModelError(f"{reference} returned a model that is not compiled; call model.compile(optimizer, loss)")
    record_fixed_batch_size(model)
    require_precision(model, spec.train, reference=reference)
    _refuse_unsupported_by_keras(model, reference, accelerator.replicas)
    return model


def ignored_compile_settings(model: keras.Model) -> str:
    """Return the compile settings that Baton's training loop ignores, joined by commas; empty if there are none."""
    unused = []
    if model.run_eagerly:
        unused.append("run_eagerly=True")
    if model.steps_per_execution != 1:
        unused.append(f"steps_per_execution={model.steps_per_execution}")
    # With other devices than the CPU, Keras sets jit_compile itself.
    if model.jit_compile and not any(device.device_type != "CPU" for device in tf.config.list_physical_devices()):
        unused.append("jit_compile=True")
    return ", ".join(unused)


def create_variables(
    model: keras.Model,
    batch: Sequence[Any],
    *,
    reference: str,
    accelerator: Accelerator,
    freeze_patterns: Sequence[str] = (),
) -> frozenset[int]:
    """Create all variables of a model, with public calls, before the training loop is traced.

    A lazy build fails inside `strategy.run`, and an optimizer that is built after a restore loses its restored state.

    Args:
        model: compiled.
        batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)` of NumPy arrays, [per_replica_batch, ...].
        reference: the function's name in the run file, for messages.
        accelerator: its strategy's scope holds the variables.
        freeze_patterns: patterns of `init.freeze`; the optimizer must be built after freezing.

    Returns:
        Ids of the frozen variables, see `freeze`.

    Raises:
        ModelError: the model does not take such a batch, or a pattern freezes nothing.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tuple(batch))
    own_step = overrides(model, "train_step")
    shapes = ", ".join(f"{name} {_shapes(value)}" for name, value in (("x", x), ("y", y)) if value is not None)
    with accelerator.strategy.scope():
        predictions = None
        # Models without `call`, such as a pair of adversarial networks, are used by their own train_step only.
        if not (own_step and not overrides(model, "call")):
            built = own_step and all(layer.built for layer in layers_of(model) if layer is not model)
            try:
                with _as_model_error(f"{reference}: the model does not take a batch of {shapes}"):
                    predictions = model(x, training=False)
            except ModelError as fault:
                # `call` may take something other than a batch; then only train_step knows how to use it.
                if not built:
                    raise ModelError(message(str(fault), hints=[_BUILD_HINT] if own_step else [])) from fault
        frozen = freeze(model, freeze_patterns, reference=reference)
        with _as_model_error(f"{reference}: its optimizer cannot be built"):
            model.optimizer.build(model.trainable_variables)
        what = f"{reference}: its compiled loss and metrics cannot be computed from model(x) and y, with {shapes}"
        if own_step:
            what += "; with a custom train_step, keep the metrics as attributes of the model instead"
        # How a custom train_step uses y is unknown; try the usual call, as Keras does before `fit`.
        if predictions is not None and (y is not None or not own_step):
            with _as_model_error(what):
                model.compute_metrics(x, y, predictions, sample_weight=sample_weight)
                if model.loss is not None or not own_step:
                    _compute_loss(model, x, y, predictions, sample_weight)
        elif not all(getattr(metric, "built", True) for metric in model.metrics):
            raise ModelError(
                f"{reference}: compile(metrics=…) needs metrics of model(x) and y, but the custom train_step uses its "
                "batch in another way; keep metrics as attributes of the model, and update them in train_step"
            )
        model.reset_metrics()
    return frozen


def require_test_step(model: keras.Model, batch: Sequence[Any], *, reference: str, accelerator: Accelerator) -> None:
    """Check that a model with custom steps can be evaluated, before training starts.

    Args:
        model: with all its variables.
        batch: see `create_variables`.
        reference: the function's name in the run file, for messages.
        accelerator: the step is traced for its replicas.

    Raises:
        ModelError: `test_step` cannot be traced.
    """
    steps = ("train_step", "test_step", "compute_loss", "compute_metrics")
    if not any(overrides(model, name) for name in steps):
        return
    what = (
        f"{reference}: its test_step cannot be traced, so it cannot be evaluated on validation examples; give the "
        "model a test_step, or set data.validation_fraction to 0"
    )
    with _as_model_error(what):
        trace_test_step(model, batch, accelerator)


def trace_test_step(model: keras.Model, batch: Sequence[Any], accelerator: Accelerator) -> None:
    """Trace `test_step` with a batch. It does not run: the graph is thrown away, and no metric changes."""
    test_step = called_like_fit(model.test_step)
    tf.function(
        lambda *parts: accelerator.strategy.run(test_step, args=(parts,)), jit_compile=False
    ).get_concrete_function(*tree.map_structure(tf.convert_to_tensor, tuple(batch)))


def _load_build_function(reference: str, code_folder: Path, seed: int) -> tuple[Callable[..., object], Any]:
    """Return the user's function, and the dtype policy that its module sets."""
    module = (reference.partition(":")[0], code_folder)
    if module not in _policies and _policies:
        # An earlier build may have set a policy for itself; this module must not see it.
        keras.utils.clear_session(free_memory=False)
    function = load_function(reference, code_folder, seed=seed)
    return function, _policies.setdefault(module, keras.config.dtype_policy())


def _compute_loss(model: keras.Model, x: Any, y: Any, predictions: Any, sample_weight: Any) -> None:
    """Call compute_loss as Keras does: a custom `compute_loss` may have no `training` parameter."""
    settings = {"training": False} if "training" in inspect.signature(model.compute_loss).parameters else {}
    model.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight, **settings)


@contextmanager
def _as_model_error(what: str) -> Iterator[None]:
    try:
        yield
    except DEVICE_LOST_ERRORS:
        raise
    except (Exception, SystemExit) as fault:
        raise ModelError(f"{what}: {describe(fault)}") from fault


def _shapes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shapes(below) for key, below in value.items()}
    return f"{value.dtype}{list(value.shape)}"


def _refuse_unsupported_by_keras(model: keras.Model, reference: str, replicas: int) -> None:
    if replicas == 1:
        return
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # It checks one replica's gradients for overflow before they are summed; another replica's overflow would pass.
        raise ModelError(
            f"{reference}: optimizer {optimizer.name} scales the loss, which Keras does incorrectly on {replicas} "
            "replicas; use the policy mixed_bfloat16, compile with auto_scale_loss=False, or train on one replica"
        )
    # Both fail to trace inside a replica ("merge_call called while defining a new graph").
    for setting, remedy in (
        ("gradient_accumulation_steps", "use a larger train.global_batch_size"),
        ("ema_overwrite_frequency", "remove it: use_ema works without it"),
    ):
        value = getattr(optimizer, setting, None)
        if value:
            raise ModelError(
                f"{reference}: optimizer {optimizer.name} has {setting} = {value}, which Keras does not support on "
                f"{replicas} replicas; {remedy}, or train on one replica"
            )
