"""The proof: a run that is cut and killed, the same run straight, and what comes of comparing them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from signal import SIGKILL

from flows.proving.comparison import Arrays, Comparison, Reached, compare
from flows.proving.diagnosis import causes_of, stateful_ops_told
from flows.proving.receipt import Receipt
from flows.proving.trial import Trial, cut_length, require_enough_steps, trial_of
from flows.proving.trial_processes import Ended, LogWatch, Processes, fault_of
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.errors import BatonError
from tasks.foundation.telemetry.events import Note, Sink

# How often a process may be too quick for its killer; each time there are twice as many steps.
_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """Where and how a proof is made.

    Attributes:
        folder: scratch storage.
        processes: how trials are run.
        share_data: whether the dataset is prepared once for all trials.
        telemetry: is told what goes on.
        read: reads a checkpoint; None: TensorFlow does.
    """

    folder: Path
    processes: Processes
    share_data: bool
    telemetry: Sink
    read: Callable[[Trial, CheckpointRef], Arrays] | None = None

    def storage(self, name: str) -> Path:
        """The storage root of a trial; one of its own, unless data are shared, so that its data are prepared anew."""
        return self.folder / ("shared" if self.share_data else name)

    def say(self, text: str) -> None:
        """Tell what goes on."""
        self.telemetry.emit(Note(text=text))


def prove(run: RunFile, overrides: tuple[str, ...], *, steps: int, workshop: Workshop) -> Receipt:
    """Train straight and cut, in processes of their own, and compare.

    Args:
        run: the run file, with the overrides applied.
        overrides: the user's own, for the processes.
        steps: how far; at least 4. More are taken where the processes are too quick to be killed.
        workshop: where and how.

    Returns:
        The receipt, not stored yet; its verdict may be either.

    Raises:
        InvalidInput: too few steps, or what a process refused.
        BatonError: a process failed, or could not be killed in time however many steps it had.
    """
    require_enough_steps(steps)
    cut, killed_at = _cut_and_killed(run, overrides, steps, workshop)
    steps = cut.steps  # it may have taken more of them
    workshop.say(f"straight to step {steps}, in one process")
    straight, ended = _straight(run, overrides, "straight", steps, workshop)
    comparison, one, other = compare(straight, cut, read=workshop.read)
    repeatable: bool | None = None
    if not comparison.same and comparison.same_examples:
        workshop.say("they differ; straight once more, to see whether that can be repeated at all")
        again, _ = _straight(run, overrides, "again", steps, workshop)
        repeated, _, _ = compare(straight, again, read=workshop.read)
        repeatable = repeated.same
    causes: tuple[str, ...] = ()
    if not comparison.same:
        causes = causes_of(
            same_examples=comparison.same_examples,
            same_step=comparison.same_step,
            repeatable=repeatable,
            ops=stateful_ops_told(ended.stderr),
            source=f"data.source {run.spec.data.source}",
        )
    return _receipt(run, workshop, comparison, one, other, killed_at=killed_at, repeatable=repeatable, causes=causes)


def _cut_and_killed(run: RunFile, overrides: tuple[str, ...], steps: int, workshop: Workshop) -> tuple[Trial, int]:
    """The trial that is cut, done, and the step at which it was killed."""
    length = cut_length(steps)
    for number in range(1, _TRIES + 1):
        name = "cut" if number == 1 else f"cut-{number}"
        trial = trial_of(run, overrides, name=name, storage=workshop.storage(name), steps=steps, segment_steps=length)
        again = "" if number == 1 else "it was done before it could be killed; again, "
        workshop.say(f"{again}to step {steps} in segments of {length}, until it is killed")
        # The second border: one has then been crossed by a warm process, and a kill is the next.
        ended = workshop.processes.killed_after(trial, 2 * length)
        tip = LogWatch(trial.home).step()
        if ended.killed and ended.returncode == -SIGKILL:
            if 0 < tip < steps:
                workshop.say(f"killed at step {tip}; on to step {steps} in a new process")
                _finish(trial, workshop)
                return trial, tip
        elif ended.returncode != 0:
            raise fault_of(trial, ended)
        steps *= 2
    raise BatonError(
        f"the run was done before it could be killed, {_TRIES} times, at last with {steps // 2} steps: nothing is "
        f"proved; give it more with --steps {steps}"
    )


def _straight(
    run: RunFile, overrides: tuple[str, ...], name: str, steps: int, workshop: Workshop
) -> tuple[Trial, Ended]:
    trial = trial_of(run, overrides, name=name, storage=workshop.storage(name), steps=steps, segment_steps=steps)
    return trial, _finish(trial, workshop)


def _finish(trial: Trial, workshop: Workshop) -> Ended:
    ended = workshop.processes.to_its_end(trial)
    if ended.returncode != 0:
        raise fault_of(trial, ended)
    return ended


def _receipt(
    run: RunFile,
    workshop: Workshop,
    comparison: Comparison,
    one: Reached,
    other: Reached,
    *,
    killed_at: int,
    repeatable: bool | None,
    causes: tuple[str, ...],
) -> Receipt:
    straight = set(one.committed_steps)
    return Receipt(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict="same" if comparison.same else "different",
        run=run.spec.run,
        run_file=run.path.name,
        spec_digest=hashlib.sha256(run.spec.to_json()).hexdigest(),
        identity=one.head.identity,
        environment=one.head.environment,
        baton=version("baton"),
        steps=one.tip.step,
        # Where there are callbacks, both are evaluated on the way: that is no cut.
        cuts=tuple(step for step in other.committed_steps if 0 < step < other.tip.step and step not in straight),
        killed_at_step=killed_at,
        data_prepared="once" if workshop.share_data else "for each trial",
        straight=one.end,
        cut=other.end,
        variables=comparison.variables,
        differing=comparison.differing,
        first_difference=comparison.first,
        metric_rows=comparison.rows,
        first_differing_step=comparison.first_step,
        repeatable=repeatable,
        causes=causes,
    )
