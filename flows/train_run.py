"""The flow: prepare-data -> init-or-restore -> (train-segment -> checkpoint-to-GCS)* -> evaluate."""

from contextvars import ContextVar
from pathlib import Path

from prefect import flow, get_run_logger, tags
from prefect.runtime import flow_run

from flows.relay import Goal, RelayResult, Stages, relay
from tasks.checkpoint_to_gcs.task import checkpoint_to_gcs_task
from tasks.evaluate.task import evaluate_task
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.telemetry.events import Committed, Evaluated, Event, Note, Several, Silent, Sink
from tasks.init_or_restore.task import init_or_restore_task
from tasks.prepare_data.task import prepare_data_task
from tasks.train_segment.task import train_segment_task

# Called directly, never submitted: training keeps the main thread, where signals arrive.
STAGES = Stages(
    prepare_data=prepare_data_task,
    init_or_restore=init_or_restore_task,
    train_segment=train_segment_task,
    checkpoint_to_gcs=checkpoint_to_gcs_task,
    evaluate=evaluate_task,
)

# Who watches besides Prefect; the command puts its console here.
WATCHER: ContextVar[Sink] = ContextVar("watcher", default=Silent())  # noqa: B039 - Silent has no state


class PrefectLog:
    """What a person reads in Prefect's log of the run: the milestones, not every step."""

    def emit(self, event: Event) -> None:
        """Log one event."""
        logger = get_run_logger()
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
    until_step: int | None = None,
    max_segments: int | None = None,
) -> RelayResult:
    """Train a run to its goal, in segments, from wherever its log says that it stands.

    Args:
        run_file: path of the run file.
        overrides: settings that replace those of the file, each as a.b=c.
        until_step: the absolute step to go to; left out: train.steps.
        max_segments: stop after so many segments.
    """
    run = load_run_file(Path(run_file), overrides or [])
    goal = Goal.of(run.spec, until_step=until_step, max_segments=max_segments)
    with tags(*tags_of(run.spec)):
        return relay(run, goal, STAGES, telemetry=Several((WATCHER.get(), PrefectLog())))


def _text(metrics: object) -> str:
    items = metrics.items() if isinstance(metrics, dict) else ()
    return " ".join(f"{name} {value:.4g}" for name, value in items)
