"""A run in MLflow. Imported only where `tracking.mlflow` is set.

MLflow can neither remove nor replace a value of a metric. So after a rewind past points that MLflow has, its run is
deleted (MLflow can restore deleted runs), and another one gets all points that count. The tag `baton.run` finds the
active run.
"""

from collections.abc import Collection, Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric, Run

from tasks.foundation.telemetry.tracking import Point, PointKey

_RUN_TAG, _HOME_TAG = "baton.run", "baton.home"
_AT_ONCE = 1000  # values that MLflow takes in one request


class MlflowTracker:
    """One active MLflow run for each of Baton's."""

    def __init__(self, *, run: str, name: str, home: str, uri: str | None, experiment: str) -> None:
        """Connect to nothing yet.

        Args:
            run: what the run is found by, for as long as it lives.
            name: name to show.
            home: address of the run's home.
            uri: tracking URI; None: MLflow's own settings.
            experiment: name of the experiment.
        """
        self._run, self._name, self._home = run, name, home
        self._uri, self._experiment = uri, experiment
        self._connected: MlflowClient | None = None
        self._run_id: str | None = None

    def keys(self) -> Collection[PointKey]:
        """See `Tracker`."""
        found = self._found()
        if found is None:
            return ()
        run_id = found.info.run_id
        return {
            PointKey(metric.key, metric.step, metric.timestamp)
            for name in found.data.metrics
            for metric in self._client.get_metric_history(run_id, name)
        }

    def send(self, points: Sequence[Point]) -> None:
        """See `Tracker`."""
        run_id = self._id()
        for first in range(0, len(points), _AT_ONCE):
            self._client.log_batch(
                run_id,
                metrics=[
                    Metric(point.key.name, point.value, point.key.milliseconds, point.key.step)
                    for point in points[first : first + _AT_ONCE]
                ],
            )

    def start_over(self) -> None:
        """See `Tracker`."""
        found = self._found()
        if found is not None:
            self._client.delete_run(found.info.run_id)
        self._run_id = None

    def close(self) -> None:
        """See `Tracker`: nothing is buffered."""

    @property
    def _client(self) -> MlflowClient:
        if self._connected is None:
            self._connected = MlflowClient(tracking_uri=self._uri)
        return self._connected

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        return str(self._client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id)

    def _found(self) -> Run | None:
        """The oldest active run with the tag, so that two processes that made one each agree."""
        runs = self._client.search_runs(
            [self._experiment_id()], f"tags.`{_RUN_TAG}` = '{self._run}'", order_by=["attributes.start_time ASC"]
        )
        self._run_id = runs[0].info.run_id if runs else None
        return runs[0] if runs else None

    def _id(self) -> str:
        if self._run_id is None and self._found() is None:
            tags = {_RUN_TAG: self._run, _HOME_TAG: self._home}
            created = self._client.create_run(self._experiment_id(), tags=tags, run_name=self._name)
            self._run_id = created.info.run_id
        if self._run_id is None:
            raise AssertionError("MLflow made a run without an id")
        return self._run_id
