"""The artifacts show what the log has, training never waits for them, and the table of commits follows rewinds."""

import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.flows.opened_run import OpenedRun
from baton.flows.with_prefect.artifacts import (
    Artifact,
    ArtifactPublisher,
    commit_table,
    key_of,
    report_of,
)
from baton.tasks.evaluate.report.sections import Table
from baton.tasks.foundation.contracts.log_entry import Evaluation
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import BlowUp
from baton.tasks.foundation.log.appends import commit, quarantine, rewind
from baton.tasks.foundation.log.history import commit_of, history_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.telemetry.events import Committed, Evaluated, Note, Phase, Training
from baton.tasks.foundation.telemetry.formatting import metric_words
from tests.foundation.telemetry.test_tensorboard import REWINDS
from tests.support.clock import FakeClock
from tests.support.counting_storage import Counting
from tests.support.event_recorder import EventRecorder
from tests.support.fake_run import FakeRun
from tests.support.small_logs import begin, committing, evaluation, head_of, stage

A_LONG_TIME = 60.0


class FakeArtifactStore:
    """Stores artifacts in memory; can hang or fail like a server."""

    def __init__(self) -> None:
        self.written: list[Artifact] = []
        self.commits: list[int] = []  # whose event was emitted
        self.requests = threading.Semaphore(0)
        self.responds = threading.Event()
        self.responds.set()
        self.fault: Exception | None = None
        self.cancelled = False  # the flow run

    def put(self, artifact: Artifact) -> None:
        self.requests.release()
        assert self.responds.wait(A_LONG_TIME)
        if self.fault is not None:
            raise self.fault
        self.written.append(artifact)

    def emit_commit(self, step: int) -> None:
        self.commits.append(step)

    def is_cancelled(self) -> bool:
        return self.cancelled

    def newest(self, part: str) -> Artifact:
        return [artifact for artifact in self.written if artifact.key.endswith(part)][-1]

    def parts(self) -> list[str]:
        return [artifact.key.rpartition("-")[2] for artifact in self.written]

    def rows(self) -> list[dict[str, str]]:
        """The table of the newest page."""
        lines = [line for line in self.newest("report").data.splitlines() if line.startswith("| ")]
        headings, _, *rows = ([cell.strip().replace("\\", "") for cell in line.split("|")[1:-1]] for line in lines)
        return [dict(zip(headings, row, strict=True)) for row in rows]


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path).train(100, 200)
    run.evaluate(0.75)
    return run


def opened(run: FakeRun, **train: int) -> OpenedRun:
    return OpenedRun.open(load_run_file(run.run_file(**train)))  # its log remembers nothing yet


@contextmanager
def publisher(
    run: FakeRun,
    store: FakeArtifactStore,
    *,
    notes: EventRecorder | None = None,
    clock: FakeClock | None = None,
    request_seconds: float = A_LONG_TIME,
    on_cancelled: Callable[[], None] = lambda: None,
) -> Iterator[ArtifactPublisher]:
    sink = ArtifactPublisher(
        opened(run, steps=400),
        notes=notes or EventRecorder(),
        store=store,
        on_cancelled=on_cancelled,
        request_seconds=request_seconds,
        clock=clock or FakeClock(0.0),
    )
    with sink:
        yield sink


def training(step: int) -> Training:
    return Training(step=step, target=400, metrics={"loss": 0.5}, examples_per_second=1000.0)


def committed(step: int, path: str = "checkpoints/x") -> Committed:
    return Committed(step=step, path=path, size=1, metrics={})


def test_a_stage_publishes_only_progress(run: FakeRun) -> None:
    store = FakeArtifactStore()
    of = opened(run, steps=400)
    with ArtifactPublisher(of, only_progress=True, store=store, clock=FakeClock(0.0)) as sink:
        sink.emit(training(150))
        sink.emit(committed(150))
    with ArtifactPublisher(of, only_progress=True, store=store, clock=FakeClock(0.0)):
        pass  # the stage trained no step, and the parent flow run shows the committed progress
    assert (set(store.parts()), store.commits) == ({"progress"}, [])


