"""What is known of a run: one reading of its log and of its attempts.

Every command, every JSON object and the API show a part of it. `RunFacts` is what the newest entry of the log says.
`RunStatus` adds the processes at work, the time by cause and the newest audit. `ListedRun` has the few facts that a
list of many runs can afford. `ComparedRun` (comparison.py) adds the curves and the code.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from baton.flows.opened_run import OpenedRun, RunHome
from baton.tasks.foundation.contracts.attempt import AttemptRecord, CommitPaceRecord, utc_time
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Best, Entry, Head, StoredEntry, Totals, WorkerStats
from baton.tasks.foundation.errors import AnotherVersion, PathRefused, RunLogError
from baton.tasks.foundation.log.accounting import GOOD, Account, Attempt, account_of, seconds_in_log
from baton.tasks.foundation.log.attempts import (
    BEFORE_TRAINING,
    State,
    cause_of,
    is_alive,
    last_attempt,
    read_attempts,
    state_of,
)
from baton.tasks.foundation.log.files import entry_number
from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.log.host_history import SlowHost, slow_hosts, summed_stats
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.log.receipts import LastAudit, last_audit
from baton.tasks.foundation.storage.interface import Storage, best_effort
from baton.tasks.foundation.storage.transfers import parallel_map
from baton.tasks.foundation.telemetry.formatting import number_words

# Entries are small and a remote store answers slowly, so more requests are in flight than for large files.
_RUNS_TOGETHER = 32
_BATCH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the newest entry of a run's log says.

    Attributes:
        run: its home, with its settings if it was opened by a run file.
        newest: the newest entry.
        totals: what the history up to it adds up to.
    """

    run: RunHome
    newest: Entry
    totals: Totals

    @classmethod
    def of(cls, run: RunHome, newest: Entry) -> "RunFacts":
        """Make the facts of a run from its newest entry."""
        return RunFacts(run=run, newest=newest, totals=run.log.totals(newest))

    @classmethod
    def as_known(cls, run: RunHome, newest: Entry) -> "RunFacts":
        """`of` for the end of a command, whose work is committed: without metrics if an old entry cannot be read."""
        with best_effort(run.home, "the history of the run could not be read", then="the result has no metrics"):
            return cls.of(run, newest)
        return RunFacts(run=run, newest=newest, totals=Totals(began=newest.time))

    @property
    def head(self) -> Head:
        """The folded state."""
        return self.newest.head

    @property
    def step(self) -> int:
        """Of the tip; 0 if there is none."""
        return 0 if self.head.tip is None else self.head.tip.step

    @property
    def epoch(self) -> float | None:
        """Epochs that are done; None if there is no tip, or the log does not know their length."""
        length = self.totals.epoch
        return None if length is None or self.head.tip is None else length.after(self.step)

    @property
    def target(self) -> int | None:
        """The step to train to, by the newest commit; by the run file if no commit says it."""
        return self.target_in_run_file if self.totals.target is None else self.totals.target

    @property
    def target_in_run_file(self) -> int | None:
        """The step to train to by the run file; None without one, or if it is not known yet."""
        run = self.run
        return run.with_recorded_examples(self.head).spec.train.known_target if isinstance(run, OpenedRun) else None

    @property
    def target_of_command(self) -> int | None:
        """The step that a command trains to, or that an earlier command did if this one finds nothing to do."""
        if not isinstance(self.run, OpenedRun) or self.head.tip is None:
            return self.target
        spec = self.run.with_recorded_examples(self.head).spec
        return spec.train.target_ahead(self.step, self.totals.target)

    @property
    def training(self) -> Mapping[str, float]:
        """The last row of metrics."""
        return {} if self.totals.row is None else self.totals.row.metrics

    @property
    def validation(self) -> Mapping[str, float]:
        """The newest evaluation on the validation set."""
        return {} if self.totals.evaluation is None else self.totals.evaluation.metrics

    @property
    def test(self) -> Mapping[str, float]:
        """The newest evaluation on the test set."""
        return {} if self.totals.test is None else self.totals.test.metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class AtWork:
    """A process that trains a run, as of its last heartbeat.

    Attributes:
        record: what it wrote.
        epoch: epochs that are done; None if their length is not known.
        silent_seconds: since the heartbeat.
        steps_per_second: while it trains; None before its first steps.
        seconds_left: until the target, with evaluations, commits and waits as so far, so before the first evaluation
            without any; None if not known yet.
    """

    record: AttemptRecord
    epoch: float | None
    silent_seconds: float
    steps_per_second: float | None
    seconds_left: float | None

    def json(self) -> dict[str, Any]:
        """JSON values."""
        keys = {"attempt", "host", "pid", "began", "alive", "doing", "from_step", "step", "committed_step", "within"}
        return {
            **self.record.model_dump(include=keys),
            "epoch": self.epoch,
            "silent_seconds": self.silent_seconds,
            "steps_per_second": self.steps_per_second,
            "seconds_left": self.seconds_left,
        }


