"""How the stages of a run are executed: one Protocol for all ways, the simplest of them, and the devices that it needs.

The relay does not know whether a stage runs as a function of this process, or as a Prefect deployment
(`remote_stage.py`). Events say when a stage of this process begins and ends, and which events are its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from baton.flows.process import is_clean_stop
from baton.tasks.foundation.checkpoint.verify import PREFETCHED_CHECKPOINT
from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.log_entry import Environment, Head
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import StageCall
from baton.tasks.foundation.errors import error_words
from baton.tasks.foundation.machine.collectives import OneHost
from baton.tasks.foundation.machine.host_link import HostLink
from baton.tasks.foundation.stage import Place, Stage
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.telemetry.events import Note, Sink, StageBegun, StageEnded, in_stage
from baton.tasks.stages import EVALUATE, STAGES, TRAIN_SEGMENT

if TYPE_CHECKING:
    from baton.tasks.foundation.machine.devices import Accelerator


C = TypeVar("C", bound=StageCall)
A = TypeVar("A", bound=Contract)


class Runner(Protocol):
    """Runs stages: in this process, as Prefect tasks of this process, or as Prefect deployments."""

    @property
    def remote(self) -> frozenset[str]:
        """Names of the stages that run in other processes."""

    def run(self, stage: Stage[C, A], call: C, place: Place) -> A:
        """Run a stage and return its answer.

        Args:
            stage: one of tasks/stages.py.
            call: what the stage is to do.
            place: where it runs. In another process it has a place of its own, with the same home.

        Raises:
            BatonError: what the stage raised.
            StageStopped: it runs in another process, and was stopped there.
        """


_NUMBERS: Final = count()  # of the stages of this process


class InProcess:
    """Runs every stage as a plain function of this process, in the thread that calls."""

    remote: frozenset[str] = frozenset()

    def run(self, stage: Stage[C, A], call: C, place: Place) -> A:
        """Call the stage; it is imported now."""
        work = stage.load()
        # On a disk, a checkpoint goes to no bucket.
        label = stage.label if place.home.uri.startswith("gs://") else stage.label.removesuffix("-to-gcs")
        number, telemetry = next(_NUMBERS), place.telemetry
        telemetry.emit(StageBegun(number=number, label=label, name=f"{label} {stage.subject(call)}"))
        ended = StageEnded(number=number)
        try:
            with in_stage(number):
                return work(call, place)
        except BaseException as fault:
            ended = _end_of(number, fault)
            raise
        finally:
            telemetry.emit(ended)


def _end_of(number: int, fault: BaseException) -> StageEnded:
    if is_clean_stop(fault):
        return StageEnded(number=number, kind="Stopped")
    kind: Literal["Failed", "Crashed"] = "Failed" if isinstance(fault, Exception) else "Crashed"
    return StageEnded(number=number, kind=kind, message=error_words(fault))


class StageStopped(Exception):
    """A stage in another process was stopped, together with this command or by a person.

    Attributes:
        reason: an exit reason of the command.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def stages_on_devices(spec: RunSpec) -> frozenset[str]:
    """Names of the stages that need an accelerator; without a validation or test set, nothing is evaluated."""
    names = frozenset(stage.name for stage in STAGES if stage.needs_accelerator)
    return names if spec.data.is_evaluated_on else names - {EVALUATE.name}


def import_stages(spec: RunSpec) -> None:
    """Import the stages that run in this process, which imports TensorFlow."""
    unused = {EVALUATE.name} - stages_on_devices(spec)
    for stage in STAGES:
        if stage.name not in spec.stages.remote() and stage.name not in unused:
            stage.load()


def read_tip_ahead(spec: RunSpec, home: Storage, head: Head | None) -> None:
    """Begin to read the checkpoint that this process will restore, before TensorFlow is imported.

    Args:
        head: the folded state of the newest entry; None if the run has not begun.
    """
    if head is not None and head.tip is not None and TRAIN_SEGMENT.name not in spec.stages.remote():
        PREFETCHED_CHECKPOINT.begin(home, head.tip)


@contextmanager
def acquired_devices(
    spec: RunSpec,
    recorded: Environment | None,
    *,
    remote: frozenset[str],
    telemetry: Sink,
    link: HostLink | None = None,
) -> Iterator["Accelerator | OneHost"]:
    """Acquire the accelerator; `OneHost` if every stage that needs one runs in another process.

    Call it before any user code: TensorFlow fixes devices and threads at its first use, and the user's `load` may use
    TensorFlow.

    Args:
        recorded: the environment in the run's log; None if the run has not begun.
        remote: names of the stages that run in other processes.
        telemetry: receives notes about the choice of devices.
        link: of this host to the other hosts of the run; None for a single host.

    Raises:
        AcceleratorLost: within the context, devices or other hosts were lost.
    """
    if not stages_on_devices(spec) - remote:
        yield OneHost()
        return
    from baton.tasks.foundation.machine.devices import acquire, may_be_lost  # imports TensorFlow

    accelerator = acquire(spec.accelerator, recorded, deterministic=spec.train.deterministic, link=link)
    if accelerator.auto_choice:
        telemetry.emit(Note(text=accelerator.auto_choice))
    with may_be_lost(accelerator):
        yield accelerator
