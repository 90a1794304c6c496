"""The goal of a command: an absolute step, a number of segments, a time limit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import needs_examples
from tasks.foundation.errors import RunFileError
from tasks.foundation.runlog.commits import evaluation_due, is_test_due


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal of a command: how far it trains, and when it stops earlier.

    Attributes:
        until_step: the absolute step to train to; None: the run file's target.
        max_segments: stop after this many segments; None: no limit.
        max_seconds: stop after this many seconds; None: no limit.
        cuts: steps where a segment ends in addition to the run file's, so that they are committed.
    """

    until_step: int | None
    max_segments: int | None
    max_seconds: float | None
    cuts: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        *,
        until_step: int | None = None,
        max_segments: int | None = None,
        max_seconds: float | None = None,
        cuts: Sequence[int] = (),
    ) -> "Goal":
        """Make the goal of a command from its run file and its options.

        Args:
            spec: the run file's content.
            until_step: the absolute step to train to; None: train.steps, or the end of train.epochs.
            max_segments: stop after this many segments; None: no limit.
            max_seconds: stop after this many seconds; None: train.stop_after_seconds.
            cuts: steps to commit in addition.

        Raises:
            RunFileError: a limit is below 1, `max_seconds` is not positive and finite, or the step is beyond
                the target.
        """
        for name, value in (("--until-step", until_step), ("--max-segments", max_segments)):
            if value is not None and value < 1:
                raise RunFileError(f"{name} = {value} must be at least 1")
        if max_seconds is not None and not (max_seconds > 0 and math.isfinite(max_seconds)):
            raise RunFileError(f"--max-seconds = {max_seconds} must be more than 0, and finite")
        goal = cls(
            until_step=until_step,
            max_segments=max_segments,
            max_seconds=spec.train.stop_after_seconds if max_seconds is None else max_seconds,
            cuts=tuple(cuts),
        )
        goal.require_within(spec)
        return goal

    def require_within(self, spec: RunSpec) -> None:
        """Check that the goal is not beyond the run file's target, if that is known.

        Raises:
            RunFileError: it is.
        """
        target, train = spec.train.known_target, spec.train
        if self.until_step is None or target is None or self.until_step <= target:
            return
        if train.epochs is None:
            raise RunFileError(
                f"--until-step = {self.until_step} lies beyond train.steps = {target}; raise train.steps, "
                f"as with --set train.steps={self.until_step}"
            )
        enough = train.epoch.period().ended_by(self.until_step - 1) + 1
        raise RunFileError(
            f"--until-step = {self.until_step} lies beyond step {target}, the end of train.epochs = {train.epochs}; "
            f"raise train.epochs, as with --set train.epochs={enough}"
        )

    def step(self, spec: RunSpec) -> int:
        """Return the absolute step to train to."""
        return self.until_step or spec.train.target

    def next_cut(self, spec: RunSpec, step: int) -> int:
        """Return the step where the segment that starts at `step` has to end, at the latest."""
        return min((cut for cut in self.cuts if cut > step), default=self.step(spec))

    def reason(self, head: Head, spec: RunSpec) -> str:
        """Return the exit reason of a command that reached the goal."""
        if head.finished is not None and (head.tip is None or head.tip.step < self.step(spec)):
            return "finished_early"
        return "complete" if self.step(spec) == spec.train.target else "until_step"

    def reached(self, head: Head | None, spec: RunSpec) -> bool:
        """Return whether no work is left: the run is at the goal's step, or callbacks ended it earlier.

        A run without a checkpoint, or with an evaluation or a test that is still due, has not reached its goal. The end
        of an epoch is not known before the number of training examples is.
        """
        if needs_examples(spec):
            return False
        if head is None or head.tip is None or evaluation_due(head, spec) or is_test_due(head, spec):
            return False
        return self.is_trained(head, spec)

    def is_trained(self, head: Head, spec: RunSpec) -> bool:
        """Return whether no step is left to train; evaluations may be. It must be known where epochs end."""
        return head.finished is not None or (head.tip is not None and head.tip.step >= self.step(spec))


def override_to_continue(spec: RunSpec, step: int, target: int | None) -> str | None:
    """Return the `key=value` with which a run at `step` has steps left to train; None if its run file says enough.

    Args:
        spec: the run file's content.
        step: of the tip.
        target: the step to train to; if it is not ahead, the run gets twice as long.
    """
    train, own = spec.train, spec.train.known_target
    if own is None or own > step:
        return None
    ahead = target if target is not None and target > step else None
    if train.epochs is None:
        return f"train.steps={ahead or 2 * step}"
    return f"train.epochs={2 * train.epochs if ahead is None else train.epoch.period().ended_by(ahead - 1) + 1}"
