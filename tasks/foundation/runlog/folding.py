"""Fold an entry into the state before it: pure functions that define what each entry means."""

import math
from collections.abc import Collection
from typing import Any, Final

from tasks.foundation.contracts.checkpoint import WholeRead, base_in_folder_name
from tasks.foundation.contracts.identity import CALLBACKS, VALIDATION
from tasks.foundation.contracts.log_entry import (
    BORDER_REASONS,
    Best,
    Body,
    Change,
    Commit,
    Entry,
    Evaluation,
    EvaluationOnTest,
    Finish,
    Finished,
    Head,
    Origin,
    Quarantine,
    Retire,
    Retired,
    Rewind,
)
from tasks.foundation.contracts.long_list import appended, without
from tasks.foundation.errors import RunLogError

# Two, so that one is still known when the other turns out to be damaged. Entries stay small.
_READS_KEPT: Final = 2


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
            tip=None,
            retained=(),
            retired=(),
            quarantined=(),
            best=None,
            evaluated=(),
            skipped_batches=body.skipped_batches,
            identity=body.identity,
            environment=body.environment,
        )
    if head is None:
        raise RunLogError(f"the first entry of a log must be an origin, not {body.kind}")
    head = head.model_copy(update={"number": head.number + 1})
    if isinstance(body, Commit | Retire | Evaluation | EvaluationOnTest):
        head = _read_whole(head, body.read_whole)
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


def _read_whole(head: Head, reads: tuple[WholeRead, ...]) -> Head:
    """Note which retained checkpoints were read whole. The writer names only those that this head retains."""
    if not reads:
        return head
    known = {read.path: read for read in (*head.read_whole, *reads)}
    # The base grows from commit to commit.
    in_order = sorted(known.values(), key=lambda read: _base(read.path))
    return head.model_copy(update={"read_whole": tuple(in_order[-_READS_KEPT:])})


def _base(path: str) -> int:
    base = base_in_folder_name(path)
    return -1 if base is None else base


def _still(reads: tuple[WholeRead, ...], gone: Collection[str]) -> tuple[WholeRead, ...]:
    return tuple(read for read in reads if read.path not in gone)


def _commit(head: Head, body: Commit) -> Head:
    border = (body.checkpoint.path,) if body.exit_reason in BORDER_REASONS else ()
    past = head.blown_up_at is None or body.checkpoint.step >= head.blown_up_at
    return head.model_copy(
        update={
            "base": head.number,
            "finished": None,
            "commits": head.commits + 1,
            "tip": body.checkpoint,
            "retained": appended(head.retained, body.checkpoint),
            "borders": appended(head.borders, *border),
            "rewinds": 0 if past else head.rewinds,
            "blown_up_at": None if past else head.blown_up_at,
        }
    )


def _rewind(head: Head, body: Rewind) -> Head:
    """Drop every checkpoint after the one rewound to; their files are deleted like those of retired checkpoints."""
    if body.to not in head.retained:
        raise RunLogError(f"a rewind goes back to {body.to.path}, which is not retained")
    kept = head.retained.index(body.to) + 1
    dropped = tuple(ref.path for ref in head.retained[kept:])
    best = None if head.best is not None and head.best.checkpoint.path in dropped else head.best
    return head.model_copy(
        update={
            "base": head.number,
            "finished": None,
            "tip": body.to,
            "retained": head.retained[:kept],
            "retired": (*head.retired, *(Retired(path=path, at_commit=head.commits) for path in dropped)),
            "evaluated": without(head.evaluated, dropped),
            "borders": without(head.borders, dropped),
            "tested": without(head.tested, dropped),
            "read_whole": _still(head.read_whole, dropped),
            "best": best,
            "skipped_batches": head.skipped_batches + body.skip_batches,
            "rewinds": head.rewinds + 1,
            "blown_up_at": max(body.blown_up_at, head.blown_up_at or 0),
        }
    )


def _change(head: Head, body: Change) -> Head:
    if body.identity is None:
        return head.model_copy(update={"environment": body.environment})
    # Work that started with the old identity must not be committed after the change, so `base` moves.
    changes = {"environment": body.environment, "identity": body.identity, "base": head.number}
    # Early stopping may have finished the run; with other callbacks it may continue.
    finished = None if CALLBACKS in body.accepted else head.finished
    # Values on another validation set cannot be compared with those on this one.
    best = None if VALIDATION in body.accepted else head.best
    return head.model_copy(update={**changes, "finished": finished, "best": best})


def _quarantine(head: Head, body: Quarantine) -> Head:
    damaged = tuple(kept for kept in head.retained if kept.path == body.path)
    retained = without(head.retained, (body.path,))
    best = None if head.best is not None and head.best.checkpoint.path == body.path else head.best
    if head.tip is not None and head.tip.path != body.path:
        # Nothing was trained from it lately, so work on the tip may be committed, and a run that has ended has ended.
        tip: dict[str, object] = {}
    else:
        tip = {"base": head.number, "finished": None, "tip": retained[-1] if retained else None}
    return head.model_copy(
        update={
            **tip,
            "retained": retained,
            "quarantined": (*head.quarantined, *damaged),
            "evaluated": without(head.evaluated, (body.path,)),
            "borders": without(head.borders, (body.path,)),
            "tested": without(head.tested, (body.path,)),
            "read_whole": _still(head.read_whole, (body.path,)),
            "best": best,
        }
    )


def _retire(head: Head, body: Retire) -> Head:
    retired = tuple(old for old in head.retired if old.path not in body.deleted)
    new = tuple(Retired(path=path, at_commit=head.commits) for path in body.paths)
    # A retired best checkpoint loses its files, so it must not beat later ones.
    best = None if head.best is not None and head.best.checkpoint.path in body.paths else head.best
    return head.model_copy(
        update={
            "best": best,
            "retained": without(head.retained, body.paths),
            "retired": (*retired, *new),
            "evaluated": without(head.evaluated, body.paths),
            "borders": without(head.borders, body.paths),
            "tested": without(head.tested, body.paths),
            "read_whole": _still(head.read_whole, body.paths),
        }
    )


def _evaluation(head: Head, body: Evaluation) -> Head:
    best = _better(head, body)
    retained = body.checkpoint in head.retained and body.checkpoint.path not in head.evaluated
    evaluated = appended(head.evaluated, body.checkpoint.path) if retained else head.evaluated
    return head.model_copy(update={"evaluated": evaluated, "best": best})


def _test(head: Head, body: EvaluationOnTest) -> Head:
    """Note that the checkpoint was evaluated on the test set. Its metrics decide nothing, the best included."""
    path = body.checkpoint.path
    if body.checkpoint not in head.retained or path in head.tested:
        return head
    return head.model_copy(update={"tested": (*head.tested, path)})


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
        RunLogError: an entry of its kind cannot follow, or a page that the state names cannot be read.
    """
    expected, recorded = fold(before, entry.body), entry.head
    return tuple(key for key in Head.model_fields if not _same(key, getattr(expected, key), getattr(recorded, key)))


def _same(key: str, expected: Any, recorded: Any) -> bool:
    if expected is recorded or expected == recorded:
        return True
    if key == "evaluated":  # a file does not keep their order, which means nothing
        return sorted(expected) == sorted(recorded)
    return repr(expected) == repr(recorded)  # NaN is not equal to itself
