"""Entries as bytes and back.

The bytes of an entry repeat nothing large: the identity stands in the entry that sets it and is
named by number and digest elsewhere, and retained checkpoints move into pages (`kept_pages.py`). In memory an entry is
whole.

The last key of the JSON object is the sha256 of all bytes of the file before that key. It is compared before anything
else is believed, so a bit that flips in an entry is found whatever it means. It covers the bytes as they are written
and not the parsed entry, from which a reader drops the keys that it does not know.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.identity import LazyIdentity, digest_of, part_in_run_file
from tasks.foundation.contracts.lean_entry import (
    LeanBest,
    LeanEntry,
    LeanHead,
    LeanRef,
    SetIn,
    lean_reads,
    left_out,
    whole_reads,
)
from tasks.foundation.contracts.log_entry import (
    Best,
    Body,
    Change,
    Commit,
    Entry,
    Evaluation,
    Head,
    LastEvaluation,
    Origin,
    Totals,
)
from tasks.foundation.contracts.long_list import LongList
from tasks.foundation.errors import RunLogError
from tasks.foundation.runlog.columns import with_columns, with_rows
from tasks.foundation.runlog.kept_pages import PageStore, lists_of
from tasks.foundation.runlog.page_layout import lay_out

_DIGEST_AT_END = re.compile(rb',"sha256":"([0-9a-f]{64})"}\Z')


@dataclass(frozen=True)
class Decoded:
    """An entry, and which entry set its identity.

    Attributes:
        entry: the whole entry.
        lean: the head in its file.
        size: bytes of its file.
    """

    entry: Entry
    lean: LeanHead
    size: int

    @property
    def identity(self) -> SetIn:
        """Which entry has the identity."""
        return self.lean.identity


@dataclass(frozen=True, slots=True)
class Encoded:
    """The bytes of an entry, and the pages to write before it, by digest."""

    data: bytes
    pages: dict[str, bytes]


def encode(entry: Entry, before: Decoded | None, store: PageStore) -> Encoded:
    """Return the bytes of an entry.

    Args:
        entry: the entry.
        before: the entry before it; None for the first.
        store: the pages of the log.
    """
    head, body = entry.head, entry.body
    retained, pages = lay_out(head, None if before is None else before.entry.head, store)
    newest = head.retained[-1] if head.retained else None
    lean = LeanHead(
        base=head.base,
        commits=head.commits,
        tip="newest" if newest is not None and head.tip == newest else _lean(head.tip),
        retained=retained,
        retired=head.retired,
        quarantined=tuple(LeanRef.model_validate(left_out(ref)) for ref in head.quarantined),
        best=None if head.best is None else _lean_best(head.best, {kept.path for kept in retained.recent}),
        skipped_batches=head.skipped_batches,
        rewinds=head.rewinds,
        blown_up_at=head.blown_up_at,
        finished=head.finished,
        tested=head.tested,
        read_whole=lean_reads(head.read_whole, retained.recent),
        identity=_set_in(entry, before),
        environment=head.environment,
    )
    whole = {
        "format": 1,
        "number": entry.number,
        "time": entry.time,
        "attempt": entry.attempt,
        "body": {"kind": body.kind, **with_columns(_compact(body))},
        "head": _compact(lean),
        "totals": None if entry.totals is None else _totals_json(entry.totals, body),
    }
    return Encoded(with_digest(json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()), pages)


def with_digest(data: bytes) -> bytes:
    """Return the JSON object of an entry with the digest of its own bytes as its last key.

    Args:
        data: a JSON object with at least one key, without white space after it.
    """
    before = data[:-1]
    return before + b',"sha256":"%s"}' % hashlib.sha256(before).hexdigest().encode()


def has_its_digest(data: bytes) -> bool:
    """Whether the bytes of an entry have the digest that they end with."""
    found = _DIGEST_AT_END.search(data)
    return found is not None and hashlib.sha256(data[: found.start()]).hexdigest().encode() == found[1]


def decode(data: bytes, *, where: str, number: int, resolve: Callable[[int], Decoded], store: PageStore) -> Decoded:
    """Return the entry that bytes hold.

    Args:
        data: the bytes.
        where: the file, for messages.
        number: the number of the entry, from the name of its file.
        resolve: returns an earlier entry, which set the identity.
        store: the pages of the log.

    Raises:
        RunLogError: the bytes are not an entry, are not as they were written, or do not fit the entries that it names.
        AnotherVersion: a newer version of Baton wrote it.
    """
    whole = _parsed(data)
    if not has_its_digest(data):
        if "schema_version" in whole and "format" not in whole:  # the first revisions wrote no digest
            LeanEntry.from_json(data, where=where, error=RunLogError)
        raise RunLogError(f"{where} is damaged: its bytes do not have the sha256 that it ends with")
    lean = LeanEntry.from_json(with_rows(data, whole), where=where, error=RunLogError)
    if lean.number != number:
        raise _other_number(where, lean.number)
    identity = _identity(lean, where, resolve)
    try:
        lists = lists_of(lean.head.retained, store)
        head = _head(lean, lists, identity)
    except ValidationError as fault:
        raise RunLogError(f"{where}: not a readable Entry: head.retained: {fault.errors()[0]['msg']}") from fault
    except ValueError as fault:
        raise RunLogError(f"{where}: not a readable Entry: head.{fault}") from fault
    entry = Entry(
        number=lean.number, time=lean.time, attempt=lean.attempt, body=lean.body, head=head, totals=_totals(lean)
    )
    return Decoded(entry, lean.head, len(data))


def _head(lean: LeanEntry, lists: dict[Any, Any], identity: Mapping[str, Any]) -> Head:
    retained, head = lists["retained"], lean.head
    if head.tip == "newest" and not retained:
        raise ValueError("tip: it is the newest retained checkpoint, and none is retained")
    return Head.model_construct(
        number=lean.number,
        base=head.base,
        commits=head.commits,
        tip=retained[-1] if head.tip == "newest" else _ref(head.tip),
        **lists,
        retired=head.retired,
        quarantined=tuple(ref.ref() for ref in head.quarantined),
        best=None if head.best is None else _best(head.best, retained),
        skipped_batches=head.skipped_batches,
        rewinds=head.rewinds,
        blown_up_at=head.blown_up_at,
        finished=head.finished,
        tested=head.tested,
        read_whole=whole_reads(head.read_whole, head.retained.recent),
        identity=identity,
        environment=head.environment,
    )


def _identity(lean: LeanEntry, where: str, resolve: Callable[[int], Decoded]) -> Mapping[str, Any]:
    """The identity of an entry. One that an earlier entry has is read at its first use."""
    at = lean.head.identity
    fault = RunLogError(f"{where}: entry {at.entry} does not have its identity, which has the digest {at.digest}")
    if at.entry == lean.number:
        own = _set_by(lean.body)
        if own is None or _set_here(at.entry, own) != at:
            raise fault
        return own
    if at.entry > lean.number:
        raise fault

    def read() -> Mapping[str, Any]:
        source = resolve(at.entry)
        if source.identity != at:
            raise fault
        return source.entry.head.identity

    return LazyIdentity(read, digest=at.digest, in_run_file=at.in_run_file)


def _set_by(body: Body) -> Mapping[str, Any] | None:
    """The identity that an entry sets; None if it sets none."""
    return body.identity if isinstance(body, Origin | Change) else None


def _set_in(entry: Entry, before: Decoded | None) -> SetIn:
    own = _set_by(entry.body)
    if own is not None:
        return _set_here(entry.number, own)
    if before is None:
        raise AssertionError("the first entry sets the identity")
    return before.identity


def _set_here(number: int, identity: Mapping[str, Any]) -> SetIn:
    return SetIn(entry=number, digest=digest_of(identity), in_run_file=digest_of(part_in_run_file(identity)))


def _totals_json(totals: Totals, body: Body) -> dict[str, Any]:
    found = with_columns(_compact(_lean_totals(totals, body)))
    # Said aloud, because an evaluation that is left out is the body's.
    no_evaluation = isinstance(body, Evaluation) and totals.evaluation is None
    return {**found, "evaluation": None} if no_evaluation else found


def _lean_totals(totals: Totals, body: Body) -> Totals:
    """Leave out what the body has too: the newest row and losses, the target, or the newest evaluation."""
    if isinstance(body, Evaluation):
        same = totals.evaluation is not None and _text(totals.evaluation) == _text(LastEvaluation.of(body))
        return totals.model_copy(update={"evaluation": None}) if same else totals
    if not isinstance(body, Commit):
        return totals
    workers = tuple(each.model_copy(update={"losses": ()}) for each in totals.workers)
    return totals.model_copy(
        update={
            "row": None if body.history else totals.row,
            "target": totals.target if body.target is None else None,
            "workers": workers if body.workers else totals.workers,
        }
    )


def _totals(lean: LeanEntry) -> Totals | None:
    """The totals of an entry, with what `_lean_totals` left out."""
    totals, body = lean.totals, lean.body
    if totals is None:
        return None
    if isinstance(body, Evaluation) and "evaluation" not in totals.model_fields_set:
        return totals.model_copy(update={"evaluation": LastEvaluation.of(body)})
    if not isinstance(body, Commit):
        return totals
    losses = zip(totals.workers, body.workers, strict=False)
    workers = tuple(total.model_copy(update={"losses": newest.losses}) for total, newest in losses)
    return totals.model_copy(
        update={
            "row": body.history[-1] if body.history else totals.row,
            "target": totals.target if body.target is None else body.target,
            "workers": workers if body.workers else totals.workers,
        }
    )


def _text(value: Contract) -> str:
    return value.model_dump_json()  # unlike the values, it is the same for a metric that is not a number


def _parsed(data: bytes) -> dict[str, Any]:
    """The JSON of an entry; empty for what is no entry, because the contract says what is wrong with it."""
    try:
        whole = from_json(data)
    except ValueError:
        return {}
    return whole if isinstance(whole, dict) else {}


def _compact(value: Contract) -> dict[str, Any]:
    """Return the JSON of a value without its defaults."""
    return value.model_dump(mode="json", exclude_defaults=True)


def _lean(ref: CheckpointRef | None) -> LeanRef | None:
    return None if ref is None else LeanRef.model_validate(left_out(ref))


def _ref(lean: LeanRef | None) -> CheckpointRef | None:
    return None if lean is None else lean.ref()


def _best(lean: LeanBest, retained: Sequence[CheckpointRef]) -> Best:
    if isinstance(lean.checkpoint, LeanRef):
        checkpoint = lean.checkpoint.ref()
    else:
        recent = retained.recent if isinstance(retained, LongList) else retained
        named = [ref for ref in recent if ref.path == lean.checkpoint]
        if not named:
            raise ValueError(f"best.checkpoint: {lean.checkpoint} is not one of the newest retained checkpoints")
        checkpoint = named[0]
    return Best(checkpoint=checkpoint, metric=lean.metric, mode=lean.mode, value=lean.value)


def _lean_best(best: Best, recent: Set[str]) -> LeanBest:
    path = best.checkpoint.path
    checkpoint = path if path in recent else LeanRef.model_validate(left_out(best.checkpoint))
    return LeanBest(checkpoint=checkpoint, metric=best.metric, mode=best.mode, value=best.value)


def _other_number(where: str, found: int) -> RunLogError:
    return RunLogError(f"{where} has the number {found}")
