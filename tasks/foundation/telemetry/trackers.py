"""The curves of a run for MLflow, Weights & Biases and `keras.callbacks.CSVLogger`, made from the run's log.

Nothing but the tracker itself remembers what it has. A process first compares the tracker's points with the log, and
sends those that are missing; so a kill at any moment neither loses nor repeats a point. A rewind or a quarantine can
abandon points that were sent. The tracker then starts over. A thread sends; no training and no commit waits for it. The
clients of the trackers are imported only where the run file names one. The CSV files are written whole each time, from
the lineage of the tip, so no row repeats after a kill, and rows that a rewind abandoned are gone.
"""

import csv
import io
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic_core import from_json

from baton.tasks.foundation.contracts.identity import CsvFile, recorded_callbacks
from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Evaluation, EvaluationOnTest, Quarantine, Rewind
from baton.tasks.foundation.contracts.run_spec import (
    MlflowSpec,
    RunSpec,
    WandbSpec,
    callbacks_act_at_evaluations,
    epochs_of_callbacks,
    needs_examples,
)
from baton.tasks.foundation.errors import FileTooLarge
from baton.tasks.foundation.log.history import History, history_of, posix_seconds
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.machine.cluster import is_chief
from baton.tasks.foundation.machine.stops import PROCESS_STOP
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.transfers import LAST_SECONDS, PROCESS_DEADLINE
from baton.tasks.foundation.telemetry.tensorboard import training_curves

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_LOGGER = logging.getLogger(__name__)
# Trackers accept these characters in the name of a metric, on every system.
_REFUSED = re.compile(r"[^\w\-. /]", re.ASCII)


@dataclass(frozen=True, slots=True)
class PointKey:
    """What a point is known by.

    Attributes:
        name: train/, validation/ or test/ and the metric.
        step: training step.
        milliseconds: POSIX time of the log entry that the point is from.
    """

    name: str
    step: int
    milliseconds: int


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric."""

    key: PointKey
    value: float


class Tracker(Protocol):
    """A tracking server or store that has one run of its own for each of Baton's."""

    def keys(self) -> Collection[PointKey]:
        """Return what the tracker has of the run; nothing if it does not know the run."""

    def send(self, points: Sequence[Point]) -> None:
        """Add points that it does not have."""

    def start_over(self) -> None:
        """Withdraw everything it has of the run."""

    def close(self) -> None:
        """Write what is buffered; a later call of `keys` begins anew."""


class TrackedRun:
    """Keeps a tracker up to date with the log of a run. Not thread-safe.

    After the first update, an update reads the new entries only, unless the run was rewound.
    """

    def __init__(self, log: RunLog, connect: Callable[[], Tracker]) -> None:
        """Read and send nothing yet.

        Args:
            log: of the run; no other thread uses it.
            connect: makes the tracker, once the run has begun.
        """
        self._log = log
        self._connect = connect
        self._tracker: Tracker | None = None
        self._done: int | None = None  # number of the entry up to which the tracker is up to date
        self._lineage: set[str] = set()  # paths of the checkpoints that lead to the tip
        self._warned = ""

    def update(self) -> bool:
        """Send what is missing. What fails causes a warning, not an error, and is sent by the next update.

        Returns:
            Whether the tracker now has all of the log.
        """
        try:
            self._update()
        except Exception as fault:  # noqa: BLE001 - a tracker's client may raise anything, and must not end the training
            self._done = None  # some points may have arrived
            text = f"{type(fault).__name__}: {fault}"
            if text != self._warned:
                _LOGGER.warning("could not send the curves; trying again after the next commit: %s", text)
            self._warned = text
            return False
        return True

    def close(self) -> bool:
        """Update once more, and close the tracker. What fails causes a warning.

        Returns:
            Whether the tracker has all of the log.
        """
        is_sent = self.update()
        try:
            if self._tracker is not None:
                self._tracker.close()
        except Exception as fault:  # noqa: BLE001 - as above
            _LOGGER.warning("could not close the tracker: %s: %s", type(fault).__name__, fault)
            return False
        return is_sent

    def _update(self) -> None:
        head = self._log.head()
        if head is None or head.number == self._done:
            return
        new = None
        if self._done is not None:
            new = [self._log.entry(number) for number in range(self._done + 1, head.number + 1)]
            if any(isinstance(entry.body, Rewind | Quarantine) for entry in new):
                new = None
        if new is None:
            self._compare([entry for entry in self._log.entries(blocks="read") if entry.number <= head.number])
        else:
            self._lineage |= {entry.body.checkpoint.path for entry in new if isinstance(entry.body, Commit)}
            self._send(_points(new, self._lineage))
        self._done = head.number

    def _compare(self, entries: Sequence[Entry]) -> None:
        self._lineage = set(history_of(entries).lineage)
        points = list(_points(entries, self._lineage))
        self._tracker = self._connect() if self._tracker is None else self._tracker
        there = set(self._tracker.keys())
        if there - {point.key for point in points}:
            self._tracker.start_over()
            there = set()
        self._send(point for point in points if point.key not in there)

    def _send(self, points: Iterable[Point]) -> None:
        waiting = list(points)
        if waiting and self._tracker is not None:
            self._tracker.send(waiting)


