"""Curves for the tracker that a run file names under `tracking`, sent beside the training."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flows.run import Run
from tasks.foundation.accelerator.cluster import is_chief
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.stops.process_stop import PROCESS_STOP
from tasks.foundation.storage.deadline import LAST_SECONDS, PROCESS_DEADLINE
from tasks.foundation.telemetry.tracking import TrackedRun, Tracker
from tasks.foundation.telemetry.tracking_sender import TrackingSender

# How long the end of a command waits for a tracker. What is not sent then, the next command sends.
_END_SECONDS = 30.0


@contextmanager
def tracking(run: Run) -> Iterator[Callable[[], None]]:
    """Send what the tracker of a run misses: now, whenever the log has grown, and at the end. Only the chief does.

    Args:
        run: the run.

    Returns:
        What to call when the log has grown. It returns at once.
    """
    if run.spec.tracking.mlflow is None or not is_chief(run.spec.accelerator, os.environ):
        yield lambda: None
        return
    log = RunLog(run.home)  # its own: other threads use the run's
    sender = TrackingSender(TrackedRun(log, lambda: tracker_of(run, log)))
    sender.start()
    try:
        yield sender.news.set
    finally:
        stopping = PROCESS_DEADLINE.is_set or PROCESS_STOP.last_stop is not None
        sender.end(LAST_SECONDS if stopping else _END_SECONDS)


def tracker_of(run: Run, log: RunLog) -> Tracker:
    """Open the tracker of a run that has begun. Imports MLflow.

    Raises:
        ValueError: the run file names no tracker.
    """
    from tasks.foundation.telemetry.mlflow_tracker import MlflowTracker

    settings = run.spec.tracking.mlflow
    if settings is None:
        raise ValueError("tracking.mlflow is not set")
    # The first entry never changes, and a fork has its own; so its writer's id is the run's.
    return MlflowTracker(
        run=log.entry(0).attempt,
        name=run.name,
        home=run.home.uri,
        uri=settings.uri,
        experiment=settings.experiment,
    )
