"""What is shown of a run: what it says, how often, and that nothing waits for it."""

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.prefect_ui.artifact_publisher import ArtifactPublisher, Pace
from flows.prefect_ui.artifacts import Artifact, key_of, report_of
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.runlog.commits import quarantine
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Committed, Evaluated, Event, Note, Phase, Training
from tests.support.fake_run import FakeRun

A_LONG_TIME = 60.0


class Wall:
    """A board that keeps what is put up, and does what a server may do."""

    def __init__(self) -> None:
        self.put_up: list[Artifact] = []
        self.asked = threading.Semaphore(0)
        self.answers = threading.Event()
        self.answers.set()
        self.fault: Exception | None = None

    def put(self, artifact: Artifact) -> None:
        self.asked.release()
        assert self.answers.wait(A_LONG_TIME)
        if self.fault is not None:
            raise self.fault
        self.put_up.append(artifact)

    def newest(self, part: str) -> Artifact:
        return [artifact for artifact in self.put_up if artifact.key.endswith(part)][-1]

    def keys(self) -> list[str]:
        return [artifact.key for artifact in self.put_up]


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Heard:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path).train(100, 200)
    run.evaluate(0.75)
    return run


@contextmanager
def shown(
    run: FakeRun, wall: Wall, *, said: Heard | None = None, clock: Clock | None = None, patience: float = A_LONG_TIME
) -> Iterator[ArtifactPublisher]:
    spec = load_run_file(run.run_file(steps=400)).spec
    sink = ArtifactPublisher(
        spec, run.home, said=said or Heard(), board=wall, patience_seconds=patience, clock=clock or Clock()
    )
    with sink:
        yield sink


def training(step: int) -> Training:
    return Training(step=step, target=400, metrics={"loss": 0.5}, examples_per_second=1000.0)


def committed(step: int) -> Committed:
    return Committed(step=step, path="checkpoints/x", size=1, metrics={})


def test_each_artifact_is_due_when_it_is_behind_and_not_more_often_than_it_should_be() -> None:
    pace = Pace()
    assert pace.take(0.0) == []
    assert pace.seconds_until_due(0.0) is None
    pace.mark(["curves", "progress"])
    assert pace.seconds_until_due(0.0) == 0
    assert pace.take(0.0) == ["progress", "curves"]
    pace.mark(["progress", "curves"])
    assert pace.seconds_until_due(1.0) == 4.0
    assert pace.take(4.9) == []
    assert pace.take(5.0) == ["progress"]
    assert pace.seconds_until_due(5.0) == 55.0
    assert pace.take(5.0, last=True) == ["curves"]


def test_a_stage_shows_its_progress_only(run: FakeRun) -> None:
    wall = Wall()
    spec = load_run_file(run.run_file(steps=400)).spec
    with ArtifactPublisher(spec, run.home, parts=("progress",), board=wall, clock=Clock()) as sink:
        sink.emit(training(150))
        sink.emit(committed(150))
    with ArtifactPublisher(spec, run.home, parts=("progress",), board=wall, clock=Clock()):
        pass  # trained nothing: what the log says is its parent's to show
    assert set(wall.keys()) == {"digits-progress"}


def test_what_could_not_be_written_is_behind_still_and_the_server_has_its_rest() -> None:
    pace = Pace()
    pace.mark(["progress", "commits"])
    pace.failed(pace.take(0.0), 0.0)
    pace.mark(["report"])
    assert pace.take(29.9) == []
    assert pace.take(30.0) == ["progress", "commits", "report"]


def test_the_whole_history_is_shown_newest_first_with_what_came_of_each_commit(run: FakeRun) -> None:
    pytest.importorskip("matplotlib")
    run.home.write("report/index.html", b"<p>")
    wall = Wall()
    with shown(run, wall) as sink:
        sink.emit(Phase(cause="train"))
        sink.emit(committed(200))
        sink.emit(Evaluated(step=200, metrics={"accuracy": 0.75}, examples=180))
    assert set(wall.keys()) == {"digits-progress", "digits-commits", "digits-report", "digits-curves"}
    rows = json.loads(wall.newest("commits").data)
    assert [row["step"] for row in rows] == [200, 100, 0]
    assert rows[0] | {"committed, UTC": "", "checkpoint": ""} == {
        "step": 200,
        "training": "loss 0.5, accuracy 0.5",
        "validation": "accuracy 0.75",
        "ended by": "segment end",
        "size": "2.4 kB",
        "took": "2.5 s",
        "committed, UTC": "",
        "checkpoint": "",
    }
    assert rows[1]["validation"] == ""
    assert rows[2]["ended by"] == "initialized"
    progress = wall.newest("progress")
    assert (progress.kind, progress.data) == ("progress", 50.0)
    assert progress.description == "step 200 of 400"
    assert wall.newest("curves").data.count("](data:image/png;base64,iVBORw0KGgo") == 3
    assert f"`{run.address}/report/index.html`" in wall.newest("report").data


def test_the_table_follows_the_log_back_when_a_tip_was_no_good(run: FakeRun) -> None:
    wall = Wall()
    with shown(run, wall) as sink:
        assert wall.asked.acquire(timeout=A_LONG_TIME)
        quarantine(run.log, run.tip, "flipped", attempt="q" * 32)
        sink.emit(committed(100))
    assert [row["step"] for row in json.loads(wall.newest("commits").data)] == [100, 0]
    assert wall.newest("progress").data == 25.0


