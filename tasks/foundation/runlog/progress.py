"""Stop a run whose attempts in a row make no progress, and report what they have in common."""

from collections.abc import Sequence
from datetime import datetime

from tasks.foundation import errors
from tasks.foundation.contracts.attempt import HUNG, LAUNCH, AttemptRecord, mark_of
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.errors import NoProgress
from tasks.foundation.machine.processes import is_gone
from tasks.foundation.messages import HINT
from tasks.foundation.runlog.attempts import Attempts, IsGone, is_alive, read_attempts
from tasks.foundation.storage.base import Storage

# Ends that the user or the run file asked for: they say nothing about progress.
DELIBERATE_ENDS = frozenset(
    {
        "complete",
        "until_step",
        "max_segments",
        "nothing_to_do",
        "finished_early",
        "cancelled",
        "sigint",
        "KeyboardInterrupt",
        "left",
    }
)
# Refused input costs no training and says nothing about progress.
_REFUSALS = frozenset(
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.InvalidInput)
)
# A stop on request is no fault. But if each attempt is stopped before its first commit, the run never advances.
_ASKED_TO_STOP = frozenset(
    {"sigterm", "preempted", "maintenance", "Terminated", "TerminationSignal", "StoreUnreachable"}
)
_BEFORE_TRAINING = frozenset({"start-up", "prepare-data", "build", "restore", "compile"})
# Causes that only a process with the accelerator has.
_ON_DEVICES = frozenset({"restore", "compile", "train"})
_ERROR_CHARACTERS = 160
_LISTED = 10
_SOONER = "commit sooner: use shorter segments (train.segment_steps, train.segment_seconds) or checkpoint.every_seconds"


def require_progress(
    home: Storage,
    head: Head,
    *,
    limit: int,
    now: datetime,
    attempts: Attempts | None = None,
    gone: IsGone = is_gone,
) -> None:
    """Refuse to continue if the last attempts made no progress. Call it before an accelerator is acquired.

    Attempts that are still alive or that ended on request are skipped: they do not count and do not end the row.

    Args:
        home: the run's home.
        head: newest state of its log.
        limit: refuse after this number of attempts in a row without progress; at least 1.
        now: current time in UTC.
        attempts: the records of the run, if the caller has just read them.
        gone: whether the named process is known to have ended.

    Raises:
        NoProgress: with one line per attempt, the likely reason and the remedy.
    """
    records = (attempts or read_attempts(home)).records
    row = attempts_in_a_row(records, head, now=now, gone=gone)
    if len(row) >= limit:
        raise NoProgress(_diagnosis(home, head, row))


def attempts_in_a_row(
    records: Sequence[AttemptRecord], head: Head, *, now: datetime, gone: IsGone = is_gone
) -> list[AttemptRecord]:
    """Return the newest attempts that made no progress, oldest first.

    Args:
        records: all attempts by start time.
        head: newest state of the log.
        now: current time in UTC.
        gone: whether the named process is known to have ended.
    """
    failed = {
        record.attempt: record
        for record in records
        if record.ended not in DELIBERATE_ENDS | _REFUSALS and not is_alive(record, now=now, gone=gone)
    }
    explained_by_stage = {record.within for record in failed.values()}
    row: list[AttemptRecord] = []
    for record in reversed(records):
        if _advanced(record, head):
            break
        if record.attempt in failed and record.attempt not in explained_by_stage and not _only_waited(record):
            row.append(record)
        if record.afresh:
            break
    return row[::-1]


def _only_waited(record: AttemptRecord) -> bool:
    """Return whether it was stopped while it waited for remote stages, perhaps for a machine to run them."""
    if LAUNCH not in record.seconds or _ON_DEVICES & record.seconds.keys():
        return False
    if record.ended is None:  # it may have waited before, and then crashed in its own work
        return record.doing == LAUNCH
    return record.ended in {"time_budget", *_ASKED_TO_STOP}


