"""What the history of a run adds up to. Each entry carries it, so that its readers need not read all others."""

from collections.abc import Sequence

from tasks.foundation.contracts.log_entry import (
    Body,
    Change,
    Commit,
    Entry,
    Evaluation,
    EvaluationOnTest,
    Head,
    LastEvaluation,
    Origin,
    Quarantine,
    Rewind,
    Totals,
    WeightsOrigin,
)
from tasks.foundation.contracts.run_spec import recorded_epoch
from tasks.foundation.runlog.history import commit_of, history_of
from tasks.foundation.runlog.worker_stats import added_stats, summed_stats

_GOOD = "train"


def totals_after(before: Entry | None, body: Body, *, time: str) -> Totals | None:  # noqa: PLR0911 - one per kind
    """Return the totals of the entry after `before`.

    Args:
        before: the entry before it; None for the first.
        body: of the new entry.
        time: of the new entry.

    Returns:
        None if they do not follow from the entry before alone; `totals_of` has them.
    """
    if isinstance(body, Origin):
        return Totals(began=time, forked_from=body.forked_from, epoch=recorded_epoch(body.identity))
    if before is None or before.totals is None or _changes_lineage(before.head, body):
        return None
    match body:
        case Commit():
            return _with_commit(before.totals, before.head, body, time)
        case Evaluation():
            return _with_evaluation(before.totals, before.head, body)
        case EvaluationOnTest():
            return _with_test(before.totals, before.head, body)
        case Change(identity=identity) if identity is not None:
            return before.totals.model_copy(update={"epoch": recorded_epoch(identity)})
    return before.totals


def _changes_lineage(head: Head, body: Body) -> bool:
    """Whether an entry goes back to another lineage: a rewind does, and the quarantine of the tip."""
    return isinstance(body, Rewind) or (
        isinstance(body, Quarantine) and head.tip is not None and head.tip.path == body.path
    )


def totals_of(entries: Sequence[Entry]) -> Totals:
    """Return the totals from all entries of a log, at least one.

    Raises:
        RunLogError: a checkpoint in the tip's lineage was never committed.
    """
    history = history_of(entries)
    lineage = {commit_of(entry).checkpoint.path for entry in history.commits}
    commits = [entry.body for entry in entries if isinstance(entry.body, Commit)]
    origin = entries[0].body
    return Totals(
        began=entries[0].time,
        forked_from=origin.forked_from if isinstance(origin, Origin) else None,
        initialized_from=_weights(commit_of(history.commits[0])) if history.commits else (),
        segments=history.segments,
        row=history.rows[-1] if history.rows else None,
        evaluation=LastEvaluation.of(history.evaluations[-1]) if history.evaluations else None,
        test=LastEvaluation.of(history.tests[-1]) if history.tests else None,
        undone_seconds=sum(
            commit.seconds.get(_GOOD, 0.0) for commit in commits if commit.checkpoint.path not in lineage
        ),
        epoch=recorded_epoch(entries[-1].head.identity),
        last_commit=next((entry.time for entry in reversed(entries) if isinstance(entry.body, Commit)), None),
        target=next((commit.target for commit in reversed(commits) if commit.target is not None), None),
        workers=summed_stats(history),
    )


def _with_commit(totals: Totals, head: Head, body: Commit, time: str) -> Totals | None:
    if body.parent != (None if head.tip is None else head.tip.path):
        return None
    return totals.model_copy(
        update={
            "initialized_from": _weights(body) if head.tip is None else totals.initialized_from,
            "segments": totals.segments + body.ends_a_segment,
            "row": body.history[-1] if body.history else totals.row,
            "last_commit": time,
            "target": totals.target if body.target is None else body.target,
            "workers": added_stats(totals.workers, body.workers),
        }
    )


def _with_evaluation(totals: Totals, head: Head, body: Evaluation) -> Totals | None:
    if totals.evaluation is not None and body.checkpoint.step < totals.evaluation.step:
        return totals
    if body.checkpoint not in head.retained:  # perhaps no longer in the lineage
        return None
    return totals.model_copy(update={"evaluation": LastEvaluation.of(body)})


def _with_test(totals: Totals, head: Head, body: EvaluationOnTest) -> Totals | None:
    if totals.test is not None and body.checkpoint.step < totals.test.step:
        return totals
    if body.checkpoint not in head.retained:  # perhaps no longer in the lineage
        return None
    return totals.model_copy(update={"test": LastEvaluation.of(body)})


def _weights(body: Commit) -> tuple[WeightsOrigin, ...]:
    sources = () if body.initialized_from is None else body.initialized_from.sources
    return tuple(WeightsOrigin(source=each.source, place=each.place, variables=len(each.loaded)) for each in sources)
