"""The flow evaluate-best: evaluates a committed checkpoint again, by default the best one.

As a scheduled check, it compares the metrics in the log with those that the checkpoint's bytes give today.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefect import flow, tags
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed
from pydantic import Field

from flows.admission.checks import preflight
from flows.launching.launcher import runner_for
from flows.launching.runner import StageStopped
from flows.prefect_compat.prefect_offline import PrefectTasks
from flows.prefect_ui.run_logger import PrefectRunLogger
from flows.run import Run, holds_a_log
from flows.train_run import MACHINE_GOES, MachineIsGoing, run_name, tags_of
from tasks.foundation.checkpoint.selection import select_checkpoint
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.identity import identity_in_run_file, require_same_identity
from tasks.foundation.contracts.log_entry import Evaluation, Head
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.stage_calls import EvaluateCall, PrepareDataCall
from tasks.foundation.errors import DamagedCheckpoint, InvalidInput, NoSuchRun, RunFileError
from tasks.foundation.runlog.history import evaluation_of
from tasks.foundation.stage import Place
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Note, Sink
from tasks.foundation.telemetry.log_handler import warnings_as_notes
from tasks.stages import EVALUATE, PREPARE_DATA

# Other devices, or another number of them, add in another order.
_RELATIVE_TOLERANCE = 1e-5

Step = int | Literal["best"] | None


class FreshEvaluation(Contract):
    """Metrics of a committed checkpoint, compared with those in the log."""

    schema_version: Literal[1] = 1
    run: str
    home: str
    step: int
    checkpoint: str = Field(description="address of the checkpoint's folder")
    examples: int = Field(description="number of validation examples, each used once")
    metrics: dict[str, float]
    logged: dict[str, float] | None = Field(
        description="None: the log had no evaluation of the checkpoint; now it has this one"
    )
    agrees: bool | None = Field(
        description="whether metrics and logged differ by at most 1e-5, relative; None: nothing was logged"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A checkpoint to evaluate, and its metrics in the log, if it was evaluated before."""

    home: Storage
    head: Head
    checkpoint: CheckpointRef
    logged: dict[str, float] | None


@flow(name="evaluate-best", flow_run_name=run_name, validate_parameters=True)
def evaluate_best(run_file: str, overrides: list[str] | None = None, step: Step = "best") -> State[FreshEvaluation]:
    """Evaluate a committed checkpoint again, on all validation examples, and compare the metrics with the log.

    It returns a `FreshEvaluation`. If the metrics differ from the log, the flow run logs a warning and ends as
    `Differs`, which Prefect counts as completed. If the stage is a deployment and is cancelled, so is this flow run.

    Args:
        run_file: path of the run file.
        overrides: settings that replace those of the file, each as a.b=c.
        step: "best" (by checkpoint.keep_best; the newest if none was evaluated yet), the step of a retained
            checkpoint, or null for the newest.
    """
    run = Run.open(load_run_file(Path(run_file), overrides or []))
    with tags(*tags_of(run.spec)):
        telemetry = PrefectRunLogger()
        with warnings_as_notes(telemetry):
            try:
                return ended(evaluate_again(run, step, lambda chosen: _evaluate(run, chosen, telemetry), telemetry))
            except StageStopped as stop:
                return stopped(stop)


def evaluate_again(run: Run, step: Step, evaluate: Callable[[Chosen], Evaluation], telemetry: Sink) -> FreshEvaluation:
    """Choose a checkpoint, evaluate it, and compare.

    Args:
        run: the run.
        step: which checkpoint, see `chosen_of`.
        evaluate: evaluates it, and logs the metrics if the log has no evaluation of it.
        telemetry: receives a warning if the metrics differ from the log.

    Raises:
        DamagedCheckpoint: the checkpoint's bytes differ from the log. It is not quarantined here; the next attempt to
            train decides that.
        BatonError: as `chosen_of`.
    """
    chosen = chosen_of(run, step)
    while True:
        try:
            done = evaluate(chosen)
            break
        except DamagedCheckpoint as fault:
            # Another process may train the run and have retired the checkpoint; then the log names another one by now.
            again = chosen_of(run, step)
            if again.checkpoint == chosen.checkpoint:
                raise
            telemetry.emit(Note(text=f"{fault}; reading the log again", warning=True))
            chosen = again
    ref, logged = chosen.checkpoint, chosen.logged
    found = "" if logged is None else differences(done.metrics, logged)
    if found:
        text = f"step {ref.step} differs from its log: {found}; check whether the model's code or the devices changed"
        telemetry.emit(Note(text=text, warning=True))
    return FreshEvaluation(
        run=run.spec.run,
        home=chosen.home.uri,
        step=ref.step,
        checkpoint=f"{chosen.home.uri}/{ref.path}",
        examples=done.examples,
        metrics=done.metrics,
        logged=logged,
        agrees=None if logged is None else not found,
    )


