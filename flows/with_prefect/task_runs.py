"""Stages, recorded as Prefect task runs beside the work.

Events say when a stage begins and how it ends. For each, a thread tells Prefect: the task run begins when Prefect
answers, waits for the stage, and ends as the stage ended. So a server that is slow or gone delays no stage and fails
none. Prefect records what a run does; the run does not depend on it.

The task engine asks the API before a task begins, for the concurrency limits of its tags. A limit does not hold a stage
back either: a commit that waits for the slot of the training that it runs beside would never end.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self
from uuid import UUID

from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.telemetry.events import Event, Note, Sink, StageBegun, StageEnded, stage_of_thread

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State


Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

# How long a server may take to respond, before it counts as not responding.
_PATIENCE_SECONDS: Final = 20.0
# How long the end of a flow run waits for the last task runs to be recorded, and if a server that stood still is back.
LAST_RECORDS_SECONDS: Final = 3.0
_BACK_SECONDS: Final = 60.0
# So many task runs may wait for a slow server; later ones are not recorded. Each holds a thread, but no data.
_MOST_WAITING: Final = 16
_ABSENT: Final = "Prefect is not responding and does not record what is done; the run continues"


# Stage -> the stages that hand the run over to it: the newest of their task runs is its only predecessor in Prefect's
# graph. A segment continues the state of the segment before, while that one's checkpoint is still being committed.
_HANDED_OVER_BY: Final = {
    "init-or-restore": ("prepare-data",),
    "train-segment": ("init-or-restore", "train-segment"),
    "checkpoint": ("init-or-restore", "train-segment"),
    "checkpoint-to-gcs": ("init-or-restore", "train-segment"),
    "evaluate": ("init-or-restore", "train-segment"),
}

# The records of the stages that run, by their numbers.
_RUNNING: Final[dict[int, "StageRecord"]] = {}


def logger_of_stage() -> Log | None:
    """The logger of the task run of this thread's stage; None outside a stage, or before the task run has begun."""
    number = stage_of_thread()
    record = None if number is None else _RUNNING.get(number)
    return None if record is None else record.logger


