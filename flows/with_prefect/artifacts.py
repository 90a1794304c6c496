"""The artifacts that show a run in Prefect's UI, made from its log, and the sink that keeps them up to date.

They are a progress bar and one page, which links to the run's report and has a table of the newest commits.

A commit is also an event of the flow run, `baton.commit`, so that an automation notices when none comes. After it, the
state of the flow run is read: if it was cancelled, the training stops. A worker tells its processes, but may be gone.

Of two processes that race for one home, the one that commits writes the artifacts: Prefect shows the newest of a key.

Training never waits for it. Artifacts are not queued: each is made from the last training event and the run's log at
the time when it is written. So memory does not grow while the server is down, and a late artifact is still correct.
An update costs the same however long the log is.
"""

import contextvars
import hashlib
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar
from urllib.parse import quote
from uuid import UUID

from baton.flows.facts import RunFacts, RunStatus
from baton.flows.opened_run import OpenedRun
from baton.tasks.evaluate.report.page import PAGE
from baton.tasks.evaluate.report.sections import Cell, Table, checkpoint_cells, number
from baton.tasks.foundation.contracts.log_entry import Head
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.log.attempts import is_alive
from baton.tasks.foundation.log.history import commit_of, newest_commits
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.telemetry.events import Committed, Evaluated, Event, Note, Silent, Sink, Training
from baton.tasks.foundation.telemetry.formatting import duration_words, metric_words, step_words
from baton.tasks.foundation.text import counted

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient


T = TypeVar("T")
MOST_ROWS: Final = 100
# Limit of one request, and of the last update when the run ends.
_REQUEST_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 30.0  # without a request, after a failure
# The shortest time between two updates. Artifacts are written in this order.
_INTERVAL_SECONDS: Final = 15.0
_PARTS: Final = ("progress", "report")
# Opens an object in the browser, if the user may read it.
_CONSOLE = "https://storage.cloud.google.com/"
COMMIT_EVENT: Final = "baton.commit"


_COLUMNS: Final = (
    *("step", "training metrics", "validation metrics", "ended by", "size", "took", "committed, UTC", "folder"),
)


