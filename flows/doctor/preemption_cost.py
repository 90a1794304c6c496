"""What a preemption costs, and how far apart commits should be."""

import math

from flows.doctor.finding import Finding
from flows.doctor.storage_checks import CommitCost
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.telemetry.formatting import duration_words

# Below that, what else a segment costs (an entry in the log, retention) counts.
_SHORTEST_SECONDS = 60.0
# The run's own interval may cost so many times what the best one does, or so much of the time, without a word.
_TOLERATED_TIMES = 2.0
_TOLERATED_SHARE = 0.01


def best_interval(commit_seconds: float, hours_between: float) -> float:
    """Seconds between commits at which lost work and commits together cost least: sqrt(2 C M).

    After Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006 refines it by terms
    that do not matter while C is far below M.

    Args:
        commit_seconds: C, how long training waits for a commit.
        hours_between: M, the mean time between preemptions.
    """
    return max(_SHORTEST_SECONDS, math.sqrt(2 * commit_seconds * hours_between * 3600))


def preemptions(
    run: RunFile, cost: CommitCost, *, start_seconds: float, step_seconds: float | None, hours_between: float
) -> Finding:
    """Expected loss for each preemption without notice, and the segment length to choose.

    A preemption comes at any time of an interval alike, so it loses half of one, then the restore and the start-up.

    Args:
        run: the run file.
        cost: as measured.
        start_seconds: to build and trace the model, as measured here.
        step_seconds: how long a step is assumed to last; None: not known.
        hours_between: mean time between preemptions.
    """
    best = best_interval(cost.commit_seconds, hours_between)
    again = cost.restore_seconds + start_seconds
    restoring = duration_words(cost.restore_seconds)
    text = (
        f"preempted every {hours_between:g} h without notice, with commits {duration_words(best)} apart each loses "
        f"about {duration_words(best / 2 + again)}: half an interval, {restoring} to restore, "
        f"{duration_words(start_seconds)} to build and trace; a new machine's own start comes on top"
    )
    remedy = _suggestion(run, best, step_seconds)
    if cost.commit_seconds > run.spec.stop.grace_seconds:
        return Finding(
            check="preemption",
            verdict="warn",
            text=f"{text}; a commit takes longer than stop.grace_seconds = {run.spec.stop.grace_seconds:g}, so none "
            "is made on a notice",
            remedy=f"{remedy}; or storage that is nearer",
        )
    own = interval_seconds(run, step_seconds)
    if own is None:
        return Finding(check="preemption", verdict="pass", text=text, remedy=remedy)
    # A short run is not worth a word about its commits, unless they last longer than what they save.
    whole = math.inf if step_seconds is None else run.spec.train.steps * step_seconds
    if whole <= best and (own >= whole or own >= cost.commit_seconds):
        text += f"; the whole run takes {duration_words(whole)}"
        return Finding(check="preemption", verdict="pass", text=text)
    text += f"; the run file commits every {duration_words(own)}"
    wasted, least = (_share(each, cost.commit_seconds, hours_between) for each in (own, best))
    if wasted <= max(_TOLERATED_TIMES * least, _TOLERATED_SHARE):
        return Finding(check="preemption", verdict="pass", text=text)
    return Finding(
        check="preemption",
        verdict="warn",
        text=f"{text}, which costs {min(wasted, 1):.0%} of the time instead of {least:.1%}",
        remedy=remedy,
    )


def interval_seconds(run: RunFile, step_seconds: float | None) -> float | None:
    """Seconds between two commits as the run file has it; None if that takes the length of a step to tell."""
    train = run.spec.train
    steps = train.segment_steps or train.steps
    in_steps = None if step_seconds is None else min(steps, train.steps) * step_seconds
    known = [each for each in (in_steps, train.segment_seconds, run.spec.checkpoint.every_seconds) if each is not None]
    return min(known, default=None)


def _share(interval: float, commit_seconds: float, hours_between: float) -> float:
    """Share of the time that goes to commits and to work that is lost."""
    return commit_seconds / interval + interval / (2 * hours_between * 3600)


def _suggestion(run: RunFile, best: float, step_seconds: float | None) -> str:
    if step_seconds is None:
        return f"train.segment_seconds: {_round(best)}; or say --step-seconds to have it in steps"
    steps = _round(best / step_seconds)
    if steps >= run.spec.train.steps:
        return "one segment will do: the run is shorter than the best interval"
    return f"train.segment_steps: {steps}"


def _round(value: float) -> int:
    """Two significant digits, at least 1."""
    unit = 10.0 ** max(0, math.floor(math.log10(max(value, 1))) - 1)
    return max(1, int(round(value / unit) * unit))
