"""Folds an entry into the state before it, and into the totals: pure functions that define what each entry means.

Each entry carries the head after it, so the newest entry alone tells where a run stands. It carries the totals too:
what the whole history adds up to along the lineage of the tip, such as the newest metrics and what each host did.
Nothing is decided by them. If they do not follow from the entry before, `totals_of` adds up all entries.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, Literal

from baton.tasks.foundation.contracts.identity import CALLBACKS, VALIDATION, digest_of
from baton.tasks.foundation.contracts.log_entry import (
    BORDER_REASONS,
    Best,
    Body,
    Change,
    Commit,
    Entry,
    Environment,
    Evaluation,
    EvaluationOnTest,
    Finish,
    Finished,
    Head,
    LastEvaluation,
    Origin,
    Quarantine,
    Retained,
    Retire,
    Retired,
    Rewind,
    SetIn,
    Totals,
    WeightsOrigin,
)
from baton.tasks.foundation.contracts.run_spec import recorded_epoch
from baton.tasks.foundation.errors import RunLogError
from baton.tasks.foundation.log.history import commit_of, history_of, values_at
from baton.tasks.foundation.log.host_history import added_stats, summed_stats, with_newest_intervals


def fold(head: Head | None, body: Body) -> Head:  # noqa: C901, PLR0911 - one return per kind
    """Return the state after `body`, which becomes entry `head.number + 1`, or entry 0.

    Raises:
        RunLogError: the first entry is not an origin, or a later one is, or it rewinds to what is not retained.
    """
    if isinstance(body, Origin):
        if head is not None:
            raise RunLogError("the log already has an origin; a run has exactly one")
        return Head(
            number=0,
            base=0,
            commits=0,
            skipped_batches=body.skipped_batches,
            identity=body.identity,
            identity_in=SetIn(entry=0, digest=digest_of(body.identity)),
            environment=body.environment,
            environment_in=SetIn(entry=0, digest=_digest(body.environment)),
        )
    if head is None:
        raise RunLogError(f"the first entry of a log must be an origin, not {body.kind}")
    head = head.model_copy(update={"number": head.number + 1})
    if isinstance(body, Commit | Evaluation | EvaluationOnTest) and body.read:
        head = _flagged(head, body.read, "read")
    match body:
        case Commit():
            return _commit(head, body)
        case Quarantine():
            return _quarantine(head, body)
        case Rewind():
            return _rewind(head, body)
        case Retire():
            return _retire(head, body)
        case Evaluation():
            return _evaluation(head, body)
        case EvaluationOnTest():
            return _test(head, body)
        case Finish():
            return head.model_copy(update={"finished": Finished(step=body.checkpoint.step, reason=body.reason)})
        case Change():
            return _change(head, body)


def _digest(environment: Environment) -> str:
    return digest_of(environment.model_dump(mode="json"))


def _flagged(head: Head, paths: Collection[str], flag: Literal["evaluated", "tested", "read"]) -> Head:
    """Set a flag of the retained checkpoints among these."""
    checkpoints = tuple(
        each.model_copy(update={flag: True}) if each.ref.path in paths else each for each in head.checkpoints
    )
    return head.model_copy(update={"checkpoints": checkpoints})


def _without(head: Head, paths: Collection[str]) -> Head:
    """Drop checkpoints. One that is no longer retained must not beat later ones."""
    best = None if head.best is not None and head.best.checkpoint.path in paths else head.best
    checkpoints = tuple(each for each in head.checkpoints if each.ref.path not in paths)
    return head.model_copy(update={"checkpoints": checkpoints, "best": best})


def _commit(head: Head, body: Commit) -> Head:
    past = head.blown_up_at is None or body.checkpoint.step >= head.blown_up_at
    return head.model_copy(
        update={
            "base": head.number,
            "finished": None,
            "commits": head.commits + 1,
            "checkpoints": (
                *head.checkpoints,
                Retained(ref=body.checkpoint, border=body.exit_reason in BORDER_REASONS),
            ),
            "rewinds": 0 if past else head.rewinds,
            "blown_up_at": None if past else head.blown_up_at,
        }
    )


def _rewind(head: Head, body: Rewind) -> Head:
    """Drop every checkpoint after the one rewound to; their files are deleted like those of retired checkpoints."""
    if body.to not in head.retained:
        raise RunLogError(f"a rewind goes back to {body.to.path}, which is not retained")
    dropped = tuple(ref.path for ref in head.retained[head.retained.index(body.to) + 1 :])
    return _without(head, dropped).model_copy(
        update={
            "base": head.number,
            "finished": None,
            "retired": (*head.retired, *(Retired(path=path, at_commit=head.commits) for path in dropped)),
            "skipped_batches": head.skipped_batches + body.skip_batches,
            "rewinds": head.rewinds + 1,
            "blown_up_at": max(body.blown_up_at, head.blown_up_at or 0),
        }
    )


def _change(head: Head, body: Change) -> Head:
    changes: dict[str, object] = {
        "environment": body.environment,
        "environment_in": SetIn(entry=head.number, digest=_digest(body.environment)),
    }
    if body.identity is None:
        return head.model_copy(update=changes)
    changes |= {
        "identity": body.identity,
        "identity_in": SetIn(entry=head.number, digest=digest_of(body.identity)),
        # Work that started with the old identity must not be committed after the change.
        "base": head.number,
        # Early stopping may have finished the run; with other callbacks it may continue.
        "finished": None if CALLBACKS in body.accepted else head.finished,
        # Values on another validation set cannot be compared with those on this one.
        "best": None if VALIDATION in body.accepted else head.best,
    }
    return head.model_copy(update=changes)


def _quarantine(head: Head, body: Quarantine) -> Head:
    damaged = tuple(ref for ref in head.retained if ref.path == body.path)
    if head.tip is not None and head.tip.path != body.path:
        # Nothing was trained from it lately: work on the tip may be committed, and a run that has ended has ended.
        return _without(head, (body.path,)).model_copy(update={"quarantined": (*head.quarantined, *damaged)})
    rest = _without(head, (body.path,))
    adopted = () if body.adopted is None else (body.adopted,)
    return rest.model_copy(
        update={
            "base": head.number,
            "finished": None,
            "checkpoints": (*rest.checkpoints, *adopted),
            "kept_for_good": head.kept_for_good - len(adopted),
            "quarantined": (*head.quarantined, *damaged),
        }
    )


def _retire(head: Head, body: Retire) -> Head:
    retired = tuple(old for old in head.retired if old.path not in body.deleted)
    new = tuple(Retired(path=path, at_commit=head.commits) for path in body.paths)
    left = _without(head, body.paths).model_copy(update={"retired": (*retired, *new)})
    return _keep_for_good(left, {each.ref.path for each in body.kept}) if body.kept else left


def _keep_for_good(head: Head, paths: Collection[str]) -> Head:
    """Let checkpoints leave the head. No rewind goes back behind one of them, which would drop it."""
    last = max((at for at, each in enumerate(head.checkpoints) if each.ref.path in paths), default=-1)
    checkpoints = tuple(
        each.model_copy(update={"border": False}) if at < last else each
        for at, each in enumerate(head.checkpoints)
        if each.ref.path not in paths
    )
    return head.model_copy(update={"checkpoints": checkpoints, "kept_for_good": head.kept_for_good + len(paths)})


def _evaluation(head: Head, body: Evaluation) -> Head:
    best = _better(head, body)
    return _flagged(head, (body.checkpoint.path,), "evaluated").model_copy(update={"best": best})


def _test(head: Head, body: EvaluationOnTest) -> Head:
    """Note that the checkpoint was evaluated on the test set. Its metrics decide nothing, the best included."""
    return _flagged(head, (body.checkpoint.path,), "tested")


def _better(head: Head, body: Evaluation) -> Best | None:
    """Return the best after an evaluation. A tie keeps the earlier checkpoint; NaN never wins."""
    rule = body.keep_best
    if rule is None:
        return head.best
    value = body.metrics.get(rule.metric, math.nan)
    # The checkpoint may have been retired or quarantined during the evaluation.
    if math.isnan(value) or body.checkpoint not in head.retained:
        return head.best
    before = head.best
    if before is not None and (before.metric, before.mode) == (rule.metric, rule.mode):
        better = value > before.value if rule.mode == "max" else value < before.value
        if not better:
            return before
    return Best(checkpoint=body.checkpoint, metric=rule.metric, mode=rule.mode, value=value)


def unexpected_keys(before: Head | None, entry: Entry) -> tuple[str, ...]:
    """Return the keys of an entry's state that do not follow from the state before it.

    Raises:
        RunLogError: an entry of its kind cannot follow.
    """
    expected, recorded = fold(before, entry.body), entry.head
    return tuple(key for key in Head.model_fields if not _same(key, getattr(expected, key), getattr(recorded, key)))


def _same(key: str, expected: Any, recorded: Any) -> bool:
    if key == "environment_in":  # its digest may be of keys that this version does not know
        return bool(expected.entry == recorded.entry)
    return bool(expected == recorded) or repr(expected) == repr(recorded)  # NaN is not equal to itself


_GOOD = "train"


def totals_after(before: Entry | None, body: Body, *, time: str) -> Totals | None:  # noqa: PLR0911 - one per kind
    """Return the totals of the entry after `before`.

    Args:
        before: the entry before it; None for the first.

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
    lineage = history.lineage
    commits = [entry.body for entry in entries if isinstance(entry.body, Commit)]
    origin = entries[0].body
    return Totals(
        began=entries[0].time,
        forked_from=origin.forked_from if isinstance(origin, Origin) else None,
        initialized_from=_weights(commit_of(history.commits[0])) if history.commits else (),
        segments=history.segments,
        row=history.rows[-1] if history.rows else None,
        partial=history.partial,
        evaluation=LastEvaluation.of(history.evaluations[-1]) if history.evaluations else None,
        test=LastEvaluation.of(history.tests[-1]) if history.tests else None,
        undone_seconds=sum(
            commit.seconds.get(_GOOD, 0.0) for commit in commits if commit.checkpoint.path not in lineage
        ),
        epoch=recorded_epoch(entries[-1].head.identity),
        last_commit=next((entry.time for entry in reversed(entries) if isinstance(entry.body, Commit)), None),
        target=next((commit.target for commit in reversed(commits) if commit.target is not None), None),
        workers=with_newest_intervals(summed_stats(history)),
        metadata=history.metadata,
        logged=history.logged[-1] if history.logged else None,
    )


