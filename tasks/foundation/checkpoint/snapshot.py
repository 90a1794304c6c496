"""What a checkpoint of the train state will hold, checked before anything is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tasks.foundation.contracts.checkpoint import VariableRecord
from tasks.foundation.errors import NonFinite
from tasks.foundation.state.train_state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The train state at one step.

    The values are not copied: they are in the model's own variables. Do not train until the snapshot is written.

    Attributes:
        step: the absolute step.
        replicas: number of replicas that the state was trained on.
        keys: of everything that is saved.
        signature: path, dtype and shape of each leaf.
        compiled_learning_rates: see `TrainState`.
        checkpoint: the `tf.train.Checkpoint` that writes it.
        io_device: the device that writes files; None for TensorFlow's choice.
    """

    step: int
    replicas: int
    keys: tuple[str, ...]
    signature: tuple[VariableRecord, ...]
    compiled_learning_rates: Mapping[str, float]
    checkpoint: tf.train.Checkpoint
    io_device: str | None


def take_snapshot(state: TrainState, *, where: str = "") -> Snapshot | None:
    """Take a snapshot. With several hosts, all of them call it at the same step.

    Args:
        state: the train state.
        where: added to the step in an error message, for example ", in segment 2".

    Returns:
        The snapshot; None on hosts other than the chief, because only the chief writes.

    Raises:
        NonFinite: a trainable variable holds NaN or infinity.
        ModelError: the random streams of the replicas could not be restored.
    """
    _require_finite(state, where=f"step {state.step}{where}")
    state.replica_variables.gather()
    state.seeds.require_derived()
    if not state.accelerator.is_chief:
        return None
    return Snapshot(
        step=state.step,
        replicas=state.accelerator.replicas,
        keys=tuple(state.saved),
        signature=state.signature,
        compiled_learning_rates=state.compiled_learning_rates,
        checkpoint=state.checkpoint,
        io_device=state.accelerator.io_device,
    )


def _require_finite(state: TrainState, *, where: str) -> None:
    for leaf in state.leaves:
        variable: Any = leaf.components[0]
        if leaf.trainable and variable.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(variable))):
            raise NonFinite(
                f"{where}: {leaf.path} holds NaN or infinity, which is not committed. Lower the learning rate, "
                "clip gradients, or look at the data of these steps",
                step=state.step,
            )
