"""The flow: one committed checkpoint, the best one if nothing else is said, is evaluated once more.

A scheduled look from outside: what the log says of a checkpoint is compared with what its bytes give today.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prefect import flow, tags
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed
from pydantic import Field

from flows.commands.address import OpenedRun, holds_a_log
from flows.goal import preflight, storage_of
from flows.launching.launcher import stages_of
from flows.prefect_ui.run_logger import PrefectRunLogger
from flows.relay import StageStopped
from flows.train_run import MACHINE_GOES, MachineIsGoing, inline_stages, run_name, tags_of
from tasks.foundation.checkpoint.selection import choose
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.identity import identity_in_run_file, require_same_identity
from tasks.foundation.contracts.log_entry import Evaluation, Head
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.errors import DamagedCheckpoint, InvalidInput, NoSuchRun, RunFileError
from tasks.foundation.runlog.history import evaluation_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Note, Sink
from tasks.foundation.telemetry.log_handler import warnings_as_notes

# Other devices, and other numbers of them, sum in another order.
_RELATIVE_TOLERANCE = 1e-5

Step = int | Literal["best"] | None


class FreshEvaluation(Contract):
    """What an evaluation of a committed checkpoint gave, and what the log had said of it."""

    schema_version: Literal[1] = 1
    run: str
    home: str
    step: int
    checkpoint: str = Field(description="address of the checkpoint's folder")
    examples: int = Field(description="validation examples, each met once")
    metrics: dict[str, float]
    logged: dict[str, float] | None = Field(description="None: the log had no evaluation of it; now it has this one")
    agrees: bool | None = Field(description="whether metrics and logged are equal to 1e-5; None: nothing was logged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A checkpoint to evaluate, and what the log says of it."""

    home: Storage
    head: Head
    checkpoint: CheckpointRef
    logged: dict[str, float] | None


@flow(name="evaluate-best", flow_run_name=run_name, validate_parameters=True)
def evaluate_best(run_file: str, overrides: list[str] | None = None, step: Step = "best") -> Any:
    """Evaluate a committed checkpoint of a run once more, on all validation examples, and compare with its log.

    It returns a `FreshEvaluation`. Where the metrics are not those of the log, the flow run says so with a warning and
    ends as `Differs`, which Prefect counts as completed. Where the stage runs elsewhere and is cancelled there, so is
    this flow run.

    Args:
        run_file: path of the run file.
        overrides: settings that replace those of the file, each as a.b=c.
        step: "best" (by checkpoint.keep_best; the newest where nothing has been evaluated yet), the step of a
            checkpoint that is retained, or null for the newest.
    """
    run = load_run_file(Path(run_file), overrides or [])
    with tags(*tags_of(run.spec)):
        telemetry = PrefectRunLogger()
        with warnings_as_notes(telemetry):
            try:
                return ended(evaluate_again(run, step, lambda chosen: _evaluate(run, chosen, telemetry), telemetry))
            except StageStopped as stop:
                return stopped(stop)


def evaluate_again(
    run: RunFile, step: Step, evaluate: Callable[[Chosen], Evaluation], telemetry: Sink
) -> FreshEvaluation:
    """Choose, evaluate, compare.

    Args:
        run: the run file.
        step: which checkpoint, see `chosen_of`.
        evaluate: evaluates it, and logs what came out if the log has no evaluation of it.
        telemetry: is told where the metrics are not those of the log.

    Raises:
        DamagedCheckpoint: the checkpoint is not what the log says. The run goes on with or without it: quarantine is
            the next attempt's to decide.
        BatonError: as `chosen_of`.
    """
    chosen = chosen_of(run, step)
    while True:
        try:
            done = evaluate(chosen)
            break
        except DamagedCheckpoint as fault:
            # A run that trains meanwhile may have retired it; then the log names another one by now.
            again = chosen_of(run, step)
            if again.checkpoint == chosen.checkpoint:
                raise
            telemetry.emit(Note(text=f"{fault}; looking at the log again", warning=True))
            chosen = again
    ref, logged = chosen.checkpoint, chosen.logged
    found = "" if logged is None else differences(done.metrics, logged)
    if found:
        text = (
            f"step {ref.step} is not as its log says: {found}; see whether the model's code or the devices are others"
        )
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


