"""A command sends the curves of its run to the tracker that the run file names, and needs none to train."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.flows.admit import Admitted, admit
from baton.flows.opened_run import OpenedRun
from baton.flows.relay import relay
from baton.flows.result import Goal, RelayResult
from baton.tasks.foundation.contracts.log_entry import SegmentRequest, SegmentResult
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import RunFileError
from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry import trackers
from tests.flows.test_relay import FakeRunner
from tests.foundation.telemetry.test_trackers import Recording
from tests.support.event_recorder import EventRecorder
from tests.support.fake_prefect_api import run_with_code
from tests.support.fake_run import FakeRun
from tests.support.training_child import Child
from tests.support.wandb_folder import in_folder


@pytest.fixture(autouse=True)
def _wait_for_slow_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_END_SECONDS", 300.0)
    monkeypatch.setattr(trackers, "LAST_SECONDS", 300.0)  # an earlier test of this process may have asked it to stop


@pytest.fixture(autouse=True)
def _service_of_wandb_is_for_this_process() -> Iterator[None]:
    yield
    os.environ.pop("WANDB_SERVICE", None)  # W&B sets it, and a process that has it writes its runs through this one


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return run_with_code(tmp_path)


def go(
    run: FakeRun, telemetry: EventRecorder, setting: str = "{}", steps: int = 300, tracker: str = "mlflow"
) -> RelayResult:
    def train_segment(request: SegmentRequest) -> SegmentResult:
        run.train(request.until_step)
        return SegmentResult.superseded(request)

    opened = OpenedRun.open(load_run_file(run.run_file(steps=steps), [f"tracking.{tracker}={setting}"]))
    admitted = admit(opened, Goal.of(opened.spec), telemetry=telemetry)
    if isinstance(admitted, RelayResult):
        return admitted
    assert isinstance(admitted, Admitted)
    return relay(admitted, FakeRunner(run, train_segment), telemetry=telemetry)


def logged(run: FakeRun) -> set[tuple[str, int]]:
    history = history_of(run.log.entries())
    points = {(f"train/{name}", row.step) for row in history.rows for name in row.metrics}
    return points | {(f"validation/{name}", e.checkpoint.step) for e in history.evaluations for name in e.metrics}


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """A tracker in memory instead of MLflow, which can be made to fail."""
    recording = Recording()
    monkeypatch.setattr(trackers, "_mlflow", lambda *_: recording)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: name if name == "mlflow" else find(name, *rest)
    )
    return recording


def test_tracker_has_everything_when_the_command_ends(run: FakeRun, tracker: Recording) -> None:
    assert go(run, EventRecorder()).step == 300
    assert len(tracker.points) == len(set(tracker.keys()))
    assert {(key.name, key.step) for key in set(tracker.keys())} >= logged(run)
    assert logged(run)


def test_finished_run_sends_what_is_missing(run: FakeRun, tracker: Recording) -> None:
    go(run, EventRecorder())
    whole = list(tracker.points)
    del tracker.points[2:]
    assert go(run, EventRecorder()).exit_reason == "nothing_to_do"
    assert sorted(map(repr, tracker.points)) == sorted(map(repr, whole))


def test_tracker_that_fails_does_not_end_the_run(run: FakeRun, tracker: Recording) -> None:
    tracker.left = 0
    recorder = EventRecorder()
    assert go(run, recorder).exit_reason == "complete"
    assert "the tracker is gone" in recorder.text
    assert "the next command on this run sends the rest" in recorder.text


@pytest.mark.parametrize(
    ("tracker", "setting", "package"), [("mlflow", "{}", "mlflow-skinny"), ("wandb", "{project: p}", "wandb")]
)
def test_missing_package_is_refused(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch, tracker: str, setting: str, package: str
) -> None:
    before = sorted(run.home.files(""))
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(RunFileError, match=f"package {tracker} is not installed here; install {package} "):
        go(run, EventRecorder(), setting, tracker=tracker)
    assert sorted(run.home.files("")) == before


@pytest.mark.slow
def test_mlflow_has_one_run_over_several_commands(run: FakeRun, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    go(run, EventRecorder(), f"{{uri: '{uri}', experiment: relays}}")
    assert go(run, EventRecorder(), f"{{uri: '{uri}', experiment: relays}}", steps=400).step == 400
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("relays")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    sent = [
        (name, each.step) for name in found.data.metrics for each in client.get_metric_history(found.info.run_id, name)
    ]
    assert len(sent) == len(set(sent))
    assert set(sent) >= logged(run)
    assert found.data.tags["baton.home"] == run.home.uri


@pytest.mark.slow
def test_wandb_has_one_offline_run_over_several_commands(run: FakeRun) -> None:
    home = Path(run.home.uri)
    for steps in (300, 400):
        assert go(run, EventRecorder(), "{project: relays}", steps, "wandb").step == steps
        written = in_folder(home)
        assert written[0] == run.log.entry(0).attempt
        sent = [(name, step) for name, step, _ in written[1]]
        assert len(sent) == len(set(sent))
        assert set(sent) >= logged(run)
    before = sorted(home.glob("wandb/offline-run-*/*"))
    assert go(run, EventRecorder(), "{project: relays}", 400, "wandb").exit_reason == "nothing_to_do"
    assert sorted(home.glob("wandb/offline-run-*/*")) == before


@pytest.mark.slow
def test_trackers_of_a_cancelled_run_lose_and_repeat_no_point(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("relays")
    lengths = ["train.steps=200", "train.segment_steps=20", "train.log_every_steps=10", "evaluate.every_steps=40"]
    trackers_of_run = [f"tracking.mlflow={{uri: '{uri}', experiment: relays}}", "tracking.wandb={project: relays}"]
    extra = [*lengths, *trackers_of_run, "model.options.width=8"]

    def start() -> Child:
        return Child("digits", tmp_path / "storage", extra=extra, notes=tmp_path)

    for commits, number in ((2, signal.SIGTERM), (5, signal.SIGINT)):
        child = start()
        assert child.until_commits(commits)
        child.process.send_signal(number)
        assert "Traceback" not in child.finish(3).stderr
    done = start().finish(0)
    home = Path(done.result["home"])
    log = RunLog(LocalStorage(home))
    entries = list(log.entries())
    points = sorted(
        (point.key.name, point.key.step) for point in trackers._points(entries, history_of(entries).lineage)
    )
    [found] = client.search_runs([experiment])
    of_mlflow = [
        (name, each.step) for name in found.data.metrics for each in client.get_metric_history(found.info.run_id, name)
    ]
    run, of_wandb = in_folder(home)
    assert run == log.entry(0).attempt
    assert sorted(of_mlflow) == points
    assert [(name, step) for name, step, _ in of_wandb] == points


def test_offline_run_needs_a_home_on_a_local_disk(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: name)
    settings = ["tracking.wandb={project: p}", "storage=memory://elsewhere"]
    opened = OpenedRun.open(load_run_file(run.run_file(steps=300), settings))
    with pytest.raises(RunFileError, match="storage is memory://elsewhere; take a folder on a local disk"):
        admit(opened, Goal.of(opened.spec), telemetry=EventRecorder())