def _points(entries: Iterable[Entry], lineage: Collection[str]) -> Iterable[Point]:
    """The points of the entries about checkpoints that lead to the tip."""
    for entry in entries:
        time = max(0, int(posix_seconds(entry) * 1000))
        match entry.body:
            case Commit(checkpoint=checkpoint) if checkpoint.path in lineage:
                for step, values in training_curves(entry, entry.body):
                    for name, value in values.items():
                        yield Point(PointKey(_name("train", name), step, time), value)
            case Evaluation(checkpoint=checkpoint, metrics=metrics) if checkpoint.path in lineage:
                for name, value in metrics.items():
                    yield Point(PointKey(_name("validation", name), checkpoint.step, time), value)
            case EvaluationOnTest(checkpoint=checkpoint, metrics=metrics) if checkpoint.path in lineage:
                for name, value in metrics.items():
                    yield Point(PointKey(_name("test", name), checkpoint.step, time), value)
            case _:
                pass


def _name(part: str, metric: str) -> str:
    return f"{part}/{_REFUSED.sub('_', metric)}"


class TrackingSender(threading.Thread):
    """Updates a tracker now, whenever there is news, and at the end.

    It is a daemon: a server that does not respond must not keep the process.

    Attributes:
        news: set when the log has grown.
    """

    def __init__(self, tracked: TrackedRun) -> None:
        """Send nothing before it is started.

        Args:
            tracked: only this thread uses it.
        """
        super().__init__(name="baton-tracking", daemon=True)
        self.news = threading.Event()
        self.news.set()
        self._tracked = tracked
        self._ending = False
        self._is_sent = False

    def run(self) -> None:
        """Update until told to end; then once more, and close the tracker."""
        while True:
            self.news.wait()
            self.news.clear()
            ending = self._ending  # read first: news after it is seen by the next round
            if ending:
                self._is_sent = self._tracked.close()
                return
            self._tracked.update()

    def end(self, seconds: float) -> None:
        """Update once more, and wait for it at most for `seconds`. A warning says if not everything was sent."""
        self._ending = True
        self.news.set()
        self.join(seconds)
        if self.is_alive() or not self._is_sent:
            _LOGGER.warning("the tracker does not have all curves; the next command on this run sends the rest")


_RUN_TAG, _HOME_TAG = "baton.run", "baton.home"
_AT_ONCE = 1000  # values that MLflow takes in one request


