"""The runs of a storage folder, in pages.

A run that is over costs the read of its newest entry; of the others, the records of their attempts are read too.

What a run is doing, and how fast: from its log, its run file and the record of the process at work.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from flows.opened_run import RunHome, holds_a_log
from tasks.foundation.contracts.attempt import AttemptRecord
from tasks.foundation.contracts.log_entry import Commit, Entry, Evaluation
from tasks.foundation.errors import AnotherVersion, PathRefused, RunLogError
from tasks.foundation.runlog.accounting import GOOD
from tasks.foundation.runlog.attempts import is_alive, read_attempts
from tasks.foundation.runlog.brief_entry import BestFacts, RunFacts, brief_facts
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.newest_entry import Hint
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.transfers import parallel_map

State = Literal["at work", "complete", "ended early", "incomplete", "unknown"]


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a process.

    Attributes:
        steps_per_second: while it trains; None before its first steps.
        seconds_left: until the target, at this speed, without starts and commits; None if either is not known.
    """

    steps_per_second: float | None
    seconds_left: float | None


def state_of(*, at_work: bool, ended_early: bool, step: int, target: int | None) -> State:
    """The state of a run.

    Args:
        at_work: whether a process trains it.
        ended_early: whether its callbacks ended it.
        step: of its tip.
        target: the step to train to; None if it is not known.
    """
    if at_work:
        return "at work"
    if ended_early:
        return "ended early"
    if target is None:
        return "unknown"
    return "complete" if step >= target else "incomplete"


def pace_of(record: AttemptRecord, target: int | None) -> Pace:
    """The speed of a process since it began to train."""
    trained, seconds = record.step - record.from_step, record.seconds.get(GOOD, 0.0)
    if trained <= 0 or seconds <= 0:
        return Pace(None, None)
    speed = trained / seconds
    return Pace(speed, None if target is None else max(target - record.step, 0) / speed)


# Entries are small and a remote store answers slowly, so more requests are in flight than for large files.
_RUNS_TOGETHER = 32
_BATCH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """One run of a folder.

    Attributes:
        name: of the run.
        uri: of its home.
        facts: from its log, or the error that reading the log gave.
        at_work: the processes that work on it, by start time; not looked for if the log says that the run is over.
    """

    name: str
    uri: str
    facts: RunFacts | RunLogError | AnotherVersion | PathRefused
    at_work: Sequence[AttemptRecord] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """Runs in the order of their names.

    Attributes:
        runs: of this page.
        more_after: the name after which the next page begins; None if this page is the last.
    """

    runs: Sequence[ListedRun]
    more_after: str | None


def list_page(root: Storage, *, after: str | None = None, limit: int | None = None) -> RunPage:
    """Return the runs of a folder.

    Args:
        root: the folder. If it is itself a run's home, that run comes first, in addition to the limit.
        after: only runs whose names come after this one, which need not exist.
        limit: the largest number of runs to return.
    """
    own = [_listed(root, "")] if after is None else []
    names = sorted(name for name in root.folders("") if after is None or name > after)
    found: list[ListedRun] = []
    # One more than the page has, which tells whether another page follows.
    for batch in _batches(names, _BATCH if limit is None else min(_BATCH, limit + 1)):
        found += _read_together(lambda name: _listed(root, name), batch, root)
        if limit is not None and len(found) > limit:
            found = found[:limit]
            return RunPage(runs=[*filter(None, own), *found], more_after=found[-1].name)
    return RunPage(runs=[*filter(None, own), *found], more_after=None)


def _read_together(read: Callable[[str], ListedRun | None], names: Sequence[str], root: Storage) -> list[ListedRun]:
    workers = 1 if root.transfers == 1 else _RUNS_TOGETHER
    return [run for run in parallel_map(read, names, workers=workers) if run is not None]


def _batches(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for begin in range(0, len(names), size):
        yield names[begin : begin + size]


def _listed(root: Storage, name: str) -> ListedRun | None:
    """One run; None if the folder is not a run's home."""
    home = root.at(name) if name else root
    hint = Hint(home).read()
    facts: RunFacts | RunLogError | AnotherVersion | PathRefused | None = None
    try:
        if hint > 0:
            facts = brief_facts(home, hint)
        if facts is None:
            if not holds_a_log(home):
                return None
            facts = _facts(RunHome.at(root, name))
    except (RunLogError, AnotherVersion, PathRefused) as fault:
        facts = fault
    at_work = _at_work(home) if isinstance(facts, RunFacts) and not _is_over(facts) else ()
    return ListedRun(name=home.uri.rsplit("/", 1)[-1], uri=home.uri, facts=facts, at_work=at_work)


def state_in_list(facts: RunFacts, at_work: Sequence[AttemptRecord] = ()) -> State:
    """Return the state of a run, in the words of `baton status`; unknown if its log does not say its target."""
    return state_of(at_work=bool(at_work), ended_early=facts.ended_early, step=facts.step, target=facts.target)


def _is_over(facts: RunFacts) -> bool:
    return state_in_list(facts) in {"complete", "ended early"}


def _at_work(home: Storage) -> Sequence[AttemptRecord]:
    records = read_attempts(home).records
    now = datetime.now(UTC)
    return tuple(record for record in records if is_alive(record, now=now))


def _facts(run: RunHome) -> RunFacts:
    """The facts of a run whose newest entry alone does not say them, as in logs of earlier versions."""
    newest = run.require_newest()
    head, totals = newest.head, newest.totals
    commit = _newest_of(run.log, Commit, at_most=head.base)
    if totals is not None:
        validation = {} if totals.evaluation is None else totals.evaluation.metrics
    else:
        evaluation = _newest_of(run.log, Evaluation, at_most=head.number) if head.evaluated else None
        validation = evaluation.body.metrics if evaluation and isinstance(evaluation.body, Evaluation) else {}
    best = head.best
    return RunFacts(
        step=head.tip.step if head.tip else 0,
        validation=validation,
        best=None if best is None else BestFacts(metric=best.metric, value=best.value, step=best.checkpoint.step),
        entries=head.number + 1,
        last_commit=commit.time if commit else None,
        target=None if totals is None else totals.target,
        ended_early=head.finished is not None,
    )


def _newest_of(log: RunLog, kind: type[Commit | Evaluation], *, at_most: int) -> Entry | None:
    """The newest entry of a kind, up to number `at_most`. It is usually near the end, so few files are read."""
    for number in range(at_most, -1, -1):
        entry = log.entry(number)
        if isinstance(entry.body, kind):
            return entry
    return None
