"""A sink that keeps a flow run's artifacts in Prefect's UI up to date.

Training never waits for it. Artifacts are not queued: each is made from the last training event and the run's log at
the time when it is written. So memory does not grow while the server is down, and a late artifact is still correct. An
update costs the same however long the log is; only the curves need the whole log, and are drawn once, when the training
has ended.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from flows.prefect_ui.artifacts import (
    Artifact,
    ArtifactStore,
    CommitTable,
    PrefectArtifacts,
    commits_of,
    curves_of,
    progress_of,
    report_of,
)
from tasks.evaluate.report.page import PAGE
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.run_spec import RunSpec, with_recorded_examples
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.telemetry.events import Committed, Evaluated, Event, Note, Silent, Sink, Training

_LOGGER = logging.getLogger(__name__)
# Limit of one request, and of the last update when the run ends.
_REQUEST_SECONDS: Final = 10.0
# After a failure no request is made for this long.
_PAUSE_SECONDS: Final = 30.0
# The shortest time between two updates of an artifact. Artifacts are written in this order.
_INTERVAL_SECONDS: Final = {"progress": 5.0, "commits": 10.0, "report": 10.0, "curves": 60.0}


@dataclass(slots=True)
class _Part:
    """One artifact: whether it is outdated, and when it may be written again."""

    name: str
    outdated: bool = False
    not_before: float = float("-inf")


class UpdateSchedule:
    """Decides which artifacts are due: outdated ones, each at most once per interval. The caller passes the time."""

    def __init__(self, names: Iterable[str] = _INTERVAL_SECONDS) -> None:
        """Start with all artifacts up to date; artifacts that are not in `names` never become due."""
        self._parts = {name: _Part(name) for name in names}

    def mark(self, names: Iterable[str]) -> None:
        """Mark these artifacts as outdated."""
        for name in self._parts.keys() & set(names):
            self._parts[name].outdated = True

    def take(self, now: float, *, last: bool = False) -> list[str]:
        """Return the artifacts to write now, in order, and count them as written.

        Args:
            now: seconds on the caller's clock.
            last: return all outdated artifacts, due or not.
        """
        due = [part for part in self._parts.values() if part.outdated and (last or part.not_before <= now)]
        for part in due:
            part.outdated = False
            part.not_before = now + _INTERVAL_SECONDS[part.name]
        return [part.name for part in due]

    def failed(self, names: Iterable[str], now: float) -> None:
        """Mark these artifacts as outdated, and pause all updates: writing them failed."""
        self.mark(names)
        for part in self._parts.values():
            part.not_before = max(part.not_before, now + _PAUSE_SECONDS)

    def seconds_until_due(self, now: float) -> float | None:
        """Return the seconds until an artifact is due; None if none is outdated."""
        waits = [part.not_before - now for part in self._parts.values() if part.outdated]
        return max(0.0, min(waits)) if waits else None


class ArtifactPublisher:
    """A `Sink` that keeps the artifacts of a flow run up to date; outside a flow run it does nothing.

    Use it as a context manager: on exit it writes the last state, if the server accepts it within a few seconds.
    """

    def __init__(
        self,
        spec: RunSpec,
        log: RunLog,
        *,
        parts: Collection[str] = _INTERVAL_SECONDS.keys(),
        notes: Sink = Silent(),  # noqa: B008 - Silent has no state
        store: ArtifactStore | None = None,
        context: Callable[[], contextvars.Context] | None = None,
        request_seconds: float = _REQUEST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read and request nothing yet.

        Args:
            spec: the run file's content.
            log: the run's log; it may be read in several threads.
            parts: names of the artifacts; only "progress" for a stage's flow run, whose parent shows the others.
            notes: receives one warning if Prefect's API does not accept artifacts.
            store: stores the artifacts; None: Prefect's API, for the flow run of the context.
            context: waits for the context of the flow run; None: the current one.
            request_seconds: limit of one request, and of the last update.
            clock: monotonic time in seconds.
        """
        self._spec = spec
        self._log = log
        self._notes = notes
        self._store = store
        self._context = context
        self._request_seconds = request_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._schedule = UpdateSchedule(parts)
        self._all = len(parts) == len(_INTERVAL_SECONDS)
        self._training: Training | None = None
        self._step: int | None = None
        self._closing = False
        self._warned = False
        self._draws_curves = False
        self._drawn: Artifact | None = None
        self._commits = CommitTable(log)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        context = self._context
        if context is None:
            self._open_store()
            # The copied context holds Prefect's settings.
            context = contextvars.copy_context().copy
        if self._store is not None or self._context is not None:
            self._schedule.mark(("progress", "commits"))  # the state of a continued run
            # A daemon thread, so that it never delays the exit.
            self._thread = threading.Thread(target=self._run, args=(context,), name="baton-artifacts", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def emit(self, event: Event) -> None:
        """Mark the artifacts that an event changes; the thread writes them. Never raises."""
        match event:
            case Training():
                parts: tuple[str, ...] = ("progress",)
            case Committed():
                parts = ("progress", "commits")
            case Evaluated():
                parts = ("commits",)
            case _:
                return
        with self._changed:
            if isinstance(event, Training):
                self._training = event
            if isinstance(event, Training | Committed):
                self._step = event.step
            self._schedule.mark(parts)
            self._changed.notify()

    def draw_curves(self) -> None:
        """Add the curves to the last state: the training has ended, and there is time."""
        self._draws_curves = True

    def close(self) -> None:
        """Write the last state, if the server accepts it within the limit. Later events are dropped."""
        with self._changed:
            self._closing = True
            self._schedule.mark(name for name in _INTERVAL_SECONDS if name != "curves" or self._draws_curves)
            self._changed.notify()
        if self._thread is not None and self._store is not None:  # a flow run that has not begun has nothing to show
            self._thread.join(self._request_seconds)

    def _run(self, context: Callable[[], contextvars.Context]) -> None:
        """The thread: waits for the flow run, then writes its artifacts."""
        try:
            found = context()
        except BaseException as fault:  # the flow run never begins, which the command reports
            _LOGGER.debug("no artifacts, because there is no flow run", exc_info=fault)
            return
        found.run(self._open_store)
        if self._store is not None:
            found.run(self._work)

    def _open_store(self) -> None:
        from prefect.context import FlowRunContext  # in the thread, if there is one: a start does not wait for it

        flow_run = FlowRunContext.get()
        if self._store is None and flow_run is not None and flow_run.flow_run is not None:
            self._store = PrefectArtifacts(flow_run.flow_run.id, request_seconds=self._request_seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                while (wait := self._schedule.seconds_until_due(self._clock())) != 0 and not self._closing:
                    self._changed.wait(wait)
                last = self._closing
                due = self._schedule.take(self._clock(), last=last)
            try:
                while due:
                    self._update(due[0])
                    due.pop(0)
            except Exception as fault:  # noqa: BLE001 - no failure here may end the run; it is reported once
                self._warn(fault)
                with self._changed:
                    self._schedule.failed(due, self._clock())
            if last:
                return

    def _update(self, name: str) -> None:
        artifact = self._artifact(name)
        if artifact is not None and self._store is not None:
            self._store.put(artifact)

    def _artifact(self, name: str) -> Artifact | None:
        """The artifact in its current state; None if there is nothing to show yet."""
        home = self._log.home.uri
        if name == "report":
            return self._report() if self._log.home.exists(PAGE) else None
        if name == "progress" and not self._all and self._step is None:
            return None  # the parent flow run shows the committed progress
        if name == "progress" and self._step is not None and not (self._closing and self._all):
            target = self._training.target if self._training is not None else self._spec.train.known_target
            return progress_of(home, step=self._step, target=target, now=self._training)
        head = self._log.head()
        if name == "progress":
            tip = None if head is None else head.tip
            step = 0 if tip is None else tip.step
            known = self._spec if head is None else with_recorded_examples(self._spec, head.identity)
            newest = self._log.newest_seen()
            logged = None if newest is None or newest.totals is None else newest.totals.target
            return progress_of(home, step=step, target=known.train.target_ahead(step, logged), now=self._training)
        return None if head is None else self._curves() if name == "curves" else self._table(head)

    def _report(self) -> Artifact:
        if (head := self._log.head()) is not None:
            self._commits.update(head)
        curves = self._curves() if self._draws_curves else None
        return report_of(self._log.home.uri, commits=self._commits.rows(), curves=curves)

    def _table(self, head: Head) -> Artifact | None:
        self._commits.update(head)
        return commits_of(self._log.home.uri, self._commits) if self._commits.rows() else None

    def _curves(self) -> Artifact | None:
        if self._drawn is None:  # the training has ended, so they stay as they are
            self._drawn = curves_of(self._log.home.uri, tuple(self._log.entries(blocks="written")))
        return self._drawn

    def _warn(self, fault: Exception) -> None:
        _LOGGER.debug("the artifacts in Prefect are outdated", exc_info=fault)
        if not self._warned:
            self._warned = True
            reason = f"{type(fault).__name__}: {fault}".splitlines()[0]
            self._notes.emit(
                Note(text=f"the run's artifacts in Prefect are outdated ({reason}); training continues", warning=True)
            )
