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

from flows.goal import Goal, RelayResult, storage_of
from flows.launching.launcher import stages_of
from flows.prefect_compat.lease_shield import lease_shield
from flows.prefect_compat.prefect_offline import Prefect, PrefectReported, prefect_answers
from flows.prefect_ui.artifact_publisher import ArtifactPublisher
from flows.prefect_ui.run_logger import PrefectRunLogger
from flows.relay import Stages, devices_needed_by, relay
from tasks.foundation.accelerator.tpu_environment import announce_tpu
from tasks.foundation.contracts.identity import accepted_keys
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import BatonError, RunAtWork
from tasks.foundation.telemetry.events import Note, Several, Silent, Sink
from tasks.foundation.telemetry.formatting import metric_words, step_words

announce_tpu()  # a worker of Prefect's imports this file first of all, and the stages import TensorFlow

# Who watches besides Prefect; the command puts its console here.
WATCHER: ContextVar[Sink] = ContextVar("watcher", default=Silent())  # noqa: B039 - Silent has no state

# What was reached, for who calls the flow in this process: Prefect may be gone when it is to be told.
REACHED: ContextVar[list[RelayResult] | None] = ContextVar("reached", default=None)


# What the metadata server tells of.
MACHINE_GOES = frozenset({"preempted", "maintenance"})


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


def run_name() -> str:
    """Flow runs are named after the training run; where the run file is refused, after the file.

    Prefect names a flow run before it begins, where an error would be the engine's: the flow run would crash, or stay
    pending. The flow meets the same refusal, and fails with its sentence.
    """
    file, overrides = Path(flow_run.parameters["run_file"]), flow_run.parameters.get("overrides")
    try:
        return load_run_file(file, overrides or []).spec.run
    except BatonError:
        return file.name or str(file)


@flow(name="train-run", flow_run_name=run_name, validate_parameters=True)
def train_run(
    run_file: str,
    overrides: list[str] | None = None,
    *,
    until_step: int | None = None,
    max_segments: int | None = None,
    max_seconds: float | None = None,
    accept: list[str] | None = None,
    try_again: bool = False,
    take_over: bool = False,
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
        take_over: begin although another process trains the run; without it the flow run is `Stopped` at once.
    """
    run = load_run_file(Path(run_file), overrides or [])
    goal = Goal.of(run.spec, until_step=until_step, max_segments=max_segments, max_seconds=max_seconds)
    accepted = accepted_keys(",".join(accept or []))
    attempt = uuid.uuid4().hex
    with tags(*tags_of(run.spec)), lease_shield():
        others = Several((WATCHER.get(), PrefectRunLogger()))
        with ArtifactPublisher(run.spec, storage_of(run).at(run.spec.run), said=others) as shown:
            sinks = Several((others, shown))
            stages = stages_of(run, inline_stages(), attempt=attempt, telemetry=sinks, max_seconds=goal.max_seconds)
            try:
                result = relay(
                    run,
                    goal,
                    stages,
                    telemetry=sinks,
                    accept=accepted,
                    try_again=try_again,
                    take_over=take_over,
                    attempt=attempt,
                )
            except RunAtWork as fault:
                if REACHED.get() is not None:  # the command says it
                    raise
                # A tick beside a run at work has nothing to do, and has not failed.
                return Completed(name="Stopped", message=str(fault).splitlines()[0], data=str(fault))
    if (reached := REACHED.get()) is not None:
        reached.append(result)
    if not prefect_answers():
        # The engine tries the last state, and then a failure to tell it, each for a minute by Prefect's settings.
        others.emit(Note(text="Prefect does not answer; for up to two minutes it is tried to tell it", warning=True))
    if result.exit_reason in MACHINE_GOES:
        raise MachineIsGoing(result.exit_reason)
    return _ended(result, run.spec)


def import_stages(spec: RunSpec) -> None:
    """Import what runs in this process, which takes its time with TensorFlow."""
    idle = {"evaluate"} - devices_needed_by(spec)
    for stage in Stages.names():
        if stage not in spec.stages.elsewhere() and stage not in idle:
            _task_of(stage)


def inline_stages() -> Callable[[str], Callable[..., Any]]:
    """Stages by name, as tasks of this process of which Prefect is told, if it can be.

    Imported when they are called: a tick with nothing to do needs no TensorFlow. Called directly, never submitted: the
    main thread waits for them, where signals arrive.
    """
    prefect = Prefect()

    def inline(stage: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            return PrefectReported(_task_of(stage), prefect)(*given, **named)

        return call

    return inline


def _task_of(stage: str) -> Any:
    return getattr(import_module(f"tasks.{stage}.task"), f"{stage}_task")


def _ended(result: RelayResult, spec: RunSpec) -> State[RelayResult]:
    """The flow run's last state, which says where the run stands."""
    prefix = "validation_"
    evaluated = {name.removeprefix(prefix): value for name, value in result.metrics.items() if name.startswith(prefix)}
    words = metric_words(evaluated or result.metrics).replace("  ", ", ")
    where = f"{spec.run} is at {step_words(result.step, spec.train.steps)}"
    if words:
        where += f", {'validation' if evaluated else 'training'} {words}"
    if result.stopped:
        why = result.exit_reason.replace("_", " ")
        return Completed(name="Stopped", message=f"{why}: {where}, with work left to do", data=result)
    why = {"nothing_to_do": "nothing to do: ", "finished_early": "ended early: "}.get(result.exit_reason, "")
    return Completed(message=f"{why}{where}", data=result)