def pace_of(record: AttemptRecord, target: int | None) -> tuple[float | None, float | None]:
    """Steps per second while a process trains, and the seconds until the target, with all that recurs beside them."""
    trained, seconds = record.step - record.from_step, record.seconds.get(GOOD, 0.0)
    if trained <= 0 or seconds <= 0:
        return None, None
    recurring = sum(amount for cause, amount in record.seconds.items() if cause not in BEFORE_TRAINING)
    return trained / seconds, None if target is None else max(target - record.step, 0) * recurring / trained


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus(RunFacts):
    """What is known of a run now: all that `baton status` shows.

    Attributes:
        account: the time by cause, and the attempts; None if none is recorded.
        at_work: the processes that train it, by start time.
        audit: the newest one; None if there is none.
        workers: the hosts of the newest commit.
        slow_hosts: those of them for which the others wait.
    """

    account: Account | None
    at_work: tuple[AtWork, ...]
    audit: LastAudit | None
    workers: tuple[WorkerStats, ...]
    slow_hosts: tuple[SlowHost, ...]

    @classmethod
    def read(cls, run: RunHome, newest: Entry | None = None) -> "RunStatus":
        """Read the attempts and the newest audit of a run.

        Args:
            newest: the newest entry of its log; None: it is read.
        """
        facts = RunFacts.of(run, newest or run.log.newest() or run.require_newest())
        now = datetime.now(UTC)
        account = account_of(run.attempts.read(), run.log, facts.newest, now=now)
        alive = [] if account is None else [each.record for each in account.attempts if each.alive]
        return cls(
            run=run,
            newest=facts.newest,
            totals=facts.totals,
            account=account,
            at_work=tuple(_at_work(record, facts, now) for record in alive),
            audit=last_audit(run.home),
            workers=facts.totals.workers,
            slow_hosts=_slow_hosts(run.log, facts.totals),
        )

    @property
    def last(self) -> AttemptRecord | None:
        """The last attempt; None if none is recorded."""
        return None if self.account is None else last_attempt(each.record for each in self.account.attempts)

    @property
    def state(self) -> State:
        """One word."""
        at_work, ended_early = bool(self.at_work), self.head.finished is not None
        return state_of(at_work=at_work, ended_early=ended_early, step=self.step, target=self.target, last=self.last)

    @property
    def cause(self) -> str:
        """Why it is not further, on one line; empty if it is at work or over, or if nobody tried."""
        return cause_of(self.state, self.last)

    @property
    def seconds(self) -> Mapping[str, float]:
        """By cause; of committed segments alone if no attempt is recorded."""
        if self.account is not None:
            return self.account.seconds
        return seconds_in_log(history_of(self.run.log.entries(blocks="read")))

    @property
    def commit_every(self) -> float | str | None:
        """How often the run commits within a segment, by the run file; None without one."""
        return self.run.spec.checkpoint.every_seconds if isinstance(self.run, OpenedRun) else None

    @property
    def commit_pace(self) -> CommitPaceRecord | None:
        """The same with `auto`, as the newest attempt that knows found."""
        attempts = () if self.account is None else self.account.attempts
        paces = (each.record.commit_pace for each in reversed(attempts))
        return next((pace for pace in paces if pace is not None), None)

    def json(self) -> dict[str, Any]:
        """The object that `baton status --json` prints, described in `flows/homes.md`."""
        head, totals, uri = self.head, self.totals, self.run.home.uri
        tip, best, pace = head.tip, head.best, self.commit_pace
        return {
            "run": self.run.name,
            "home": uri,
            "step": self.step,
            "target": self.target,
            "epoch": self.epoch,
            "segments": totals.segments,
            "entry": head.number,
            "base": head.base,
            "checkpoint": f"{uri}/{tip.path}" if tip else None,
            "state_digest": tip.state_digest if tip else None,
            "last_commit": totals.last_commit,
            "metrics": self.training,
            "partial": None if totals.partial is None else totals.partial.model_dump(),
            "evaluation": None if totals.evaluation is None else totals.evaluation.model_dump(),
            "test": None if totals.test is None else totals.test.model_dump(),
            "best": None
            if best is None
            else {
                "step": best.checkpoint.step,
                "path": best.checkpoint.path,
                **best.model_dump(exclude={"checkpoint"}),
            },
            "retained": [_checkpoint_json(ref) for ref in head.retained],
            "quarantined": [_checkpoint_json(ref) for ref in head.quarantined],
            "skipped_batches": head.skipped_batches,
            "finished": None if head.finished is None else head.finished.model_dump(),
            "metadata": totals.metadata,
            "logged": None if totals.logged is None else totals.logged.model_dump(),
            "forked_from": None if totals.forked_from is None else totals.forked_from.model_dump(),
            "seconds": self.seconds,
            "account": None if self.account is None else _account_json(self.account),
            "initialized_from": [each.model_dump() for each in totals.initialized_from],
            "workers": [
                {
                    **each.model_dump(exclude={"intervals"}),
                    "step_seconds": each.step_seconds,
                    "input_wait_share": each.input_wait_share,
                }
                for each in self.workers
            ],
            "slow_hosts": [asdict(each) for each in self.slow_hosts],
            "environment": head.environment.model_dump(),
            "state": self.state,
            "cause": self.cause or None,
            "at_work": [each.json() for each in self.at_work],
            "commits": {"every_seconds": self.commit_every, "pace": None if pace is None else pace.model_dump()},
            "audit": None if self.audit is None else _audit_json(self.audit),
        }


