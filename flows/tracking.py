"""Curves for the trackers that a run file names under `tracking`, sent beside the training."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from flows.run import Run
from tasks.foundation.accelerator.cluster import is_chief
from tasks.foundation.contracts.tracking_spec import MlflowSpec, WandbSpec
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.stops.process_stop import PROCESS_STOP
from tasks.foundation.storage.deadline import LAST_SECONDS, PROCESS_DEADLINE
from tasks.foundation.telemetry.tracking import TrackedRun, Tracker
from tasks.foundation.telemetry.tracking_sender import TrackingSender

# How long the end of a command waits for a tracker. What is not sent then, the next command sends.
_END_SECONDS = 30.0


@contextmanager
def tracking(run: Run) -> Iterator[Callable[[], None]]:
    """Send what the trackers of a run miss: now, whenever the log has grown, and at the end. Only the chief does.

    Args:
        run: the run.

    Returns:
        What to call when the log has grown. It returns at once.
    """
    chief = is_chief(run.spec.accelerator, os.environ)
    senders = [_sender(run, connect) for connect in trackers_of(run)] if chief else []
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


def _sender(run: Run, connect: Callable[[RunLog], Tracker]) -> TrackingSender:
    log = RunLog(run.home)  # its own: other threads use the run's
    return TrackingSender(TrackedRun(log, lambda: connect(log)))


def trackers_of(run: Run) -> list[Callable[[RunLog], Tracker]]:
    """What opens the trackers that the run file names, given the log of a run that has begun."""
    asked = run.spec.tracking
    return [
        *([] if asked.mlflow is None else [partial(_mlflow, run, asked.mlflow)]),
        *([] if asked.wandb is None else [partial(_wandb, run, asked.wandb)]),
    ]


def _mlflow(run: Run, settings: MlflowSpec, log: RunLog) -> Tracker:
    from tasks.foundation.telemetry.mlflow_tracker import MlflowTracker

    return MlflowTracker(
        run=_id_of(log), name=run.name, home=run.home.uri, uri=settings.uri, experiment=settings.experiment
    )


def _wandb(run: Run, settings: WandbSpec, log: RunLog) -> Tracker:
    from tasks.foundation.telemetry.wandb_tracker import WandbTracker

    return WandbTracker(
        run=_id_of(log), name=run.name, home=run.home, folder=Path(run.home.uri), project=settings.project
    )


def _id_of(log: RunLog) -> str:
    """The first entry never changes, and a fork has its own; so its writer's id is the run's."""
    return log.entry(0).attempt