class MlflowTracker:
    """One active MLflow run for each of Baton's, found by the tag `baton.run`.

    MLflow can neither remove nor replace a value of a metric. So after a rewind past points that MLflow has, its run is
    deleted (MLflow can restore deleted runs), and another one gets all points that count.
    """

    def __init__(self, *, run: str, name: str, home: str, uri: str | None, experiment: str) -> None:
        """Connect to nothing yet.

        Args:
            run: what the run is found by, for as long as it lives.
            name: name to show.
            home: address of the run's home.
            uri: tracking URI; None: MLflow's own settings.
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
        from mlflow.entities import Metric

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
    def _client(self) -> "MlflowClient":
        if self._connected is None:
            from mlflow import MlflowClient

            self._connected = MlflowClient(tracking_uri=self._uri)
        return self._connected

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        return str(self._client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id)

    def _found(self) -> "Run | None":
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


_POINTS = "wandb/points.json"
_FOLDERS = "wandb/offline-run-*"


class WandbTracker:
    """One offline folder of one W&B run, in the home: `wandb/offline-run-*`.

    Such a folder can neither be continued nor take anything back. So a process that has something to add writes a new
    one with everything, under the same id, and deletes the one before. `wandb/points.json`, written when a folder is
    complete, has its points. A kill leaves an incomplete folder, and `points.json` as it was: the next process replaces
    the folder.
    """

    def __init__(self, *, run: str, name: str, home: Storage, folder: Path, project: str) -> None:
        """Read and write nothing yet.

        Args:
            run: W&B's id of the run, for as long as it lives.
            name: name to show.
            home: the run's home, on a local disk.
            folder: where it is.
            project: name of W&B's project.
        """
        self._run, self._name, self._project = run, name, project
        self._home, self._folder = home, folder
        self._points: list[Point] = []
        self._open: Any = None

    def keys(self) -> Collection[PointKey]:
        """See `Tracker`."""
        self._abandon()
        self._points = []
        with suppress(ValueError, TypeError, FileTooLarge):  # unreadable: written again
            if self._home.exists(_POINTS):
                rows = from_json(self._home.read(_POINTS))["points"]
                self._points = [Point(PointKey(name, step, time), value) for name, step, time, value in rows]
        return {point.key for point in self._points}

    def send(self, points: Sequence[Point]) -> None:
        """See `Tracker`."""
        if self._open is None:
            import wandb

            self._delete_folders()
            self._open = wandb.init(
                project=self._project,
                id=self._run,
                name=self._name,
                dir=self._folder,
                resume="allow",  # the server may have the id, from an earlier upload
                reinit="create_new",  # the user's code may have a run of its own
                settings=wandb.Settings(
                    mode="offline",
                    silent=True,
                    console="off",
                    disable_git=True,
                    disable_code=True,
                    x_disable_stats=True,
                ),
            )
            self._open.define_metric("step")
            self._open.define_metric("*", step_metric="step")
            self._log(self._points)
        self._log(points)
        self._points += points

    def start_over(self) -> None:
        """See `Tracker`."""
        self._home.delete(_POINTS)
        self._abandon()
        self._delete_folders()
        self._points = []

    def close(self) -> None:
        """See `Tracker`."""
        if self._open is not None:
            finishing, self._open = self._open, None
            finishing.finish()
            rows = [[each.key.name, each.key.step, each.key.milliseconds, each.value] for each in self._points]
            self._home.write(_POINTS, json.dumps({"format": 1, "points": rows}).encode())

    def _log(self, points: Iterable[Point]) -> None:
        for (step, time), row in groupby(points, key=lambda point: (point.key.step, point.key.milliseconds)):
            values = {point.key.name: point.value for point in row}
            self._open.log({**values, "step": step, "_timestamp": time / 1000})

    def _abandon(self) -> None:
        """End a folder that something failed in."""
        if self._open is not None:
            finishing, self._open = self._open, None
            finishing.finish()

    def _delete_folders(self) -> None:
        for folder in self._folder.glob(_FOLDERS):
            shutil.rmtree(folder)


# How long the end of a command waits for a tracker. What is not sent then, the next command sends.
_END_SECONDS = 30.0


@contextmanager
def tracking(spec: RunSpec, home: Storage) -> Iterator[Callable[[], None]]:
    """Send what the trackers of a run miss: now, whenever the log has grown, and at the end. Only the chief does.

    Args:
        spec: the run file's content, which names the trackers.

    Returns:
        What to call when the log has grown. It returns at once.
    """
    senders = _senders(spec, home) if is_chief(spec.accelerator, os.environ) else []
    for sender in senders:
        sender.start()

    def track() -> None:
        for sender in senders:
            sender.news.set()

    try:
        yield track
    finally:
        stopping = PROCESS_DEADLINE.is_set or PROCESS_STOP.last_stop is not None
        for sender in senders:
            sender.end(LAST_SECONDS if stopping else _END_SECONDS)


def _senders(spec: RunSpec, home: Storage) -> list[TrackingSender]:
    connects: list[Callable[[RunLog], Tracker]] = []
    if spec.tracking.mlflow is not None:
        connects.append(partial(_mlflow, spec.tracking.mlflow))
    if spec.tracking.wandb is not None:
        connects.append(partial(_wandb, spec.tracking.wandb))
    # Each has a log of its own, because other threads use the run's.
    return [TrackingSender(TrackedRun(log, partial(connect, log))) for connect in connects for log in [RunLog(home)]]


def _mlflow(settings: MlflowSpec, log: RunLog) -> Tracker:
    run, home = _id_of(log), log.home.uri
    return MlflowTracker(run=run, name=_name_of(log), home=home, uri=settings.uri, experiment=settings.experiment)


def _wandb(settings: WandbSpec, log: RunLog) -> Tracker:
    run, folder = _id_of(log), Path(log.home.uri)
    return WandbTracker(run=run, name=_name_of(log), home=log.home, folder=folder, project=settings.project)


def _id_of(log: RunLog) -> str:
    """The first entry never changes, and a fork has its own; so its writer's id is the run's."""
    return log.entry(0).attempt


def _name_of(log: RunLog) -> str:
    return log.home.uri.rpartition("/")[2]


_FOLDER = "callbacks"
_ABSENT = "NA"  # as Keras writes it


def write_csv_files(log: RunLog, spec: RunSpec) -> None:
    """Write the files that the run's callbacks name into `callbacks/` of its home.

    Args:
        spec: the run file, with the number of training examples if it counts in epochs.

    Raises:
        StorageError: the store refuses or fails.
    """
    if spec.train.callbacks is None or needs_examples(spec):
        return
    files = recorded_callbacks(log.require_head().identity).csv_files
    if not files:
        return
    rows = list(rows_of(history_of(log.entries(blocks="written")), spec))
    for file in files:
        log.home.write(f"{_FOLDER}/{file.name}", csv_of(rows, file))


def rows_of(history: History, spec: RunSpec) -> Iterator[tuple[int, Mapping[str, float]]]:
    """Yield each epoch as callbacks count it, from 0, with the metrics that they received."""
    epochs = epochs_of_callbacks(spec)
    if not callbacks_act_at_evaluations(spec):
        for row in history.rows:
            if epochs.ends_at(row.step):
                yield epochs.last(row.step), row.metrics
        return
    rows = iter(history.rows)
    newest, following = None, next(rows, None)
    for evaluation in history.evaluations:
        step = evaluation.checkpoint.step
        while following is not None and following.step <= step:
            newest, following = following, next(rows, None)
        if epochs.ends_at(step) or step == spec.train.target:
            validation = {f"val_{name}": value for name, value in evaluation.metrics.items()}
            yield epochs.last(step), {**({} if newest is None else newest.metrics), **validation}


def csv_of(rows: list[tuple[int, Mapping[str, float]]], file: CsvFile) -> bytes:
    """Return the rows as CSV: the epoch, then all metrics in alphabetical order."""
    names = sorted({name for _, metrics in rows for name in metrics})
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["epoch", *names], restval=_ABSENT, delimiter=file.separator)
    writer.writeheader()
    for epoch, metrics in rows:
        writer.writerow({"epoch": epoch, **metrics})
    return text.getvalue().encode()