def test_the_table_lists_every_commit_newest_first(run: FakeRun) -> None:
    run.home.write("report/index.html", b"<p>")
    store = FakeArtifactStore()
    with publisher(run, store) as sink:
        sink.emit(Phase(cause="train"))
        sink.emit(committed(200))
        sink.emit(Evaluated(step=200, metrics={"accuracy": 0.75}, examples=180))
    assert set(store.parts()) == {"progress", "report"}
    assert store.commits == [200]
    rows = store.rows()
    assert [row["step"] for row in rows] == ["200", "100", "0"]
    assert rows[0] | {"committed, UTC": "", "folder": ""} == {
        "step": "200",
        "training metrics": "loss 0.5, accuracy 0.5",
        "validation metrics": "accuracy 0.75",
        "ended by": "segment end",
        "size": "2.4 kB",
        "took": "2.5 s",
        "committed, UTC": "",
        "folder": "",
    }
    assert rows[1]["validation metrics"] == ""
    assert rows[2]["ended by"] == "initialized"
    progress = store.newest("progress")
    assert (progress.kind, progress.data) == ("progress", 50.0)
    assert progress.description == "step 200 of 400"
    assert f"`{run.address}/report/index.html`" in store.newest("report").data


def test_the_table_drops_a_quarantined_tip(run: FakeRun) -> None:
    store = FakeArtifactStore()
    with publisher(run, store) as sink:
        sink.emit(training(200))
        assert store.requests.acquire(timeout=A_LONG_TIME)
        quarantine(run.log, run.tip, "flipped", attempt="q" * 32)
        sink.emit(committed(100))
    assert [row["step"] for row in store.rows()] == ["100", "0"]
    assert store.newest("progress").data == 25.0


def test_progress_updates_are_throttled_and_the_last_is_written(run: FakeRun) -> None:
    store, clock = FakeArtifactStore(), FakeClock(0.0)
    with publisher(run, store, clock=clock) as sink:
        sink.emit(training(200))
        for _ in ("progress", "report"):  # the first update
            assert store.requests.acquire(timeout=A_LONG_TIME)
        for step in range(201, 300):
            sink.emit(training(step))
        sink.emit(committed(300, run.train(300).tip.path))
    bar = [(artifact.data, artifact.description) for artifact in store.written if artifact.kind == "progress"]
    assert bar == [
        (50.0, "step 200 of 400, loss 0.5, 1,000 examples/s"),
        (75.0, "step 300 of 400, loss 0.5, 1,000 examples/s"),
    ]


def test_the_progress_bar_follows_training_events(run: FakeRun) -> None:
    store, clock = FakeArtifactStore(), FakeClock(0.0)
    with publisher(run, store, clock=clock) as sink:
        sink.emit(training(200))
        for _ in ("progress", "report"):
            assert store.requests.acquire(timeout=A_LONG_TIME)
        clock.seconds = 15.0
        sink.emit(training(250))
        assert store.requests.acquire(timeout=A_LONG_TIME)
    assert [artifact.data for artifact in store.written if artifact.kind == "progress"] == [50.0, 62.5, 50.0]


def test_a_hanging_server_does_not_delay_the_run(run: FakeRun) -> None:
    store = FakeArtifactStore()
    store.responds.clear()
    with publisher(run, store, request_seconds=0.1) as sink:
        sink.emit(training(200))
        assert store.requests.acquire(timeout=A_LONG_TIME)
        for step in range(201, 400):
            sink.emit(training(step))
    assert store.written == []
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "baton-artifacts"] == [True]
    store.responds.set()


