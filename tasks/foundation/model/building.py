"""From the user's function to a built, compiled model whose every variable exists."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import ModelError
from tasks.foundation.user_code import describe, load_function


def build_model(spec: RunSpec, *, code_folder: Path, accelerator: Accelerator) -> keras.Model:
    """Call the user's function in the strategy's scope, from a clean name scope and the run's seed.

    Raises:
        ModelError: the function raises, or returns something else than a compiled `keras.Model`.
    """
    reference = spec.model.build
    function = load_function(reference, code_folder)
    # Automatic names count up within a process; from zero they are the same in every process. Clearing resets the
    # dtype policy as well, so the seed, and whatever else is global, is set after it.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(spec.train.seed)
    with accelerator.strategy.scope():
        try:
            model = function(**spec.model.options)
        except Exception as fault:
            raise ModelError(f"{reference} raised {describe(fault)}") from fault
    if not isinstance(model, keras.Model):
        raise ModelError(f"{reference} returned {type(model).__name__}; it must return a compiled keras.Model")
    if not model.compiled or model.optimizer is None:
        raise ModelError(f"{reference} returned a model that is not compiled; call model.compile(optimizer, loss)")
    _refuse_what_keras_cannot_do(model, reference, accelerator.replicas)
    return model


def make_variables(model: keras.Model, batch: Sequence[Any], *, reference: str, accelerator: Accelerator) -> None:
    """Make every variable exist, by public calls, before the loop is traced.

    Inside `strategy.run` a lazy build fails, and an optimizer that is built after restoring starts from nothing.

    Args:
        model: compiled.
        batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)` of NumPy arrays, [per_replica_batch, ...].
        reference: what the user calls the model, for messages.
        accelerator: whose scope variables are made in.

    Raises:
        ModelError: the model does not take such a batch.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tuple(batch))
    with accelerator.strategy.scope():
        try:
            predictions = model(x, training=False)
            model.optimizer.build(model.trainable_variables)
            if type(model).train_step is keras.Model.train_step:
                model.compute_metrics(x, y, predictions, sample_weight=sample_weight)
                model.compute_loss(x, y, predictions, sample_weight=sample_weight, training=False)
            model.reset_metrics()
        except Exception as fault:
            shapes = ", ".join(f"{name} {_shapes(value)}" for name, value in (("x", x), ("y", y)) if value is not None)
            raise ModelError(f"{reference}: the model does not take a batch of {shapes}: {describe(fault)}") from fault


def _shapes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shapes(below) for key, below in value.items()}
    return f"{value.dtype}{list(value.shape)}"


def _refuse_what_keras_cannot_do(model: keras.Model, reference: str, replicas: int) -> None:
    """Both fail to trace inside a replica ("merge_call called while defining a new graph")."""
    if replicas == 1:
        return
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
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