def chosen_of(run: Run, step: Step) -> Chosen:
    """Choose a checkpoint. Writes nothing, and needs no TensorFlow.

    Args:
        run: the run.
        step: a step, None for the newest checkpoint, or "best": the best one, or the newest if none is known.

    Raises:
        NoSuchRun: the run has not begun.
        InvalidInput: it has no such checkpoint or no validation examples, or its run file cannot be used.
        IdentityChanged: the run on disk differs from the run file.
        RunLogError: the log cannot be read.
    """
    preflight(run)
    spec, home = run.spec, run.home
    if not holds_a_log(home):
        raise NoSuchRun(
            f"no run is at {home.uri}: the run file has not been run yet; start it with: baton run {run.file}"
        )
    head = run.require_head()
    require_same_identity(head.identity, identity_in_run_file(spec), home=home.uri)
    if spec.data.validation_fraction == 0:
        raise RunFileError("data.validation_fraction is 0, so there are no validation examples to evaluate on")
    known = None if step == "best" and head.best is None else step
    ref = select_checkpoint(home, known, error=InvalidInput)
    logged = evaluation_of(run.log, head, ref.path)
    return Chosen(home=home, head=head, checkpoint=ref, logged=None if logged is None else dict(logged.metrics))


def _evaluate(run: Run, chosen: Chosen, telemetry: Sink) -> Evaluation:
    """Evaluate through the stages, in this process or as deployments."""
    spec, recorded = run.spec, chosen.head.environment
    # No attempt: this is not a part of training.
    runner = runner_for(spec, PrefectTasks(), attempt=None, telemetry=telemetry)
    place = Place(root=run.root, home=run.home, log=run.log, code_folder=run.folder, telemetry=telemetry)
    if EVALUATE.name not in runner.remote:
        from tasks.foundation.accelerator.strategy import acquire  # imports TensorFlow

        # Before any user code: the user's `load` may use TensorFlow.
        acquire(spec.accelerator, recorded, deterministic=spec.train.deterministic)
    dataset = runner.run(PREPARE_DATA, PrepareDataCall(spec=spec), place)
    found = {"data.content_digest": dataset.content_digest}
    require_same_identity(chosen.head.identity, found, home=chosen.home.uri)
    call = EvaluateCall(spec=spec, dataset=dataset, checkpoint=chosen.checkpoint, recorded=recorded)
    return runner.run(EVALUATE, call, place)


def differences(metrics: Mapping[str, float], logged: Mapping[str, float]) -> str:
    """The metrics that differ by more than float tolerance, as text; empty if none does."""
    found = []
    for name in dict.fromkeys([*logged, *metrics]):
        before, now = logged.get(name), metrics.get(name)
        if before is None or now is None or not _equal(before, now):
            found.append(f"{name} is {_number(now)}, the log has {_number(before)}")
    return "; ".join(found)


def _equal(before: float, now: float) -> bool:
    both_undefined = math.isnan(before) and math.isnan(now)
    return both_undefined or math.isclose(before, now, rel_tol=_RELATIVE_TOLERANCE)


def _number(value: float | None) -> str:
    return "absent" if value is None else f"{value:.8g}"


def ended(result: FreshEvaluation) -> State[FreshEvaluation]:
    """The last state of a flow run that has evaluated; Prefect's pages show its message."""
    metrics = " ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
    how = {None: "not evaluated before", True: "same as the log", False: "DIFFERS from the log"}[result.agrees]
    name = "Differs" if result.agrees is False else "Completed"
    return Completed(name=name, message=f"step {result.step}: {metrics}; {how}", data=result)


def stopped(stop: StageStopped) -> State[FreshEvaluation]:
    """The last state of a flow run whose stage was stopped.

    Raises:
        MachineIsGoing: this flow run's machine is about to go.
    """
    if stop.reason in MACHINE_GOES:
        raise MachineIsGoing(stop.reason) from stop
    return Cancelled(message=f"nothing was evaluated: {stop}")
