"""The proof: train straight, train again with cuts and a kill, compare, and name the likely cause of a difference."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from signal import SIGKILL

from flows.proving.comparison import Arrays, Comparison, TrialOutcome, compare
from flows.proving.diagnosis import causes_of
from flows.proving.receipt import Receipt
from flows.proving.trial import Trial, cut_length, require_enough_steps, trial_of
from flows.proving.trial_processes import CommitWatcher, FinishedProcess, Processes, error_of
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.errors import BatonError
from tasks.foundation.telemetry.events import Note, Sink
from tasks.foundation.version import baton_version

# A process may finish before it can be killed. Each further try trains twice as many steps.
_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSetup:
    """The settings of a proof that are not in the run file.

    Attributes:
        folder: scratch storage.
        processes: runs the trials.
        share_data: whether the dataset is prepared once for all trials.
        telemetry: receives progress notes.
        read: reads a checkpoint; None for TensorFlow's reader.
    """

    folder: Path
    processes: Processes
    share_data: bool
    telemetry: Sink
    read: Callable[[Trial, CheckpointRef], Arrays] | None = None

    def storage(self, name: str) -> Path:
        """Return a trial's storage root. Without shared data, each trial has its own root and prepares its data."""
        return self.folder / ("shared" if self.share_data else name)

    def note(self, text: str) -> None:
        """Report progress."""
        self.telemetry.emit(Note(text=text))


def prove(run: RunFile, overrides: tuple[str, ...], *, steps: int, setup: ProofSetup) -> Receipt:
    """Train straight and cut, in separate processes, and compare.

    Args:
        run: the run file, with the overrides applied.
        overrides: the user's overrides, for the processes.
        steps: steps to train, at least 4. Doubled while the processes finish before they can be killed.
        setup: scratch storage, processes and telemetry.

    Returns:
        The receipt, not stored yet; its verdict is "same" or "different".

    Raises:
        InvalidInput: `steps` is below 4, or a process refused its input.
        BatonError: a process failed, or every try finished before its process could be killed.
    """
    require_enough_steps(steps)
    cut, killed_at = _cut_and_killed(run, overrides, steps, setup)
    steps = cut.steps
    setup.note(f"straight to step {steps}, in one process")
    straight, finished = _straight(run, overrides, "straight", steps, setup)
    comparison, straight_outcome, cut_outcome = compare(straight, cut, read=setup.read)
    repeatable: bool | None = None
    if not comparison.same and comparison.same_examples:
        setup.note("they differ; training straight once more, to see whether the model is repeatable")
        again, _ = _straight(run, overrides, "again", steps, setup)
        repeated, _, _ = compare(straight, again, read=setup.read)
        repeatable = repeated.same
    causes: tuple[str, ...] = ()
    if not comparison.same:
        causes = causes_of(
            same_examples=comparison.same_examples,
            same_step=comparison.same_step,
            repeatable=repeatable,
            operations=finished.report.stateful_operations,
            source=f"data.source {run.spec.data.source_words}",
        )
    findings = _Findings(
        comparison=comparison,
        straight=straight_outcome,
        cut=cut_outcome,
        killed_at=killed_at,
        repeatable=repeatable,
        causes=causes,
    )
    return _receipt(run, findings, share_data=setup.share_data)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    """The results of the trials; `repeatable` is None if only one straight trial was made."""

    comparison: Comparison
    straight: TrialOutcome
    cut: TrialOutcome
    killed_at: int
    repeatable: bool | None
    causes: tuple[str, ...]


def _cut_and_killed(run: RunFile, overrides: tuple[str, ...], steps: int, setup: ProofSetup) -> tuple[Trial, int]:
    """Train a trial with cuts, kill its first process and finish it.

    Returns:
        The finished trial, and the step of the tip when its first process was killed.
    """
    length = cut_length(steps)
    for number in range(1, _TRIES + 1):
        name = "cut" if number == 1 else f"cut-{number}"
        trial = trial_of(run, overrides, name=name, storage=setup.storage(name), steps=steps, segment_steps=length)
        again = "" if number == 1 else "finished before it could be killed; again, "
        setup.note(f"{again}to step {steps} in segments of {length}, until it is killed")
        # The kill comes at the second border, so that a warm process has crossed the first one.
        finished = setup.processes.kill_after(trial, 2 * length)
        tip = CommitWatcher(trial.home).step()
        if finished.killed and finished.returncode == -SIGKILL:
            if 0 < tip < steps:
                setup.note(f"killed at step {tip}; continuing to step {steps} in a new process")
                _finish(trial, setup)
                return trial, tip
        elif finished.returncode != 0:
            raise error_of(trial, finished)
        steps *= 2
    raise BatonError(
        f"nothing is proved: in {_TRIES} tries, the last with {steps // 2} steps, the run finished before it could be "
        f"killed; use more steps: --steps {steps}"
    )


def _straight(
    run: RunFile, overrides: tuple[str, ...], name: str, steps: int, setup: ProofSetup
) -> tuple[Trial, FinishedProcess]:
    trial = trial_of(run, overrides, name=name, storage=setup.storage(name), steps=steps, segment_steps=steps)
    return trial, _finish(trial, setup)


def _finish(trial: Trial, setup: ProofSetup) -> FinishedProcess:
    finished = setup.processes.run_to_end(trial)
    if finished.returncode != 0:
        raise error_of(trial, finished)
    return finished


def _receipt(run: RunFile, findings: _Findings, *, share_data: bool) -> Receipt:
    comparison, straight, cut = findings.comparison, findings.straight, findings.cut
    return Receipt(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict="same" if comparison.same else "different",
        run=run.spec.run,
        run_file=run.path.name,
        spec_digest=hashlib.sha256(run.spec.to_json()).hexdigest(),
        identity=dict(straight.head.identity),
        environment=straight.head.environment,
        baton=baton_version() or "unknown",
        steps=straight.tip.step,
        # With callbacks, both trials also commit for evaluations; those commits are not cuts.
        cuts=tuple(
            step for step in cut.committed_steps if 0 < step < cut.tip.step and step not in straight.committed_steps
        ),
        killed_at_step=findings.killed_at,
        data_prepared="once" if share_data else "for each trial",
        straight=straight.end,
        cut=cut.end,
        variables=comparison.variables,
        differing=comparison.differing,
        first_difference=comparison.first,
        metric_rows=comparison.rows,
        first_differing_step=comparison.first_step,
        repeatable=findings.repeatable,
        causes=findings.causes,
    )
