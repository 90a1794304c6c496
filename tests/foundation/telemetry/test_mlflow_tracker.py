"""MLflow's own SQLite store has the curves of the log, in one active run."""

import uuid
from pathlib import Path

import pytest

from baton.tasks.foundation.telemetry.trackers import Point, PointKey

pytestmark = pytest.mark.slow  # MLflow makes the tables of its store


def point(name: str, step: int, value: float, at: int = 1000) -> Point:
    return Point(PointKey(name, step, at), value)


def test_mlflow_has_one_active_run_with_each_point_once(tmp_path: Path) -> None:
    import mlflow

    from baton.tasks.foundation.telemetry.trackers import MlflowTracker

    uri, run = f"sqlite:///{tmp_path}/mlflow.db", uuid.uuid4().hex

    def another_process() -> MlflowTracker:
        return MlflowTracker(run=run, name="digits", home="/runs/digits", uri=uri, experiment="baton")

    client = mlflow.MlflowClient(tracking_uri=uri)

    def active() -> list[str]:
        experiment = client.get_experiment_by_name("baton")
        return [each.info.run_id for each in client.search_runs([experiment.experiment_id])]

    first = another_process()
    assert set(first.keys()) == set()
    points = [point("train/loss", step, 1 / step) for step in range(1, 1203)]
    points += [point("train/loss", 1203, float("nan")), point("validation/inner/acc_1_", 10, float("inf"))]
    first.send(points)
    [run_id] = active()
    assert set(another_process().keys()) == {each.key for each in points}
    assert client.get_run(run_id).info.run_name == "digits"
    another_process().send([point("train/loss", 2000, 0.25, at=2000)])
    assert active() == [run_id]
    history = client.get_metric_history(run_id, "train/loss")
    assert [(each.step, each.value) for each in history][-1] == (2000, 0.25)
    assert len(history) == 1204

    again = another_process()
    again.start_over()
    assert set(again.keys()) == set()
    again.send([point("train/loss", 5, 0.5)])
    [after] = active()
    assert after != run_id
    assert set(another_process().keys()) == {PointKey("train/loss", 5, 1000)}