def _slow_hosts(log: RunLog, totals: Totals) -> tuple[SlowHost, ...]:
    """The slow hosts. The newest entry says whether there are any; all others, since when."""
    if not slow_hosts(totals.workers):
        return ()
    return slow_hosts(summed_stats(history_of(log.entries(blocks="read"))))


def _at_work(record: AttemptRecord, facts: RunFacts, now: datetime) -> AtWork:
    speed, left = pace_of(record, facts.target)
    return AtWork(
        record=record,
        epoch=None if facts.totals.epoch is None else facts.totals.epoch.after(record.step),
        # Below 0 if the clock of the process's machine is ahead.
        silent_seconds=max((now - utc_time(record.alive)).total_seconds(), 0.0),
        steps_per_second=speed,
        seconds_left=left,
    )


def best_words(best: Best | None) -> str:
    """`accuracy 0.98 at step 200`; empty if there is none."""
    return "" if best is None else f"{best.metric} {number_words(best.value)} at step {best.checkpoint.step}"


def best_json(best: Best | None) -> dict[str, Any] | None:
    """JSON values of the best evaluation."""
    return None if best is None else {"metric": best.metric, "value": best.value, "step": best.checkpoint.step}


def _checkpoint_json(ref: CheckpointRef) -> dict[str, Any]:
    return {"path": ref.path, "step": ref.step, "size": ref.size, "state_digest": ref.state_digest}


def _audit_json(audit: LastAudit) -> dict[str, Any]:
    receipt = audit.receipt
    return {
        "receipt": audit.path,
        "time": None if receipt is None else receipt.time,
        "verdict": None if receipt is None else receipt.verdict,
        "steps": audit.steps,
        "first_differing_step": audit.first_differing_step,
    }


def _account_json(account: Account) -> dict[str, Any]:
    """Seconds, and shares of the total in [0, 1]."""
    return {
        "total_seconds": account.total_seconds,
        "goodput_seconds": account.good_seconds,
        "goodput_share": account.share(account.good_seconds),
        "badput_seconds": account.bad_seconds,
        "unattributed_share": account.share(account.unattributed_seconds),
        "away_seconds": account.away_seconds,
        "alive": sum(attempt.alive for attempt in account.attempts),
        "died_without_a_word": sum(attempt.silent for attempt in account.attempts),
        "hung": sum(attempt.hung for attempt in account.attempts),
        "unreadable": account.unreadable,
        "attempts": [_attempt_json(attempt) for attempt in account.attempts],
    }


def _attempt_json(attempt: Attempt) -> dict[str, Any]:
    # The output of a process may have ten kilobytes; the record and the report have it.
    kept = attempt.record.model_dump(exclude={"format", "process", "last_lines"})
    return {**kept, "lost_seconds": attempt.lost_seconds, "is_alive": attempt.alive}


def hung_words(record: AttemptRecord) -> str:
    """Return where and why an attempt hung, on one line."""
    where = f"process {record.pid} on {record.host}, attempt {record.attempt[:8]}"
    return f"{record.message or 'no message'}  ({where}; its record has the stacks of all threads)"


