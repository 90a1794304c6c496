"""What Prefect's UI shows of a run while it runs: a sink that keeps artifacts up to date, as far as the API lets it.

Training never waits for it. What is to be shown is not queued but looked up when it is written: the last thing that
training said, and the run's log. So nothing grows while the server is away, and what comes out later is right.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from prefect.context import FlowRunContext

from flows.prefect_ui.artifacts import Artifact, Board, PrefectBoard, commits_of, curves_of, progress_of, report_of
from tasks.foundation.contracts.log_entry import Entry
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.runlog.history import History, history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Committed, Evaluated, Event, Note, Silent, Sink, Training

_LOGGER = logging.getLogger(__name__)
_PAGE: Final = "report/index.html"
# How long one request, and all that is left to say at the end, may take.
_PATIENCE_SECONDS: Final = 10.0
# After a failure the server is left alone for so long.
_PAUSE_SECONDS: Final = 30.0
# At most one update in so many seconds; in the order in which they are written.
_EVERY_SECONDS: Final = {"progress": 5.0, "commits": 10.0, "report": 10.0, "curves": 60.0}


@dataclass(slots=True)
class _Part:
    """One artifact: whether it is behind, and when it may be written again."""

    name: str
    behind: bool = False
    not_before: float = float("-inf")


class Pace:
    """Which artifacts are due: those that are behind, each not more often than it should be. Knows no clock."""

    def __init__(self, names: Iterable[str] = _EVERY_SECONDS) -> None:
        """Nothing is behind; artifacts that are not named never are."""
        self._parts = {name: _Part(name) for name in names}

    def mark(self, names: Iterable[str]) -> None:
        """These are behind."""
        for name in self._parts.keys() & set(names):
            self._parts[name].behind = True

    def take(self, now: float, *, last: bool = False) -> list[str]:
        """What is to be written now, in order; counts as written. `last`: whatever is behind, due or not."""
        due = [part for part in self._parts.values() if part.behind and (last or part.not_before <= now)]
        for part in due:
            part.behind = False
            part.not_before = now + _EVERY_SECONDS[part.name]
        return [part.name for part in due]

    def failed(self, names: Iterable[str], now: float) -> None:
        """These could not be written after all; everything rests for a while."""
        self.mark(names)
        for part in self._parts.values():
            part.not_before = max(part.not_before, now + _PAUSE_SECONDS)

    def seconds_until_due(self, now: float) -> float | None:
        """How long nothing is due; None: until something is marked."""
        waits = [part.not_before - now for part in self._parts.values() if part.behind]
        return max(0.0, min(waits)) if waits else None


class ArtifactPublisher:
    """A `Sink` that keeps the artifacts of a flow run up to date; outside of a flow run it does nothing.

    Use it as a context manager: at the end the last state goes out, if the server takes it within a few seconds.
    """

    def __init__(
        self,
        spec: RunSpec,
        home: Storage,
        *,
        parts: Collection[str] = _EVERY_SECONDS.keys(),
        said: Sink = Silent(),  # noqa: B008 - Silent has no state
        board: Board | None = None,
        patience_seconds: float = _PATIENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is read or asked yet.

        Args:
            spec: the run file.
            home: the run's home, whose log is read.
            parts: names of the artifacts; only "progress" in the flow run of a stage, whose parent shows the rest.
            said: is told once, as a warning, if Prefect's API does not take it.
            board: where to put artifacts; left out: the flow run in whose context it is entered.
            patience_seconds: how long one request, and the end, may take.
            clock: seconds, never going back.
        """
        self._spec = spec
        self._log = RunLog(home.with_deadline(patience_seconds))
        self._said = said
        self._board = board
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._pace = Pace(parts)
        self._all = len(parts) == len(_EVERY_SECONDS)
        self._training: Training | None = None
        self._step: int | None = None
        self._closing = False
        self._warned = False
        self._curves_can_be_drawn = True
        self._entries: list[Entry] = []
        self._newest: Entry | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        flow_run = FlowRunContext.get()
        if self._board is None and flow_run is not None and flow_run.flow_run is not None:
            self._board = PrefectBoard(flow_run.flow_run.id, patience_seconds=self._patience_seconds)
        if self._board is not None:
            self._pace.mark(("progress", "commits"))  # of a run that goes on, as it stands
            # The context holds which Prefect it is; a daemon, because nothing that is shown may keep the process.
            work = contextvars.copy_context().run
            self._thread = threading.Thread(target=work, args=(self._work,), name="baton-shown", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def emit(self, event: Event) -> None:
        """Note what has changed; the thread does the rest. Raises nothing."""
        match event:
            case Training():
                parts: tuple[str, ...] = ("progress",)
            case Committed():
                parts = ("progress", "commits", "curves")
            case Evaluated():
                parts = ("commits", "curves")
            case _:
                return
        with self._changed:
            if isinstance(event, Training):
                self._training = event
            if isinstance(event, Training | Committed):
                self._step = event.step
            self._pace.mark(parts)
            self._changed.notify()

    def close(self) -> None:
        """The last state, in so far as the server takes it within the patience given. Later events go nowhere."""
        with self._changed:
            self._closing = True
            self._pace.mark(_EVERY_SECONDS)
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(self._patience_seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                while (wait := self._pace.seconds_until_due(self._clock())) != 0 and not self._closing:
                    self._changed.wait(wait)
                last = self._closing
                due = self._pace.take(self._clock(), last=last)
            try:
                while due:
                    self._show(due[0])
                    due.pop(0)
            except Exception as fault:  # noqa: BLE001 - nothing that goes wrong here is worth more than a word
                self._warn(fault)
                with self._changed:
                    self._pace.failed(due, self._clock())
            if last:
                return

    def _show(self, name: str) -> None:
        artifact = self._artifact(name)
        if artifact is not None and self._board is not None:
            self._board.put(artifact)

    def _artifact(self, name: str) -> Artifact | None:
        """As it is to be now; None if there is nothing to show yet."""
        run = self._spec.run
        if name == "report":
            page = f"{self._log.home.uri}/{_PAGE}"
            return report_of(run, page) if self._log.home.exists(_PAGE) else None
        if name == "progress" and not self._all and self._step is None:
            return None  # what the log says is shown by others
        if name == "progress" and self._step is not None and not (self._closing and self._all):
            return progress_of(run, step=self._step, target=self._spec.train.steps, now=self._training)
        history = self._history()
        if name == "progress":
            tip = None if history.head is None else history.head.tip
            step = 0 if tip is None else tip.step
            return progress_of(run, step=step, target=self._spec.train.steps, now=self._training)
        if not history.commits:
            return None
        return commits_of(run, history) if name == "commits" else self._curves(history)

    def _curves(self, history: History) -> Artifact | None:
        if not self._curves_can_be_drawn:
            return None
        try:
            return curves_of(self._spec.run, history)
        except ImportError as fault:
            self._curves_can_be_drawn = False
            _LOGGER.debug("no curves are shown in Prefect, they cannot be drawn here: %s", fault)
            return None

    def _history(self) -> History:
        """The run as its log has it. Entries never change: new ones are read, and the state is kept of one only."""
        head = self._log.head()
        for number in range(len(self._entries), 0 if head is None else head.number + 1):
            self._newest = self._log.entry(number)
            first = self._entries[0] if self._entries else self._newest
            self._entries.append(self._newest.model_copy(update={"head": first.head}))
        return history_of([*self._entries[:-1], *([] if self._newest is None else [self._newest])])

    def _warn(self, fault: Exception) -> None:
        _LOGGER.debug("what Prefect shows of the run is behind", exc_info=fault)
        if not self._warned:
            self._warned = True
            why = f"{type(fault).__name__}: {fault}".splitlines()[0]
            self._said.emit(
                Note(text=f"what Prefect shows of the run is behind ({why}); training goes on", warning=True)
            )