def test_training_moves_the_bar_at_most_once_in_a_few_seconds_and_the_end_is_told(run: FakeRun) -> None:
    wall, clock = Wall(), Clock()
    with shown(run, wall, clock=clock) as sink:
        for _ in ("progress", "commits"):  # as it stood
            assert wall.asked.acquire(timeout=A_LONG_TIME)
        for step in range(201, 300):
            sink.emit(training(step))
        run.train(300)
    bar = [(artifact.data, artifact.description) for artifact in wall.put_up if artifact.kind == "progress"]
    assert bar == [(50.0, "step 200 of 400"), (75.0, "step 300 of 400, loss 0.5, 1,000 examples/s")]


def test_the_bar_moves_with_what_training_says(run: FakeRun) -> None:
    wall, clock = Wall(), Clock()
    with shown(run, wall, clock=clock) as sink:
        for _ in ("progress", "commits"):
            assert wall.asked.acquire(timeout=A_LONG_TIME)
        clock.now = 5.0
        sink.emit(training(250))
        assert wall.asked.acquire(timeout=A_LONG_TIME)
    assert [artifact.data for artifact in wall.put_up if artifact.kind == "progress"] == [50.0, 62.5, 50.0]


def test_a_server_that_hangs_keeps_nobody(run: FakeRun) -> None:
    wall = Wall()
    wall.answers.clear()
    with shown(run, wall, patience=0.1) as sink:
        assert wall.asked.acquire(timeout=A_LONG_TIME)
        for step in range(201, 400):
            sink.emit(training(step))
    assert wall.put_up == []
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "baton-shown"] == [True]
    wall.answers.set()


def test_a_server_that_is_away_is_said_once_and_used_again_when_it_is_back(run: FakeRun) -> None:
    wall, clock, said = Wall(), Clock(), Heard()
    wall.fault = ConnectionError("refused")
    with shown(run, wall, said=said, clock=clock) as sink:
        assert wall.asked.acquire(timeout=A_LONG_TIME)
        for _ in range(1000):  # until its rest is over
            clock.now += 100.0
            sink.emit(committed(200))
            if wall.asked.acquire(timeout=A_LONG_TIME / 1000):
                break
        wall.fault = None
    warnings = [event.text for event in said.events if isinstance(event, Note) and event.warning]
    assert warnings == ["what Prefect shows of the run is behind (ConnectionError: refused); training goes on"]
    assert [row["step"] for row in json.loads(wall.newest("commits").data)] == [200, 100, 0]


def test_a_log_that_cannot_be_read_is_said_and_ends_nothing(run: FakeRun) -> None:
    wall, said = Wall(), Heard()
    run.path("log/00000001.json").write_text("{")
    with shown(run, wall, said=said) as sink:
        sink.emit(committed(200))
    assert wall.put_up == []
    assert len(said.events) == 1


def test_without_matplotlib_there_are_no_curves_and_all_the_rest(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    wall, said = Wall(), Heard()
    with (
        caplog.at_level(logging.DEBUG, logger="flows.prefect_ui.artifact_publisher"),
        shown(run, wall, said=said) as sink,
    ):
        sink.emit(committed(200))
    assert set(wall.keys()) == {"digits-progress", "digits-commits"}
    assert said.events == []
    assert len([record for record in caplog.records if "cannot be drawn" in record.message]) == 1


def test_a_run_that_has_not_begun_has_a_bar_at_nothing(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    nothing: Storage = run.root.at("other")
    wall = Wall()
    spec = load_run_file(run.run_file()).spec
    with ArtifactPublisher(spec, nothing, board=wall, clock=Clock()):
        pass
    assert {artifact.key: artifact.data for artifact in wall.put_up} == {"digits-progress": 0.0}
    assert not run.path("../other").exists()


def test_outside_of_a_flow_run_nothing_is_shown(run: FakeRun) -> None:
    with ArtifactPublisher(load_run_file(run.run_file()).spec, run.home) as sink:
        sink.emit(training(1))
    assert not [thread for thread in threading.enumerate() if thread.name == "baton-shown"]


@pytest.mark.parametrize("name", ["digits-cnn", "A_b.c", "a-b-c", "A", "9", "x" * 100, "a--b", "a_"])
def test_keys_are_what_prefect_takes_and_differ_as_the_names_do(name: str) -> None:
    from prefect.client.schemas.actions import ArtifactCreate

    key = key_of(name, "commits")
    assert ArtifactCreate(key=key, type="table").key == key
    assert key != key_of(f"{name}.", "commits")


def test_a_name_that_is_a_key_stays_as_it_is() -> None:
    assert key_of("digits-cnn", "curves") == "digits-cnn-curves"


def test_the_report_is_a_link_where_a_browser_can_follow_one() -> None:
    there = report_of("r", "gs://bucket/a prefix/r/report/index.html")
    assert "(https://storage.cloud.google.com/bucket/a%20prefix/r/report/index.html)" in there.data
    assert "](" not in report_of("r", "/data/r/report/index.html").data