@dataclass(frozen=True, slots=True, kw_only=True)
class BriefFacts:
    """What a list shows of a run, from the file of its newest entry alone.

    Attributes:
        step: of the tip; 0 if there is none.
        validation: metrics of the newest evaluated checkpoint in the tip's lineage.
        best: the best evaluation.
        entries: in the log.
        last_commit: time of the newest commit, ISO 8601.
        target: the step to train to, as of the newest commit; None if the log does not say it.
        ended_early: whether callbacks ended the run before its target.
        metadata: of the run file at the newest commit: tags of the run.
    """

    step: int
    validation: Mapping[str, float]
    best: Best | None
    entries: int
    last_commit: str | None
    target: int | None
    ended_early: bool
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, newest: Entry | StoredEntry) -> "BriefFacts":
        """Make them from an entry."""
        tip, totals = newest.head.tip, newest.totals
        return cls(
            step=0 if tip is None else tip.step,
            validation={} if totals is None or totals.evaluation is None else totals.evaluation.metrics,
            best=newest.head.best,
            entries=newest.number + 1,
            last_commit=None if totals is None else totals.last_commit,
            target=None if totals is None else totals.target,
            ended_early=newest.head.finished is not None,
            metadata={} if totals is None else totals.metadata,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """One run of a folder.

    Attributes:
        name: of the run.
        uri: of its home.
        facts: from its log, or the error that reading the log gave.
        at_work: the processes that work on it, by start time; not looked for if the log says that the run is over.
        last: its last attempt; the same.
    """

    name: str
    uri: str
    facts: BriefFacts | RunLogError | AnotherVersion | PathRefused
    at_work: Sequence[AttemptRecord] = ()
    last: AttemptRecord | None = None

    @property
    def state(self) -> State:
        """In the words of `baton status`; unknown if its log cannot be read, or does not say its target."""
        facts = self.facts
        if not isinstance(facts, BriefFacts):
            return "unknown"
        at_work, early = bool(self.at_work), facts.ended_early
        return state_of(at_work=at_work, ended_early=early, step=facts.step, target=facts.target, last=self.last)

    @property
    def cause(self) -> str:
        """As that of `RunStatus`."""
        return cause_of(self.state, self.last)

    @property
    def values(self) -> dict[str, Any]:
        """What a list is sorted and filtered by: its metadata, validation metrics, and facts; nothing that is NaN."""
        facts = self.facts
        if not isinstance(facts, BriefFacts):
            return {}
        best = {"best": facts.best.value} if facts.best is not None else {}
        fixed = {"run": self.name, "state": self.state, "step": facts.step, "last_commit": facts.last_commit}
        found = {**facts.metadata, **facts.validation, **best, **fixed}
        return {key: value for key, value in found.items() if not isinstance(value, float) or not math.isnan(value)}

    def json(self) -> dict[str, Any]:
        """JSON values: of a run whose log cannot be read, `error` and `error_class` alone."""
        run, facts = {"run": self.name, "home": self.uri}, self.facts
        if not isinstance(facts, BriefFacts):
            return {**run, "error": str(facts), "error_class": type(facts).__name__}
        return {
            **run,
            "error": None,
            "state": self.state,
            "cause": self.cause or None,
            "step": facts.step,
            "target": facts.target,
            "validation": facts.validation,
            "best": best_json(facts.best),
            "entries": facts.entries,
            "last_commit": facts.last_commit,
            "metadata": facts.metadata,
            "at_work": [{"attempt": each.attempt, "host": each.host, "pid": each.pid} for each in self.at_work],
        }


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
    """Return the runs of a folder. A run that is over costs one read; of the others, the attempts are read too.

    Args:
        root: the folder. If it is itself a run's home, that run comes first, in addition to the limit.
        after: only runs whose names come after this one, which need not exist.
        limit: the largest number of runs to return.
    """
    own = [_listed(root, "")] if after is None else []
    names = sorted(name for name in root.folders("") if after is None or name > after)
    workers = 1 if root.transfers == 1 else _RUNS_TOGETHER
    found: list[ListedRun] = []
    # One more than the page has, which tells whether another page follows.
    size = _BATCH if limit is None else min(_BATCH, limit + 1)
    for begin in range(0, len(names), size):
        batch = parallel_map(lambda name: _listed(root, name), names[begin : begin + size], workers=workers)
        found += filter(None, batch)
        if limit is not None and len(found) > limit:
            found = found[:limit]
            return RunPage(runs=[*filter(None, own), *found], more_after=found[-1].name)
    return RunPage(runs=[*filter(None, own), *found], more_after=None)


def _listed(root: Storage, name: str) -> ListedRun | None:
    """One run; None if the folder is not a run's home."""
    home = root.at(name) if name else root
    facts: BriefFacts | RunLogError | AnotherVersion | PathRefused
    try:
        newest = RunLog(home).newest_stored()
        # A run that lost its first entry is damaged, but it is still a run.
        if newest is None and not any(entry_number(path) is not None for path in home.files("log")):
            return None
        facts = BriefFacts.of(newest or RunHome.at(root, name).require_newest())
    except (RunLogError, AnotherVersion, PathRefused) as fault:
        facts = fault
    run = ListedRun(name=home.uri.rsplit("/", 1)[-1], uri=home.uri, facts=facts)
    if not isinstance(facts, BriefFacts) or run.state in {"complete", "ended early"}:
        return run
    now, records = datetime.now(UTC), read_attempts(home).records
    return replace(run, at_work=[each for each in records if is_alive(each, now=now)], last=last_attempt(records))