def test_a_server_outage_is_reported_once_and_recovered_from(run: FakeRun) -> None:
    store, clock, notes = FakeArtifactStore(), FakeClock(0.0), EventRecorder()
    store.fault = ConnectionError("refused")
    with publisher(run, store, notes=notes, clock=clock) as sink:
        sink.emit(training(200))
        assert store.requests.acquire(timeout=A_LONG_TIME)
        for _ in range(1000):  # until the pause is over
            clock.seconds += 100.0
            sink.emit(committed(200))
            if store.requests.acquire(timeout=A_LONG_TIME / 1000):
                break
        store.fault = None
    warnings = [event.text for event in notes.events if isinstance(event, Note) and event.warning]
    assert warnings == ["the run's artifacts in Prefect are outdated (ConnectionError: refused); training continues"]
    assert [row["step"] for row in store.rows()] == ["200", "100", "0"]


def test_a_flow_run_that_was_cancelled_is_noticed_after_a_commit(run: FakeRun) -> None:
    store, clock, noticed = FakeArtifactStore(), FakeClock(0.0), threading.Event()
    store.cancelled = True
    with publisher(run, store, clock=clock, on_cancelled=noticed.set) as sink:
        clock.seconds = 100.0
        sink.emit(committed(200))
        assert noticed.wait(A_LONG_TIME)


def test_an_unreadable_log_is_reported_once(run: FakeRun) -> None:
    store, notes = FakeArtifactStore(), EventRecorder()
    run.path("log/00000001.json").write_text("{")
    with publisher(run, store, notes=notes) as sink:
        sink.emit(committed(200))
    assert set(store.parts()) <= {"progress"}  # the newest entry can be read
    assert len(notes.events) == 1


@pytest.mark.parametrize("loser", ["never committed", "committed before", "saw the winner end"])
def test_the_loser_of_a_race_writes_no_artifact(run: FakeRun, loser: str) -> None:
    """Prefect shows the newest artifact of a key, and the loser's would be of a run that it does not train."""
    store, alive = FakeArtifactStore(), {"alive": datetime.now(UTC).isoformat()}
    with publisher(run, store) as sink:
        if loser == "committed before":
            sink.emit(committed(300, run.train(300).tip.path))
            for _ in ("progress", "report"):
                assert store.requests.acquire(timeout=A_LONG_TIME)
        for name in ("winner", "loser"):
            run.attempt(name, **alive)
        if loser != "saw the winner end":
            sink.emit(training(350))
        run.train(350)
        run.attempt("loser", **alive, ended="StaleWriter")
        if loser == "saw the winner end":
            run.attempt("winner", **alive, ended="complete")
        written = len(store.written)
    assert len(store.written) == (written if loser == "committed before" else 0)


def test_a_failed_run_says_why_first(run: FakeRun) -> None:
    run.home.write("report/index.html", b"<p>")
    store = FakeArtifactStore()
    with publisher(run, store) as sink:
        sink.emit(training(250))
        run.attempt("a", alive=datetime.now(UTC).isoformat(), ended="NonFinite", message="the loss is not finite")
    words = "failed: NonFinite: the loss is not finite"
    assert store.newest("progress").description.startswith(f"{words}, step 200 of 400")
    assert store.newest("report").data.startswith(f"**{words}**\n\n")