def _with_commit(totals: Totals, head: Head, body: Commit, time: str) -> Totals | None:
    if body.parent != (None if head.tip is None else head.tip.path):
        return None
    return totals.model_copy(
        update={
            "initialized_from": _weights(body) if head.tip is None else totals.initialized_from,
            "segments": totals.segments + body.ends_a_segment,
            "row": body.history[-1] if body.history else totals.row,
            "partial": body.partial,
            "last_commit": time,
            "target": totals.target if body.target is None else body.target,
            "workers": with_newest_intervals(added_stats(totals.workers, body.workers)),
            "metadata": totals.metadata if body.metadata is None else body.metadata,
            "logged": body.logged[-1] if body.logged else totals.logged,
        }
    )


def _with_evaluation(totals: Totals, head: Head, body: Evaluation) -> Totals | None:
    is_older = totals.evaluation is not None and body.checkpoint.step < totals.evaluation.step
    if is_older and not body.logged:
        return totals
    if body.checkpoint not in head.retained:  # perhaps no longer in the lineage
        return None
    known = (values_at(body), totals.logged)
    logged = max((each for each in known if each is not None), key=lambda each: each.step, default=None)
    evaluation = totals.evaluation if is_older else LastEvaluation.of(body)
    return totals.model_copy(update={"evaluation": evaluation, "logged": logged})


def _with_test(totals: Totals, head: Head, body: EvaluationOnTest) -> Totals | None:
    if totals.test is not None and body.checkpoint.step < totals.test.step:
        return totals
    if body.checkpoint not in head.retained:  # perhaps no longer in the lineage
        return None
    return totals.model_copy(update={"test": LastEvaluation.of(body)})


def _weights(body: Commit) -> tuple[WeightsOrigin, ...]:
    sources = () if body.initialized_from is None else body.initialized_from.sources
    return tuple(WeightsOrigin(source=each.source, place=each.place, variables=len(each.loaded)) for each in sources)