def _advanced(record: AttemptRecord, head: Head) -> bool:
    """Return whether the run has advanced since the attempt started, or advanced during it."""
    # When a damaged tip that was evaluated is trained again and not evaluated yet, that is not progress.
    return _sort_key(mark_of(head)) > _sort_key(record.mark) or record.committed_step > record.from_step


def _sort_key(mark: str) -> tuple[int, bool]:
    """Return a sortable value of a mark: the tip's step, then whether the tip is evaluated."""
    step, _, evaluated = mark.partition(" ")
    return (int(step) if step.isdecimal() else -1), bool(evaluated)


def _diagnosis(home: Storage, head: Head, row: Sequence[AttemptRecord]) -> str:
    step = 0 if head.tip is None else head.tip.step
    count = f"{len(row)} attempts in a row" if len(row) > 1 else "the last attempt"
    lines = [f"{home.uri}: {count} made no progress beyond step {step}; not trying again:"]
    if len(row) > _LISTED:
        lines.append(f"  ({len(row) - _LISTED} earlier attempts are not listed)")
    lines += [f"  {_line(record)}" for record in row[-_LISTED:]]
    lines.append(_likely_reason(row))
    lines.append(f"{HINT}after fixing the cause: baton run FILE --try-again")
    return "\n".join(lines)


def _line(record: AttemptRecord) -> str:
    duration = f"{record.wall_seconds:.0f} s"
    reached = f", at step {record.step}" if record.step > record.from_step else ""
    end = f"ended in {record.doing}" if record.ended else f"killed or crashed in {record.doing}"
    error = ": ".join(" ".join(text.split()) for text in (record.ended, record.message) if text)
    if len(error) > _ERROR_CHARACTERS:
        error = f"{error[:_ERROR_CHARACTERS]}…"
    began = record.began[:19].replace("T", " ")
    return f"{began}  {record.host}  ran {duration}  {end}{reached}" + (f"  {error}" if error else "")


def _likely_reason(row: Sequence[AttemptRecord]) -> str:
    """Return what the attempts have in common, and the usual reason and remedy."""
    subject = f"all {len(row)} attempts" if len(row) > 1 else "the attempt"
    verb = "were" if len(row) > 1 else "was"
    ends = {record.ended for record in row}
    if ends <= _ASKED_TO_STOP:
        return (
            f"Likely: {subject} {verb} stopped before the first commit. Check how long the machine stays available, "
            f"and stop.grace_seconds; {_SOONER}"
        )
    if ends == {"time_budget"}:
        return f"Likely: the time budget of {subject} ended before the first commit; raise it, or {_SOONER}"
    if ends == {None}:
        return f"Likely: {subject} {verb} killed or crashed {_silent_deaths({record.doing for record in row})}"
    if ends == {HUNG}:
        return (
            f"Likely: {subject} waited for something that never came: another host, the input, or the store. The "
            "records below attempts/ have the stacks of all threads. If it would have come, raise stop.hang_seconds"
        )
    if len(ends) == 1:
        return f"Likely: {subject} met the same error, {row[0].ended}; waiting will not fix it"
    return "The attempts ended for different reasons; start with the newest"


def _silent_deaths(phases: set[str]) -> str:
    if len(phases) > 1:
        return f"in different phases: the machine was taken away or restarted. Check the machine's log; {_SOONER}"
    phase = next(iter(phases))
    if phase in _BEFORE_TRAINING:
        return (
            f"in {phase}: out of memory, or the machine was taken away before the first commit. Check the machine's "
            "log (exit code 137 of a container usually means out of memory); use a smaller batch or model, or a "
            "machine that stays available longer"
        )
    if phase == "train":
        return (
            "in train: the machine was taken away before the first commit, or out of memory. Check the machine's log; "
            f"{_SOONER}"
        )
    return f"in {phase}: out of memory or disk, or the machine was taken away. Check the machine's log"
