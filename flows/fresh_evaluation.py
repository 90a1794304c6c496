"""Evaluates a committed checkpoint again, and compares the metrics with those in the log."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from flows.admit import preflight
from flows.launching.runner import Runner
from flows.opened_run import Run, holds_a_log
from tasks.foundation.checkpoint.selection import select_checkpoint
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.data_spec import SetName
from tasks.foundation.contracts.identity import VALIDATION, identity_in_run_file, require_same_identity
from tasks.foundation.contracts.log_entry import Evaluation, EvaluationOnTest, Head
from tasks.foundation.contracts.run_spec import with_examples
from tasks.foundation.contracts.stage_calls import EvaluateCall, PrepareDataCall
from tasks.foundation.errors import DamagedCheckpoint, InvalidInput, NoSuchRun, RunFileError
from tasks.foundation.runlog.history import evaluation_of, evaluation_on_test_of
from tasks.foundation.stage import Place
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Note, Sink
from tasks.stages import EVALUATE, PREPARE_DATA

# Other devices, or another number of them, add in another order.
_RELATIVE_TOLERANCE = 1e-5

_NO_SET: Mapping[SetName, str] = {
    "validation": "data.validation_fraction is 0, so there are no validation examples to evaluate on; set it, or name "
    "a set under data.validation",
    "test": "data.test is left out, so there is no test set to evaluate on; name one under data.test",
}

Step = int | Literal["best"] | None


class FreshEvaluation(Contract):
    """Metrics of a committed checkpoint, compared with those in the log."""

    schema_version: Literal[1] = 1
    run: str
    home: str
    step: int
    checkpoint: str = Field(description="address of the checkpoint's folder")
    on: SetName = Field(default="validation", description="the set")
    examples: int = Field(description="number of its examples, each used once")
    metrics: dict[str, float]
    logged: dict[str, float] | None = Field(
        description="None: the log had no evaluation of the checkpoint on this set; now it has this one"
    )
    agrees: bool | None = Field(
        description="whether metrics and logged differ by at most 1e-5, relative; None: nothing was logged"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A checkpoint to evaluate, and its metrics in the log, if it was evaluated on this set before."""

    home: Storage
    head: Head
    checkpoint: CheckpointRef
    logged: dict[str, float] | None
    on: SetName = "validation"
    test: EvaluationOnTest | None = None  # the newest one of it in the log, perhaps on an earlier test set


def evaluate_again(
    run: Run, step: Step, evaluate: Callable[[Chosen], Evaluation], telemetry: Sink, *, on: SetName = "validation"
) -> FreshEvaluation:
    """Choose a checkpoint, evaluate it, and compare.

    Args:
        run: the run.
        step: which checkpoint, see `chosen_of`.
        evaluate: evaluates it, and logs the metrics if the log has no evaluation of it.
        telemetry: receives a warning if the metrics differ from the log.
        on: the set.

    Raises:
        DamagedCheckpoint: the checkpoint's bytes differ from the log. It is not quarantined here; the next attempt to
            train decides that.
        BatonError: as `chosen_of`.
    """
    chosen = chosen_of(run, step, on)
    while True:
        try:
            done = evaluate(chosen)
            break
        except DamagedCheckpoint as fault:
            # Another process may train the run and have retired the checkpoint; then the log names another one by now.
            again = chosen_of(run, step, on)
            if again.checkpoint == chosen.checkpoint:
                raise
            telemetry.emit(Note(text=f"{fault}; reading the log again", warning=True))
            chosen = again
    ref, logged = chosen.checkpoint, _logged_on_same_set(run, chosen)
    found = "" if logged is None else differences(done.metrics, logged)
    if found:
        text = f"step {ref.step} differs from its log: {found}; check whether the model's code or the devices changed"
        telemetry.emit(Note(text=text, warning=True))
    return FreshEvaluation(
        run=run.spec.run,
        home=chosen.home.uri,
        step=ref.step,
        checkpoint=f"{chosen.home.uri}/{ref.path}",
        on=on,
        examples=done.examples,
        metrics=done.metrics,
        logged=logged,
        agrees=None if logged is None else not found,
    )


def _logged_on_same_set(run: Run, chosen: Chosen) -> dict[str, float] | None:
    """The metrics to compare with. A changed test set has a new entry in the log, and nothing to compare with."""
    if chosen.on == "validation":
        return chosen.logged
    newest = evaluation_on_test_of(run.log, run.require_head(), chosen.checkpoint.path)
    return chosen.logged if newest is not None and newest == chosen.test else None


def chosen_of(run: Run, step: Step, on: SetName = "validation") -> Chosen:
    """Choose a checkpoint. Writes nothing, and needs no TensorFlow.

    Args:
        run: the run.
        step: a step, None for the newest checkpoint, or "best": the best one, or the newest if none is known.
        on: the set.

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
    if on not in spec.data.is_evaluated_on:
        raise RunFileError(_NO_SET[on])
    at = None if step == "best" and head.best is None else step
    ref = select_checkpoint(home, at, error=InvalidInput)
    if on == "test":
        test = evaluation_on_test_of(run.log, head, ref.path)
        logged = None if test is None else dict(test.metrics)
        return Chosen(home=home, head=head, checkpoint=ref, logged=logged, on=on, test=test)
    known = evaluation_of(run.log, head, ref.path)
    return Chosen(home=home, head=head, checkpoint=ref, logged=None if known is None else dict(known.metrics))


def run_stages(run: Run, chosen: Chosen, runner: Runner, telemetry: Sink) -> Evaluation:
    """Prepare the data, and evaluate the chosen checkpoint, each where `runner` runs it."""
    spec, recorded = run.spec, chosen.head.environment
    place = Place(root=run.root, home=run.home, log=run.log, code_folder=run.folder, telemetry=telemetry)
    if EVALUATE.name not in runner.remote:
        from tasks.foundation.machine.devices import acquire  # imports TensorFlow

        # Before any user code: the user's `load` may use TensorFlow.
        acquire(spec.accelerator, recorded, deterministic=spec.train.deterministic)
    dataset = runner.run(PREPARE_DATA, PrepareDataCall(spec=spec), place)
    found: dict[str, object] = {"data.content_digest": dataset.content_digest}
    if chosen.on == "validation":
        found[VALIDATION] = None if dataset.validation is None else dataset.validation.content_digest
    require_same_identity(chosen.head.identity, found, home=chosen.home.uri)
    spec = with_examples(spec, dataset.train_examples)
    call = EvaluateCall(
        spec=spec,
        dataset=dataset,
        checkpoint=chosen.checkpoint,
        recorded=recorded,
        on=chosen.on,
        confusion_matrix=True,
    )
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