def commit_table(log: RunLog, head: Head, most: int = MOST_ROWS) -> Table:
    """The newest commits that lead to the tip, newest first, in the cells of the report's table.

    The log remembers the entries that it has read, so an update reads the new ones only, however long the log is.

    Args:
        most: the number of rows.

    Raises:
        BatonError: an entry cannot be read.
    """
    rows = [
        {
            **checkpoint_cells(entry),
            "validation metrics": Cell("" if found is None else metric_words(found.metrics, between=", ")),
            "took": number(duration_words(sum(seconds.values())) if seconds else ""),
        }
        for entry, found in islice(newest_commits(log, head), most)
        for seconds in [commit_of(entry).seconds]
    ]
    return Table(headings=_COLUMNS, rows=[[row[name] for name in _COLUMNS] for row in rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """The content of one artifact.

    Attributes:
        key: lower-case letters, digits and dashes; the same key updates the same artifact.
        kind: how the UI shows `data`.
        data: as Prefect stores it: a percentage, or Markdown.
        description: one line.
    """

    key: str
    kind: Literal["progress", "markdown"]
    data: Any
    description: str


def key_of(home: str, part: str) -> str:
    """Return the key of a run's artifact: the run's name, a digest of its home's address, and the part.

    Prefect shows all artifacts of one key as versions of one thing, so runs of one name in two storages need two keys.

    Args:
        home: address of the run's home, whose last part is the run's name.
        part: name of the artifact, such as "progress".
    """
    name = re.sub(r"[^a-z0-9]+", "-", _run_of(home).lower()).strip("-")
    return f"{name}-{hashlib.sha256(home.encode()).hexdigest()[:6]}-{part}".lstrip("-")


def _run_of(home: str) -> str:
    return home.rpartition("/")[2]


def progress_of(
    home: str, *, step: int, target: int | None, epoch: float | None, now: Training | None, standing: str = ""
) -> Artifact:
    """Make the progress bar: the step in per cent of the target.

    Args:
        home: address of the run's home.
        step: the newest step, committed or not.
        target: the step to train to; None if it is not known yet.
        epoch: epochs that are done; None if it is not known.
        now: the last training event in this process; None if there was none.
        standing: the state and its cause, if the run has ended before its target.
    """
    words = [*filter(None, [standing]), step_words(step, target, epoch)]
    if now is not None and now.metrics:
        words.append(metric_words(now.metrics, between=", "))
    if now is not None and target is not None and step < target:
        words.append(f"{now.examples_per_second:,.0f} examples/s")
    percent = 0.0 if target is None else min(100.0, 100.0 * step / target)
    return Artifact(key=key_of(home, "progress"), kind="progress", data=percent, description=", ".join(words))


def report_of(home: str, commits: Table, *, is_written: bool, standing: str) -> Artifact:
    """Make the page: why the run has ended, where its report is, and a table of its commits.

    The report is a link on Cloud Storage; on a local disk a path, to which no web page can link.

    Args:
        home: address of the run's home, gs://… or a path.
        commits: see `commit_table`.
        is_written: whether the home has a report.
        standing: the state and its cause, if the run has ended before its target; empty if not.
    """
    run, address, count = _run_of(home), f"{home}/{PAGE}", len(commits.rows)
    place = f"The report of {run} is a file on the disk that the run is kept on:"
    if address.startswith("gs://"):
        place = f"[report of {run}]({_CONSOLE}{quote(address.removeprefix('gs://'))})"
    parts = [f"**{_escaped(standing)}**" if standing else "", f"{place}\n\n`{address}`" if is_written else ""]
    shown = ("the newest " if count == MOST_ROWS else "") + counted(count, "commit")
    text = "\n\n".join(filter(None, [*parts, _markdown(commits)]))
    return Artifact(key=key_of(home, "report"), kind="markdown", data=text, description=f"{shown} of {run}")


def _markdown(table: Table) -> str:
    headings, *rows = ([_escaped(text) for text in row] for row in table.texts)
    aligned = ["---:" if place in table.numbers else "---" for place in range(len(headings))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, aligned, *rows))


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|!])", r"\\\1", " ".join(masked(text).split()))


class PrefectArtifacts:
    """Stores the artifacts of one flow run through Prefect's API, retrying as its settings say. Not thread-safe."""

    def __init__(self, flow_run_id: UUID, *, request_seconds: float) -> None:
        """Make no request yet.

        Args:
            flow_run_id: the flow run that the artifacts belong to.
            request_seconds: limit of one request.
        """
        self._flow_run_id = flow_run_id
        self._request_seconds = request_seconds
        self._ids: dict[str, UUID] = {}
        self._client: SyncPrefectClient | None = None

    def put(self, artifact: Artifact) -> None:
        """Create or update an artifact.

        Raises:
            Exception: any error of the API or the connection.
        """
        self._request(lambda client: self._put(client, artifact))

    def is_cancelled(self) -> bool:
        """Whether somebody has cancelled the flow run.

        Raises:
            Exception: any error of the API or the connection.
        """
        state = self._request(lambda client: client.read_flow_run(self._flow_run_id)).state
        return state is not None and state.type.value in {"CANCELLING", "CANCELLED"}

    def _request(self, work: "Callable[[SyncPrefectClient], T]") -> T:
        from prefect.client.orchestration import get_client

        if self._client is None:
            # The engine's client would wait a minute for a server that is down.
            client = get_client(httpx_settings={"timeout": self._request_seconds}, sync_client=True)
            self._client = client.__enter__()
        try:
            return work(self._client)
        except Exception:
            client, self._client = self._client, None
            client.__exit__(None, None, None)
            raise

    def _put(self, client: "SyncPrefectClient", artifact: Artifact) -> None:
        from prefect.client.schemas.actions import ArtifactCreate
        from prefect.exceptions import PrefectHTTPStatusError

        artifact_id = self._ids.get(artifact.key) or self._from_earlier_process(client, artifact)
        if artifact_id is not None:
            changed = {"data": artifact.data, "description": artifact.description}
            try:
                # `client.update_artifact` would also send an event with all the data.
                client.request("PATCH", "/artifacts/{id}", json=changed, path_params={"id": artifact_id})
            except PrefectHTTPStatusError as fault:
                if fault.response.status_code != HTTPStatus.NOT_FOUND:
                    raise  # after a 404 the database is new, and the artifact is created again
            else:
                self._ids[artifact.key] = artifact_id
                return
        created = client.create_artifact(
            ArtifactCreate(
                key=artifact.key,
                type=artifact.kind,
                data=artifact.data,
                description=artifact.description,
                flow_run_id=self._flow_run_id,
            )
        )
        self._ids[artifact.key] = created.id

    def emit_commit(self, step: int) -> None:
        """Emit the event of a commit; Prefect sends it in a thread of its own."""
        from prefect.events import emit_event

        flow_run = {"prefect.resource.id": f"prefect.flow-run.{self._flow_run_id}"}
        emit_event(COMMIT_EVENT, flow_run, payload={"step": step})

    def _from_earlier_process(self, client: "SyncPrefectClient", artifact: Artifact) -> UUID | None:
        """Id of the artifact that an earlier process of the same flow run created; None if there is none."""
        from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey

        wanted = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id]), key=ArtifactFilterKey(any_=[artifact.key])
        )
        found = client.read_artifacts(artifact_filter=wanted, limit=1)
        return found[0].id if found else None


