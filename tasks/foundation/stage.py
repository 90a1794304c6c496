"""A stage as a value: its name, the contracts of its call and its answer, and its work."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from baton.tasks.foundation.checkpoint.save import AsyncSaves
from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.dataset import Feature, Reading
from baton.tasks.foundation.contracts.log_entry import Environment
from baton.tasks.foundation.contracts.stage_calls import StageCall
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.telemetry.events import Sink
from baton.tasks.foundation.telemetry.profiling import Profiler

C = TypeVar("C", bound=StageCall)
A = TypeVar("A", bound=Contract)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a stage runs.

    Attributes:
        root: the storage root; runs and datasets are below it.
        home: the run's home.
        log: the run's log.
        code_folder: the run file's folder; relative paths start from it.
        telemetry: receives every event of the stage.
        clock: monotonic time in seconds.
        check_features: called by `prepare_data` with the features of the first example and how it was read, before any
            example is written; not called if the dataset exists. Its error ends the stage.
        saves: made while the training goes on; None: they are made in line.
        profiler: traces steps when the home asks for them.
    """

    root: Storage
    home: Storage
    log: RunLog
    code_folder: Path
    telemetry: Sink
    clock: Callable[[], float] = time.monotonic
    check_features: Callable[[tuple[Feature, ...], Reading], None] | None = None
    saves: AsyncSaves | None = None
    profiler: Profiler = field(default_factory=Profiler)

    @classmethod
    def of(
        cls,
        root: Storage,
        run: str,
        *,
        code_folder: Path,
        telemetry: Sink,
        clock: Callable[[], float] = time.monotonic,
        saves: AsyncSaves | None = None,
    ) -> "Place":
        """The place of a run, by its name below a storage root."""
        home = root.at(run)
        return cls(
            root=root, home=home, log=RunLog(home), code_folder=code_folder, telemetry=telemetry, clock=clock,
            saves=saves,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteHooks(Generic[C, A]):
    """What is special about a stage when it runs in another process.

    Attributes:
        remote_call: the call to send; values that are too large for it are written to the home.
        ready_answer: the answer, if there is nothing left to run.
        on_answer: called in the waiting process with the answer.
        drop_input: deletes the files in the home that the call refers to, once the stage has succeeded or they are
            damaged.
        starts_command: whether a call is the first of its command; then flow runs that earlier attempts left are ended.
        cancellable: whether to cancel the stage when the waiting process is asked to stop.
        needs_code: whether the stage imports the user's code.
    """

    remote_call: Callable[[C, Place], StageCall] = lambda call, _place: call
    ready_answer: Callable[[C, Place], A | None] = lambda _call, _place: None
    on_answer: Callable[[A, Place], None] = lambda _answer, _place: None
    drop_input: Callable[[C, Place], None] = lambda _call, _place: None
    starts_command: Callable[[C], bool] = lambda _call: False
    cancellable: bool = True
    needs_code: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Generic[C, A]):
    """One of the five stages.

    Attributes:
        name: as in the run file, such as train_segment.
        call: class of the call.
        answer: class of the answer.
        load: imports the work and returns it, so that an image needs only the packages of the stages it runs.
        aim: the goal of a call, such as "to step 500"; may be empty.
        subject: follows the label in the name of a Prefect task run.
        phase: cause of the seconds that the stage takes; None if the stage itself emits its phases.
        environment: the recorded environment, for setting up the stage's devices; None if it needs no accelerator.
        remote: what is special about it in another process.
    """

    name: str
    call: type[C]
    answer: type[A]
    load: Callable[[], Callable[[C, Place], A]]
    aim: Callable[[C], str] = lambda _call: ""
    subject: Callable[[C], str]
    phase: str | None = None
    environment: Callable[[C, Place], Environment | None] | None = None
    remote: RemoteHooks[C, A] = field(default_factory=RemoteHooks)

    @property
    def label(self) -> str:
        """The name that Prefect shows, such as train-segment."""
        return label_of(self.name)

    @property
    def needs_accelerator(self) -> bool:
        """Whether the stage computes on devices."""
        return self.environment is not None


def label_of(name: str) -> str:
    """The name that Prefect shows for a stage: train-segment for train_segment."""
    return name.replace("_", "-")
