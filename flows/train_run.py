"""The flow: prepare-data -> init-or-restore -> (train-segment -> checkpoint-to-GCS)* -> evaluate.

`python -m flows.train_run FILE` is `baton run FILE`.
"""

import signal
import sys
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before Prefect is imported, since the command sees to that
    from flows.commands.main import main

    sys.argv[1:1] = ["run"]
    sys.exit(main())

from prefect import flow, tags
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Completed

from flows.goal import Goal, RelayResult
from flows.launch import stages_of
from flows.relay import Stages, relay
from flows.telling import PrefectLog
from flows.uninterrupted import uninterrupted
from tasks.foundation.accelerator.tpu_environment import announce_tpu
from tasks.foundation.contracts.identity import accepted_keys
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.telemetry.events import Several, Silent, Sink

announce_tpu()  # a worker of Prefect's imports this file first of all, and the stages import TensorFlow

# Who watches besides Prefect; the command puts its console here.
WATCHER: ContextVar[Sink] = ContextVar("watcher", default=Silent())  # noqa: B039 - Silent has no state


class MachineIsGoing(TerminationSignal):
    """The metadata server says that this machine is about to be taken: the same as a SIGTERM, only sooner.

    Attributes:
        reason: preempted or maintenance.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(signal=signal.SIGTERM)
        self.reason = reason


def tags_of(spec: RunSpec) -> tuple[str, str]:
    """Tags of a training run's flow runs and task runs."""
    return "baton", f"run:{spec.run}"


def _run_name() -> str:
    """Flow runs are named after the training run."""
    parameters = flow_run.parameters
    return load_run_file(Path(parameters["run_file"]), parameters.get("overrides") or []).spec.run


@flow(name="train-run", flow_run_name=_run_name, validate_parameters=True)
def train_run(
    run_file: str,
    overrides: list[str] | None = None,
    *,
    until_step: int | None = None,
    max_segments: int | None = None,
    max_seconds: float | None = None,
    accept: list[str] | None = None,
    try_again: bool = False,
) -> Any:
    """Train a run to its goal, in segments, from wherever its log says that it stands.

    It returns a `RelayResult`. A flow run that ends within its own bounds (segments, seconds) with work left is
    `Stopped`, which Prefect counts as completed; one whose machine is taken has crashed.

    Args:
        run_file: path of the run file.
        overrides: settings that replace those of the file, each as a.b=c.
        until_step: the absolute step to go to; left out: train.steps.
        max_segments: stop after so many segments.
        max_seconds: stop after so many seconds; left out: train.stop_after_seconds.
        accept: changed identity keys that are accepted, as compile.optimizer.
        try_again: forget the attempts in a row that did not get further.
    """
    run = load_run_file(Path(run_file), overrides or [])
    goal = Goal.of(run.spec, until_step=until_step, max_segments=max_segments, max_seconds=max_seconds)
    accepted = accepted_keys(",".join(accept or []))
    with tags(*tags_of(run.spec)), uninterrupted():
        sinks = Several((WATCHER.get(), PrefectLog()))
        attempt = uuid.uuid4().hex
        stages = stages_of(run, inline_stage, attempt=attempt, telemetry=sinks)
        result = relay(run, goal, stages, telemetry=sinks, accept=accepted, try_again=try_again, attempt=attempt)
    if result.exit_reason in {"preempted", "maintenance"}:
        raise MachineIsGoing(result.exit_reason)
    return _stopped(result) if result.stopped else result


def import_stages(spec: RunSpec) -> None:
    """Import what runs in this process, which takes its time with TensorFlow."""
    for stage in Stages.names():
        if stage not in spec.stages.elsewhere():
            _task_of(stage)


def inline_stage(stage: str) -> Callable[..., Any]:
    """A stage as a task of this process, imported when it is called: a tick with nothing to do needs no TensorFlow.

    Called directly, never submitted: the main thread waits for it, where signals arrive.
    """

    def call(*given: Any, **named: Any) -> Any:
        return _task_of(stage)(*given, **named)

    return call


def _task_of(stage: str) -> Any:
    return getattr(import_module(f"tasks.{stage}.task"), f"{stage}_task")


def _stopped(result: RelayResult) -> State[RelayResult]:
    why = result.exit_reason.replace("_", " ")
    return Completed(name="Stopped", message=f"{why}: step {result.step}, with work left to do", data=result)