def chosen_of(run: RunFile, step: Step) -> Chosen:
    """Which checkpoint is meant. Writes nothing, and needs no TensorFlow.

    Args:
        run: the run file.
        step: a step, None for the newest checkpoint, or "best": the best, or the newest where none is known.

    Raises:
        NoSuchRun: the run has not begun.
        InvalidInput: it has no such checkpoint, holds out no examples, or cannot be used as it stands.
        IdentityChanged: the run on disk is another one, as the run file alone tells.
        RunLogError: the log cannot be read.
    """
    preflight(run)
    spec, root = run.spec, storage_of(run)
    home = root.at(spec.run)
    if not holds_a_log(home):
        raise NoSuchRun(f"no run is at {home.uri}: the run file has not been run yet; start it: baton run {run.path}")
    opened = OpenedRun(root=root, home=home, run_file=run, log=RunLog(home))
    head = opened.head()
    require_same_identity(head.identity, identity_in_run_file(spec), home=home.uri)
    if spec.data.validation_fraction == 0:
        raise RunFileError("data.validation_fraction is 0: no example is held out, so there is nothing to evaluate on")
    known = None if step == "best" and head.best is None else step
    ref = choose(home, known, error=InvalidInput)
    logged = evaluation_of(opened.log, head, ref.path)
    return Chosen(home=home, head=head, checkpoint=ref, logged=None if logged is None else dict(logged.metrics))


def _evaluate(run: RunFile, chosen: Chosen, telemetry: Sink) -> Evaluation:
    """Through the stages, here or elsewhere as the run file says."""
    stages = stages_of(run, inline_stages(), attempt=None, telemetry=telemetry)  # the run's way is not ours
    place = {"code_folder": run.folder, "storage": storage_of(run), "telemetry": telemetry}
    if "evaluate" not in stages.elsewhere:
        from tasks.foundation.accelerator.strategy import acquire  # brings TensorFlow

        # First of all: the user's `load` may use TensorFlow.
        acquire(run.spec.accelerator, chosen.head.environment, deterministic=run.spec.train.deterministic)
    dataset = stages.prepare_data(run.spec, **place)
    found = {"data.content_digest": dataset.content_digest}
    require_same_identity(chosen.head.identity, found, home=chosen.home.uri)
    done: Evaluation = stages.evaluate(run.spec, dataset, chosen.checkpoint, recorded=chosen.head.environment, **place)
    return done


def differences(metrics: Mapping[str, float], logged: Mapping[str, float]) -> str:
    """What is not equal to float tolerance, in words; empty if everything is."""
    told = []
    for name in dict.fromkeys([*logged, *metrics]):
        before, now = logged.get(name), metrics.get(name)
        if before is None or now is None or not _equal(before, now):
            told.append(f"{name} is {_number(now)}, the log says {_number(before)}")
    return "; ".join(told)


def _equal(before: float, now: float) -> bool:
    both_undefined = math.isnan(before) and math.isnan(now)
    return both_undefined or math.isclose(before, now, rel_tol=_RELATIVE_TOLERANCE)


def _number(value: float | None) -> str:
    return "absent" if value is None else f"{value:.8g}"


def ended(result: FreshEvaluation) -> State[FreshEvaluation]:
    """The state of a flow run that has evaluated; its message is what Prefect's pages show."""
    told = " ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
    how = {None: "not evaluated before", True: "as the log says", False: "NOT as the log says"}[result.agrees]
    name = "Differs" if result.agrees is False else "Completed"
    return Completed(name=name, message=f"step {result.step}: {told}; {how}", data=result)


def stopped(stop: StageStopped) -> State[FreshEvaluation]:
    """The state of a flow run whose stage elsewhere was told to go.

    Raises:
        MachineIsGoing: because this flow run's machine is taken.
    """
    if stop.reason in MACHINE_GOES:
        raise MachineIsGoing(stop.reason) from stop
    return Cancelled(message=f"nothing was evaluated: {stop}")
