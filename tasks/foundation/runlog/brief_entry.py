"""The few facts of a run's newest entry that a list of many runs shows, without decoding the whole entry.

A list of 10,000 runs has a tenth of a millisecond for each. What this reader does not understand is left to `RunLog`,
which reads it or says what is wrong with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationError

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.lean_entry import step_in_path
from tasks.foundation.errors import FileMissing, FileTooLarge
from tasks.foundation.runlog.entry_codec import has_its_digest
from tasks.foundation.runlog.entry_paths import entry_path
from tasks.foundation.runlog.newest_entry import last_from
from tasks.foundation.storage.base import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class BestFacts:
    """The best evaluation."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a list shows of a run.

    Attributes:
        step: of the tip; 0 if there is none.
        validation: metrics of the newest evaluated checkpoint in the tip's lineage.
        best: the best evaluation.
        entries: in the log.
        last_commit: time of the newest commit, ISO 8601.
        target: the step to train to, as of the newest commit; None if the log does not say it.
        ended_early: whether callbacks ended the run before its target.
    """

    step: int
    validation: Mapping[str, float]
    best: BestFacts | None
    entries: int
    last_commit: str | None
    target: int | None
    ended_early: bool


class _Ref(Contract):
    path: str
    step: int | None = Field(default=None, ge=0)


class _Best(Contract):
    checkpoint: _Ref | str
    metric: str
    value: float


class _Retained(Contract):
    recent: tuple[_Ref, ...] = ()


class _Head(Contract):
    tip: _Ref | Literal["newest"] | None = "newest"
    retained: _Retained = _Retained()
    best: _Best | None = None
    finished: dict[str, Any] | None = None


class _Body(Contract):
    kind: Literal["origin", "checkpoint", "quarantine", "rewind", "retire", "evaluation", "test", "finish", "change"]
    metrics: dict[str, float] = Field(default={}, description="of an evaluation")
    target: int | None = Field(default=None, description="of a commit")


class _Evaluation(Contract):
    metrics: dict[str, float]


class _Totals(Contract):
    evaluation: _Evaluation | None = None
    last_commit: str | None = None
    target: int | None = None


class _Entry(Contract):
    format: Literal[1]
    number: int
    time: str
    body: _Body
    head: _Head
    totals: _Totals


def brief_facts(home: Storage, hint: int) -> RunFacts | None:
    """Return the facts of a run from its newest entry.

    Args:
        home: of the run.
        hint: the number in `log/HINT`; at least 1.

    Returns:
        None if the entry does not say it, is missing, is damaged, or is of another version.
    """
    try:
        newest = _read(home, last_from(home, hint))
        return RunFacts(
            step=_step_of_tip(newest.head),
            validation=_validation(newest),
            best=_best(newest.head),
            entries=newest.number + 1,
            last_commit=newest.time if newest.body.kind == "checkpoint" else newest.totals.last_commit,
            # Totals leave out what a commit has; see `entry_codec.py`.
            target=newest.totals.target if newest.body.target is None else newest.body.target,
            ended_early=newest.head.finished is not None,
        )
    except (FileMissing, FileTooLarge, ValidationError, _NotHere):
        return None


class _NotHere(ValueError):
    """An entry does not say what is asked for."""


def _read(home: Storage, number: int) -> _Entry:
    data = home.read(entry_path(number))
    if not has_its_digest(data):
        raise _NotHere
    entry = _Entry.parse(data, extra="ignore")
    if entry.number != number:
        raise _NotHere
    return entry


def _step_of_tip(head: _Head) -> int:
    if head.tip != "newest":
        return 0 if head.tip is None else _step(head.tip)
    if not head.retained.recent:
        raise _NotHere
    return _step(head.retained.recent[-1])


def _step(ref: _Ref) -> int:
    step = step_in_path(ref.path) if ref.step is None else ref.step
    if step is None:
        raise _NotHere
    return step


def _validation(newest: _Entry) -> Mapping[str, float]:
    # Totals leave out an evaluation that the body has; see `entry_codec.py`.
    if newest.body.kind == "evaluation" and "evaluation" not in newest.totals.model_fields_set:
        return newest.body.metrics
    evaluation = newest.totals.evaluation
    return {} if evaluation is None else evaluation.metrics


def _best(head: _Head) -> BestFacts | None:
    best = head.best
    if best is None:
        return None
    ref = best.checkpoint
    if isinstance(ref, str):
        named = [one for one in head.retained.recent if one.path == ref]
        if not named:
            raise _NotHere
        ref = named[0]
    return BestFacts(metric=best.metric, value=best.value, step=_step(ref))