def test_a_new_run_has_progress_zero(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    store = FakeArtifactStore()
    new = OpenedRun.open(load_run_file(run.run_file(), ["run=other"]))
    with ArtifactPublisher(new, store=store, clock=FakeClock(0.0)):
        pass
    assert {artifact.key: artifact.data for artifact in store.written} == {key_of(new.home.uri, "progress"): 0.0}
    assert not run.path("../other").exists()


def test_nothing_is_published_outside_a_flow_run(run: FakeRun) -> None:
    with ArtifactPublisher(opened(run)) as sink:
        sink.emit(training(1))
    assert not [thread for thread in threading.enumerate() if thread.name == "baton-artifacts"]


@pytest.mark.parametrize("name", ["digits-cnn", "A_b.c", "a-b-c", "A", "9", "x" * 100, "a--b", "a_", "_"])
def test_keys_are_valid_and_unique_per_home(name: str) -> None:
    from prefect.client.schemas.actions import ArtifactCreate

    homes = [f"gs://bucket/{name}", f"gs://bucket/{name}.", f"gs://other/{name}", f"/runs/{name}"]
    keys = [key_of(home, "report") for home in homes]
    assert [ArtifactCreate(key=key, type="markdown").key for key in keys] == keys
    assert len(set(keys)) == len(homes)


def test_a_key_has_the_name_of_the_run() -> None:
    assert re.fullmatch("digits-cnn-[0-9a-f]{6}-report", key_of("/runs/digits-cnn", "report"))


def test_the_report_is_a_link_only_for_cloud_storage() -> None:
    def page(home: str) -> str:
        return str(report_of(home, Table(headings=("step",), rows=()), is_written=True, standing="").data)

    assert "(https://storage.cloud.google.com/bucket/a%20prefix/r/report/index.html)" in page("gs://bucket/a prefix/r")
    assert "](" not in page("/data/r")


SMALL = 4


def new_log() -> RunLog:
    return begin(MemoryStorage(uuid.uuid4().hex))


def train(log: RunLog) -> None:
    tip = head_of(log).tip
    assert tip is not None
    staged = stage(log.home, tip.step + 10, head_of(log).base, uuid.uuid4().hex)
    commit(log, committing(staged, parent=tip.path))


def evaluate(log: RunLog, back: int = 0) -> None:
    """Evaluate a commit that leads to the tip, `back` commits before it."""
    commits = history_of(log.entries()).commits
    checkpoint = commit_of(commits[max(len(commits) - 1 - back, 0)]).checkpoint
    log.append(lambda _: evaluation(checkpoint, keep_best=None, loss=checkpoint.step / 8), attempt="evaluator")


def go_back(log: RunLog) -> None:
    head = head_of(log)
    assert head.tip is not None
    if head.tip.step:
        with suppress(BlowUp):  # after too many in a row
            rewind(log, BlowUp("up", step=head.tip.step), base=head.base, spec=REWINDS, attempt="steersman")


def lose_tip(log: RunLog) -> None:
    head = head_of(log)
    if head.tip is not None and len(head.retained) > 1:
        quarantine(log, head.tip, "crc32c differs", attempt="doctor")


ACTIONS = {
    "train": train,
    "evaluate": evaluate,
    "evaluate late": lambda log: evaluate(log, back=1),
    "go back": go_back,
    "lose": lose_tip,
}


def expected(log: RunLog) -> list[tuple[object, object]]:
    history = history_of(log.entries())
    evaluated: dict[str, Evaluation] = {each.checkpoint.path: each for each in history.evaluations}
    rows: list[tuple[object, object]] = []
    for entry in history.commits[-SMALL:][::-1]:
        ref = commit_of(entry).checkpoint
        rows.append((str(ref.step), metric_words(evaluated[ref.path].metrics) if ref.path in evaluated else ""))
    return rows


@example([["train"] * 4, ["go back"]])
@given(st.lists(st.lists(st.sampled_from(sorted(ACTIONS)), max_size=4), max_size=6))
def test_rows_are_the_newest_of_the_history(turns: list[list[str]]) -> None:
    log = new_log()
    for turn in turns:
        for action in turn:
            ACTIONS[action](log)
        assert [(row[0], row[2]) for row in commit_table(log, head_of(log), most=SMALL).texts[1:]] == expected(log)


@pytest.mark.parametrize("commits", [10, 150])
def test_update_reads_only_new_entries(commits: int) -> None:
    log = new_log()
    for _ in range(commits):
        train(log)
    store = Counting(log.home)
    reader = RunLog(store)
    commit_table(reader, head_of(log))
    # The newest entries, and the files that they refer to.
    assert min(commits + 1, 100) <= store.calls["read"] <= min(commits + 1, 100) + 2
    evaluate(log)
    train(log)
    head = head_of(log)
    store.calls.clear()
    assert len(commit_table(reader, head).rows) == min(commits + 2, 100)
    assert store.calls == {"read": 2}
