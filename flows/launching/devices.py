"""The devices of a command's own process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tasks.foundation.accelerator.cluster import cluster_of
from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.hosts import OneHost
from tasks.foundation.telemetry.events import Note, Sink
from tasks.stages import EVALUATE, STAGES

if TYPE_CHECKING:
    from tasks.foundation.accelerator.strategy import Accelerator


def stages_on_devices(spec: RunSpec) -> frozenset[str]:
    """Names of the stages that need an accelerator; without validation examples, nothing is evaluated."""
    names = frozenset(stage.name for stage in STAGES if stage.needs_accelerator)
    return names - {EVALUATE.name} if spec.data.validation_fraction == 0 else names


@contextmanager
def acquired_devices(
    spec: RunSpec, recorded: Environment | None, *, remote: frozenset[str], telemetry: Sink
) -> Iterator["Accelerator | OneHost"]:
    """Acquire the accelerator; `OneHost` if every stage that needs one runs in another process.

    Call it before any user code: TensorFlow fixes devices and threads at its first use, and the user's `load` may use
    TensorFlow.

    Args:
        spec: the run file.
        recorded: the environment in the run's log; None if the run has not begun.
        remote: names of the stages that run in other processes.
        telemetry: receives notes about the choice of devices.

    Raises:
        AcceleratorLost: within the context, devices or other hosts were lost.
    """
    if not stages_on_devices(spec) - remote:
        yield OneHost()
        return
    from tasks.foundation.accelerator.strategy import acquire, may_be_lost  # imports TensorFlow

    if spec.accelerator.kind == "multi_worker":
        addresses = cluster_of(os.environ).addresses
        telemetry.emit(Note(text=f"waiting for all workers: {', '.join(addresses)}"))
    accelerator = acquire(spec.accelerator, recorded, deterministic=spec.train.deterministic)
    if accelerator.auto_choice:
        telemetry.emit(Note(text=accelerator.auto_choice))
    with may_be_lost(accelerator):
        yield accelerator
