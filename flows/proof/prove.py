"""The proof: train straight, train again with cuts and a kill, compare, and name the likely cause of a difference."""

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from signal import SIGKILL

from flows.proof.choose import cut_length, require_enough_steps, training_of
from flows.proof.compare import causes_of, compare
from flows.proof.execute import CommitWatcher, Execution, Laboratory, error_of
from tasks.foundation.contracts.base import baton_version
from tasks.foundation.contracts.home_files import ProofReceipt
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.errors import BatonError

# A process may finish before it can be killed. Each further try trains twice as many steps.
_TRIES = 5


def prove(
    run: RunFile, overrides: tuple[str, ...], *, steps: int, share_data: bool, laboratory: Laboratory
) -> ProofReceipt:
    """Train straight and cut, in separate processes, and compare.

    Args:
        run: the run file, with the overrides applied.
        overrides: the user's overrides, for the processes.
        steps: steps to train, at least 4. Doubled while the processes finish before they can be killed.
        share_data: whether the dataset is prepared once; otherwise each training has a storage root of its own.
        laboratory: scratch storage, processes and telemetry.

    Returns:
        The receipt, not stored yet; its verdict is "same" or "different".

    Raises:
        InvalidInput: `steps` is below 4, or a process refused its input.
        BatonError: a process failed, or every try finished before its process could be killed.
    """
    require_enough_steps(steps)

    def training(name: str, steps: int, segment_steps: int) -> Execution:
        storage = laboratory.folder / ("shared" if share_data else name)
        return training_of(run, overrides, name=name, storage=storage, steps=steps, segment_steps=segment_steps)

    cut, killed_at = _cut_and_killed(training, steps, laboratory)
    steps = cut.steps
    laboratory.note(f"straight to step {steps}, in one process")
    straight = training("straight", steps, steps)
    finished = laboratory.finish(straight)
    found, one, other = compare(straight.home, cut.home, steps, saved=laboratory.saved)
    repeatable: bool | None = None
    if not found.same and found.same_examples:
        laboratory.note("they differ; training straight once more, to see whether the model is repeatable")
        again = training("again", steps, steps)
        laboratory.finish(again)
        repeatable = compare(straight.home, again.home, steps, saved=laboratory.saved)[0].same
    causes: tuple[str, ...] = ()
    if not found.same:
        causes = causes_of(
            same_examples=found.same_examples,
            same_step=found.same_step,
            repeatable=repeatable,
            operations=finished.report.stateful_operations,
            source=f"data.source {run.spec.data.source_words}",
        )
    # With callbacks, both trainings also commit for evaluations; those commits are not cuts.
    uncut = {ref.step for ref in one.commits}
    return ProofReceipt(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict="same" if found.same else "different",
        run=run.spec.run,
        run_file=run.path.name,
        spec_digest=hashlib.sha256(run.spec.to_json()).hexdigest(),
        identity=dict(one.head.identity),
        environment=one.head.environment,
        baton=baton_version() or "unknown",
        steps=steps,
        cuts=tuple(ref.step for ref in other.commits if 0 < ref.step < steps and ref.step not in uncut),
        killed_at_step=killed_at,
        data_prepared="once" if share_data else "for each trial",
        straight=one.end,
        cut=other.end,
        variables=found.variables,
        differing=found.differing,
        first_difference=found.first,
        metric_rows=found.rows,
        first_differing_step=found.first_step,
        repeatable=repeatable,
        causes=causes,
    )


def _cut_and_killed(
    training: Callable[[str, int, int], Execution], steps: int, laboratory: Laboratory
) -> tuple[Execution, int]:
    """Train with cuts, kill the first process and finish in a second one.

    Returns:
        The finished execution, and the step of the tip when its first process was killed.
    """
    length = cut_length(steps)
    for number in range(1, _TRIES + 1):
        execution = training("cut" if number == 1 else f"cut-{number}", steps, length)
        again = "" if number == 1 else "finished before it could be killed; again, "
        laboratory.note(f"{again}to step {steps} in segments of {length}, until it is killed")
        # The kill comes at the second border, so that a warm process has crossed the first one.
        finished = laboratory.processes.kill_after(execution, 2 * length)
        tip = CommitWatcher(execution.home).step()
        if finished.killed and finished.returncode == -SIGKILL:
            if 0 < tip < steps:
                laboratory.note(f"killed at step {tip}; continuing to step {steps} in a new process")
                laboratory.finish(execution)
                return execution, tip
        elif finished.returncode != 0:
            raise error_of(execution, finished)
        steps *= 2
    raise BatonError(
        f"nothing is proved: in {_TRIES} tries, the last with {steps // 2} steps, the run finished before it could be "
        f"killed; use more steps: --steps {steps}"
    )