class ArtifactPublisher:
    """A `Sink` that keeps the artifacts of a flow run up to date; outside a flow run it does nothing.

    Use it as a context manager: on exit it writes the last state, if the server accepts it within a few seconds.
    """

    def __init__(
        self,
        run: OpenedRun,
        *,
        only_progress: bool = False,
        notes: Sink = Silent(),  # noqa: B008 - Silent has no state
        store: PrefectArtifacts | None = None,
        on_cancelled: Callable[[], None] = lambda: None,
        request_seconds: float = _REQUEST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read and request nothing yet.

        Args:
            run: the run; its log may be read in several threads.
            only_progress: for a stage's flow run, whose parent shows the other artifacts.
            notes: receives one warning if Prefect's API does not accept artifacts.
            store: stores the artifacts; None: Prefect's API, for the flow run of the context.
            on_cancelled: called in the thread, after each commit, if the flow run was cancelled.
            request_seconds: limit of one request, and of the last update.
            clock: monotonic time in seconds.
        """
        self._of = run  # whose artifacts they are
        self._log = run.log
        self._notes = notes
        self._store = store
        self._on_cancelled = on_cancelled
        self._request_seconds = request_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._only_progress = only_progress
        self._outdated: set[str] = set()
        self._not_before = float("-inf")  # by the clock
        self._training: Training | None = None
        self._step: int | None = None
        self._commit: int | None = None  # step of a commit whose event is not emitted yet
        self._began = -1  # the base of the head when this process began; -1 without a log
        self._own: set[str] = set()  # paths of the checkpoints that this process committed
        self._closing = False
        self._warned = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        from prefect.context import FlowRunContext
        from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

        flow_run = FlowRunContext.get()
        if self._store is None and flow_run is not None and flow_run.flow_run is not None:
            self._store = PrefectArtifacts(flow_run.flow_run.id, request_seconds=self._request_seconds)
        if self._store is not None:
            # No request of the thread is retried. The setting is changed once, in its copy of the context: that takes
            # Prefect 0.05 s. A daemon thread never delays the exit.
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
                work = contextvars.copy_context().run
            self._thread = threading.Thread(target=work, args=(self._work,), name="baton-artifacts", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def emit(self, event: Event) -> None:
        """Mark the artifacts that an event changes; the thread writes them. Never raises."""
        match event:
            case Training():  # the first one shows the state of a continued run
                parts: tuple[str, ...] = ("progress",) if self._training else _PARTS
            case Committed():
                parts = _PARTS
            case Evaluated():
                parts = ("report",)
            case _:
                return
        with self._changed:
            if isinstance(event, Training):
                self._training = event
            if isinstance(event, Training | Committed):
                self._step = event.step
            if isinstance(event, Committed):
                self._own.add(event.path)
            if isinstance(event, Committed) and not self._only_progress:
                self._commit = event.step
            self._mark(*parts)
            self._changed.notify()

    def _mark(self, *parts: str) -> None:
        self._outdated.update({"progress"}.intersection(parts) if self._only_progress else parts)

    def close(self) -> None:
        """Write the last state, if the server accepts it within the limit. Later events are dropped."""
        with self._changed:
            self._closing = True
            self._mark(*_PARTS)
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(self._request_seconds)

    def _work(self) -> None:
        with suppress(BatonError):  # which the first update reports
            head = self._log.head()
            self._began = -1 if head is None else head.base
        while True:
            with self._changed:
                while not self._closing and (wait := self._seconds_until_due()) != 0:
                    self._changed.wait(wait)
                last = self._closing
                due = [name for name in _PARTS if name in self._outdated]
                self._outdated.clear()
                self._not_before = self._clock() + _INTERVAL_SECONDS
            try:
                if due and not self._is_ours():
                    due = [name for name in due if name == "report" and self._commit is not None]
                while due:
                    self._update(due[0])
                    due.pop(0)
            except Exception as fault:  # noqa: BLE001 - no failure here may end the run; it is reported once
                self._warn(fault)
                with self._changed:
                    self._outdated.update(due)
                    self._not_before = self._clock() + _PAUSE_SECONDS
            if last:
                return

    def _seconds_until_due(self) -> float | None:
        """None if nothing is outdated."""
        return max(0.0, self._not_before - self._clock()) if self._outdated else None

    def _is_ours(self) -> bool:
        """Whether no other process has committed since this one began, nor trains the run while this one has not."""
        head = self._log.head()
        tip = None if head is None else head.tip
        if tip is not None and tip.path not in self._own and tip.base >= self._began:
            return False
        if self._own:
            return True
        records, now = self._of.attempts.read().records, datetime.now(UTC)
        alive = sum(record.within is None and is_alive(record, now=now) for record in records)
        return alive <= (0 if self._closing and not self._only_progress else 1)  # its own

    def _update(self, name: str) -> None:
        artifact = self._artifact(name)
        if artifact is not None and self._store is not None:
            self._store.put(artifact)
        if name == "report" and self._store is not None:
            with self._changed:
                step, self._commit = self._commit, None
            if step is not None:
                self._store.emit_commit(step)
                if not self._closing and self._store.is_cancelled():
                    self._on_cancelled()

    def _artifact(self, name: str) -> Artifact | None:
        """The artifact in its current state; None if there is nothing to show yet."""
        if name == "progress":
            return self._progress()
        home, head = self._log.home, self._log.head()
        if head is None:
            return None
        commits, is_written = commit_table(self._log, head), home.exists(PAGE)
        return report_of(home.uri, commits, is_written=is_written, standing=self._standing())

    def _progress(self) -> Artifact | None:
        """The step in training; or the committed one, before the training and after it."""
        home, now, step = self._log.home.uri, self._training, self._step
        if step is not None and (self._only_progress or not self._closing):
            target = self._of.spec.train.known_target if now is None else now.target
            epoch = now.epoch if now is not None and now.step == step else None
            return progress_of(home, step=step, target=target, epoch=epoch, now=now)
        if self._only_progress:
            return None  # the parent flow run shows the committed progress
        newest = self._log.newest()
        if newest is None:
            return progress_of(home, step=0, target=self._of.spec.train.known_target, epoch=None, now=now)
        facts = RunFacts.of(self._of, newest)
        return progress_of(
            home, step=facts.step, target=facts.target_of_command, epoch=facts.epoch, now=now, standing=self._standing()
        )

    def _standing(self) -> str:
        """`failed: NonFinite: …`; empty while it trains, which costs no reading, and if it has no cause to be there."""
        if not self._closing:
            return ""
        status = RunStatus.read(self._of)
        return f"{status.state}: {status.cause}" if status.cause else ""

    def _warn(self, fault: Exception) -> None:
        if not self._warned:
            self._warned = True
            reason = f"{type(fault).__name__}: {fault}".splitlines()[0]
            text = f"the run's artifacts in Prefect are outdated ({reason}); training continues"
            self._notes.emit(Note(text=text, warning=True))
