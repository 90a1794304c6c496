"""The flow: prepare-data -> init-or-restore -> (train-segment -> checkpoint-to-GCS)* -> evaluate."""

import signal
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, tags
from prefect.client.schemas.objects import State
from prefect.exceptions import MissingContextError, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Completed

from flows.goal import Goal, RelayResult, storage_of
from flows.prefect_away import prefect_answers, told
from flows.relay import Stages, relay
from flows.showing import Shown
from tasks.foundation.accelerator.tpu_environment import announce_tpu
from tasks.foundation.contracts.identity import accepted_keys
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.telemetry.events import Committed, Evaluated, Event, Note, Several, Silent, Sink
from tasks.foundation.telemetry.wording import metric_words

announce_tpu()  # a worker of Prefect's imports this file first of all

from tasks.checkpoint_to_gcs.task import checkpoint_to_gcs_task  # noqa: E402 - the stages import TensorFlow
from tasks.evaluate.task import evaluate_task  # noqa: E402
from tasks.init_or_restore.task import init_or_restore_task  # noqa: E402
from tasks.prepare_data.task import prepare_data_task  # noqa: E402
from tasks.train_segment.task import train_segment_task  # noqa: E402

# Called directly, never submitted: the main thread waits for them, where signals arrive.
STAGES = Stages(
    prepare_data=prepare_data_task,
    init_or_restore=init_or_restore_task,
    train_segment=train_segment_task,
    checkpoint_to_gcs=checkpoint_to_gcs_task,
    evaluate=evaluate_task,
)

# Who watches besides Prefect; the command puts its console here.
WATCHER: ContextVar[Sink] = ContextVar("watcher", default=Silent())  # noqa: B039 - Silent has no state

# What was reached, for who calls the flow in this process: Prefect may be gone when it is to be told.
REACHED: ContextVar[list[RelayResult] | None] = ContextVar("reached", default=None)


class PrefectLog:
    """What a person reads in Prefect's log of the run: the milestones, not every step."""

    def __init__(self) -> None:
        """Within a flow run."""
        self._of_flow = get_run_logger()

    def emit(self, event: Event) -> None:
        """Log one event."""
        try:
            logger = get_run_logger()
        except MissingContextError:  # a thread of the store's, or of the ledger's
            logger = self._of_flow
        match event:
            case Note(text=text, warning=True):
                logger.warning(text)
            case Note(text=text):
                logger.info(text)
            case Committed(step=step, path=path, metrics=metrics):
                logger.info("step %d committed as %s %s", step, path, _text(metrics))
            case Evaluated(step=step, metrics=metrics, examples=examples):
                logger.info("step %d evaluated on %d examples: %s", step, examples, _text(metrics))
            case _:
                pass


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
    with tags(*tags_of(run.spec)):
        others = Several((WATCHER.get(), PrefectLog()))
        with Shown(run.spec, storage_of(run).at(run.spec.run), said=others) as shown:
            sinks = Several((others, shown))
            result = relay(run, goal, told(STAGES), telemetry=sinks, accept=accepted, try_again=try_again)
    if (reached := REACHED.get()) is not None:
        reached.append(result)
    if not prefect_answers():
        # The engine tries the last state, and then a failure to tell it, each for a minute by Prefect's settings.
        others.emit(Note(text="Prefect does not answer; for up to two minutes it is tried to tell it", warning=True))
    if result.exit_reason in {"preempted", "maintenance"}:
        raise MachineIsGoing(result.exit_reason)
    return _ended(result, run.spec)


def _ended(result: RelayResult, spec: RunSpec) -> State[RelayResult]:
    """The flow run's last state, which says where the run stands."""
    prefix = "validation_"
    evaluated = {name.removeprefix(prefix): value for name, value in result.metrics.items() if name.startswith(prefix)}
    words = metric_words(evaluated or result.metrics).replace("  ", ", ")
    where = f"{spec.run} is at step {result.step} of {spec.train.steps}"
    if words:
        where += f", {'validation' if evaluated else 'training'} {words}"
    if result.stopped:
        why = result.exit_reason.replace("_", " ")
        return Completed(name="Stopped", message=f"{why}: {where}, with work left to do", data=result)
    why = {"nothing_to_do": "nothing to do: ", "finished_early": "ended early: "}.get(result.exit_reason, "")
    return Completed(message=f"{why}{where}", data=result)


def _text(metrics: object) -> str:
    items = metrics.items() if isinstance(metrics, dict) else ()
    return " ".join(f"{name} {value:.4g}" for name, value in items)