def prefect_responds() -> bool:
    """Whether Prefect's API, embedded or a server, responds to one request without retries."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    try:
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(httpx_settings={"timeout": _PATIENCE_SECONDS}, sync_client=True) as client,
        ):
            return client.api_healthcheck() is None
    except (httpx.HTTPError, PrefectException, RuntimeError, OSError):
        return False


def _alive_after(threads: Sequence[threading.Thread], seconds: float) -> list[threading.Thread]:
    """Wait for threads, at most this long; returns those that have not ended."""
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    return [thread for thread in threads if thread.is_alive()]


def drop_logs_of(threads: Sequence[threading.Thread]) -> None:
    """Let no handler of Prefect's loggers see what these threads log from now on."""
    idents = {thread.ident for thread in threads}
    for name in (None, "prefect", "prefect.task_runs"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(lambda record: record.thread not in idents)


@dataclass(slots=True)
class PrefectStatus:
    """Whether Prefect records what is done; an absence is reported once."""

    responds: Callable[[], bool] = prefect_responds
    clock: Callable[[], float] = time.monotonic
    reported_absent: bool = False

    def absent(self, telemetry: Sink) -> None:
        """Prefect does not respond."""
        if not self.reported_absent:
            self.reported_absent = True
            telemetry.emit(Note(text=_ABSENT, warning=True))

    def failed(self, label: str, fault: BaseException, telemetry: Sink) -> None:
        """Prefect's engine failed before or after a stage; say whether Prefect is away."""
        if not self.responds():
            self.absent(telemetry)
            return
        why = masked(f"{type(fault).__name__}: {fault}".splitlines()[0])
        telemetry.emit(Note(text=f"Prefect could not record {label} ({why}); the run continues", warning=True))


@dataclass(slots=True, eq=False)
class StageRecord:
    """One stage as it is recorded.

    Attributes:
        label: the stage's name in Prefect.
        name: the task run's name.
        asked_at: the clock when the stage began.
        predecessor: the stage that handed the run over; None: it is the first.
        begun: the task run has begun, or never will. Task runs begin in the order of their stages.
        ended: the stage has ended.
        end: how it ended.
        logger: of the task run, once it has begun.
        task_run_id: of the task run, once it has begun.
    """

    label: str
    name: str
    asked_at: float = 0.0
    predecessor: "StageRecord | None" = None
    begun: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    end: StageEnded | None = None
    logger: Log | None = None
    task_run_id: UUID | None = None

    def wait_for_stage(self) -> "State[None]":
        """The body of the task: ends when the stage has ended, in the stage's state."""
        from prefect import get_run_logger
        from prefect.context import TaskRunContext
        from prefect.exceptions import MissingContextError

        with suppress(MissingContextError):
            self.logger = get_run_logger()
        running = TaskRunContext.get()
        self.task_run_id = None if running is None else running.task_run.id
        self.begun.set()
        self.ended.wait()
        return _state_of(self.end)

    def handed_over(self) -> "list[State[str]] | None":
        """What the task waits for: a state that stands for the predecessor, which has begun and need not have ended."""
        from prefect.client.schemas.objects import StateDetails
        from prefect.states import Completed

        before = self.predecessor
        if before is None or before.task_run_id is None:
            return None
        # Prefect asks a state for its result, and refuses one without.
        return [Completed(data=before.name, state_details=StateDetails(task_run_id=before.task_run_id))]


def _state_of(end: StageEnded | None) -> "State[None]":
    from prefect import states

    if end is None:
        return states.Completed()
    if end.kind == "Stopped":
        return states.Completed(name=end.kind)
    made: State[None] = getattr(states, end.kind)(message=end.message)
    return made


class PrefectTasks:
    """A `Sink` that records stages as task runs of the current flow run.

    Use it as a context manager: on exit it waits a moment for the last task runs to be recorded. Stages may begin in
    several threads, each with a copy of the flow run's context.
    """

    def __init__(self, telemetry: Sink, status: PrefectStatus | None = None) -> None:
        """Make no request yet.

        Args:
            telemetry: receives a warning if Prefect does not record stages.
            status: whether it does; None: a new one.
        """
        self._telemetry = telemetry
        self._status = PrefectStatus() if status is None else status
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, StageRecord] = {}
        self._last: StageRecord | None = None
        self._stages: list[StageRecord] = []  # the newest of each stage, in the order of their beginnings
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, where: TracebackType | None
    ) -> None:
        if not self._closed:
            self.close()

    def close(self, seconds: float = LAST_RECORDS_SECONDS) -> None:
        """Wait until the task runs of all ended stages are recorded, at most this long.

        A server that stood still and responds again records them all, which takes a while. What is not recorded even
        then is given up: task runs that have not begun never will, and what its thread still logs is dropped, since it
        may outlive the interpreter. If Prefect does not respond, that is reported now.
        """
        with self._lock:
            ended = [thread for thread, record in self._threads.items() if record.ended.is_set()]
        if _alive_after(ended, 0.0 if self._status.reported_absent else seconds):
            if self._status.responds():
                _alive_after(ended, _BACK_SECONDS)
            else:
                self._status.absent(self._telemetry)
        self._closed = True
        if given_up := _alive_after(ended, 0.0):
            drop_logs_of(given_up)

    def end_all(self) -> None:
        """Let the task runs of all stages end: their process has ended, and says no more."""
        for number in list(_RUNNING):
            self.emit(StageEnded(number=number))

    def emit(self, event: Event) -> None:
        """A stage begins or has ended; other events are no matter of task runs. Never waits."""
        match event:
            case StageBegun():
                self._begin(event)
            case StageEnded() if (record := _RUNNING.pop(event.number, None)) is not None:
                record.end = event
                record.ended.set()
                self._report_slowness(record)
            case _:
                pass

    def _begin(self, event: StageBegun) -> None:
        record = _RUNNING[event.number] = StageRecord(event.label, event.name, self._status.clock())
        with self._lock:
            waiting = [each for each in self._threads.values() if not each.begun.is_set()]
            record.predecessor = self._newest(_HANDED_OVER_BY.get(record.label, ()))
            if len(waiting) < _MOST_WAITING:
                here = contextvars.copy_context()  # the flow run, its tags and its client
                thread = threading.Thread(
                    target=here.run, args=(self._record, record, self._last), name=f"baton-{record.label}", daemon=True
                )
                self._threads[thread] = self._last = record
                self._stages = [*(each for each in self._stages if each.label != record.label), record]
                thread.start()
        if waiting:
            self._report_slowness(waiting[0])

    def _record(self, record: StageRecord, before: StageRecord | None) -> None:
        """Run the task of a stage, in a thread of its own, after the one before has begun."""
        if before is not None:
            before.begun.wait()
        if self._closed and record.ended.is_set():
            record.begun.set()
            return

        def stage() -> "State[None]":
            self._status.reported_absent = False  # only the begin of a task asks the API
            return record.wait_for_stage()

        try:
            from prefect import task
            from prefect.cache_policies import NO_CACHE

            # Never cached: only the run's log says what is done already. No parameters: the engine walks through them.
            recorded = task(name=record.label, task_run_name=lambda: record.name, cache_policy=NO_CACHE)(stage)
            recorded(wait_for=record.handed_over())
        except BaseException as fault:  # noqa: BLE001 - what Prefect cannot record is reported, and fails no stage
            record.begun.set()
            if not self._closed:
                self._status.failed(record.label, fault, self._telemetry)
        finally:
            record.begun.set()
            with self._lock:
                del self._threads[threading.current_thread()]

    def _newest(self, labels: tuple[str, ...]) -> StageRecord | None:
        return next((each for each in reversed(self._stages) if each.label in labels), None)

    def _report_slowness(self, record: StageRecord) -> None:
        if not record.begun.is_set() and self._status.clock() - record.asked_at > _PATIENCE_SECONDS:
            self._status.absent(self._telemetry)
