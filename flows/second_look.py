"""Whether a command reads retained checkpoints again while it trains, and when it pauses."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from flows.launching.runner import Runner
from flows.run import Run
from tasks.foundation.accelerator.cluster import is_chief
from tasks.foundation.checkpoint.committer import Committer
from tasks.foundation.checkpoint.second_look import SecondLook
from tasks.foundation.stops.process_stop import PROCESS_STOP
from tasks.foundation.storage.deadline import PROCESS_DEADLINE
from tasks.foundation.telemetry.events import Silent, Sink
from tasks.stages import CHECKPOINT_TO_GCS


@contextmanager
def second_look(run: Run, runner: Runner, committer: Committer, *, telemetry: Sink) -> Iterator[Sink]:
    """Read retained checkpoints again meanwhile, if `checkpoint.verify` is background. Only the chief does.

    It pauses while this process saves a checkpoint, and once it was asked to stop.

    Args:
        run: the run.
        runner: runs the stages.
        committer: saves beside the training.
        telemetry: receives warnings about damage.

    Returns:
        A sink that has to receive the events of the training.
    """
    if run.spec.checkpoint.verify != "background" or not is_chief(run.spec.accelerator, os.environ):
        yield Silent()
        return

    def paused() -> bool:
        return committer.busy or PROCESS_DEADLINE.is_set or PROCESS_STOP.last_stop is not None

    own_entries = CHECKPOINT_TO_GCS.name in runner.remote
    with SecondLook(run.log, telemetry=telemetry, paused=paused, own_entries=own_entries) as looking:
        yield looking
