"""No progress, no loop: attempts in a row that do not bring a run further end it, with a diagnosis."""

from collections.abc import Sequence
from datetime import datetime

from tasks.foundation import errors
from tasks.foundation.contracts.attempt import LAUNCH, AttemptRecord, mark_of
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.errors import NoProgress
from tasks.foundation.messages import HINT
from tasks.foundation.process import is_gone
from tasks.foundation.runlog.attempts import Gone, is_alive, read_attempts
from tasks.foundation.storage.base import Storage

# Ends that the user, or the run file, asked for: they say nothing about whether the run can get further.
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
# Input that was refused was told of at once, and costs no training; it says nothing about the run.
_REFUSALS = frozenset(
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.InvalidInput)
)
# Being told to go is nobody's fault, but whoever is told so before each first commit never gets anywhere.
_TOLD_TO_GO = frozenset({"sigterm", "preempted", "maintenance", "Terminated", "TerminationSignal", "StoreUnreachable"})
_BEFORE_TRAINING = frozenset({"start-up", "prepare-data", "build", "restore", "compile"})
# What an attempt spends time on that trains in its own process.
_ON_DEVICES = frozenset({"restore", "compile", "train"})
_ERROR_CHARACTERS = 160
_LISTED = 10
_SOONER = "shorter segments (train.segment_steps, train.segment_seconds) or checkpoint.every_seconds commit sooner"


def require_progress(home: Storage, head: Head, *, limit: int, now: datetime, gone: Gone = is_gone) -> None:
    """Refuse to go on if the last attempts brought the run no further. To be called before an accelerator is touched.

    Attempts that still live are not counted, nor are those that ended as they were asked to; neither breaks the row.

    Args:
        home: the run's home.
        head: the newest state of its log.
        limit: so many attempts in a row without progress are enough; at least 1.
        now: the time of day, UTC.
        gone: whether the process of a name is known to have ended.

    Raises:
        NoProgress: with one line for each of them, the likely reason and the remedy.
    """
    row = attempts_in_a_row(read_attempts(home).records, head, now=now, gone=gone)
    if len(row) >= limit:
        raise NoProgress(_diagnosis(home, head, row))


def attempts_in_a_row(
    records: Sequence[AttemptRecord], head: Head, *, now: datetime, gone: Gone = is_gone
) -> list[AttemptRecord]:
    """The newest attempts that did not bring the run further, oldest first.

    Args:
        records: all attempts, by when they began.
        head: the newest state of the log.
        now: the time of day, UTC.
        gone: whether the process of a name is known to have ended.
    """
    failed = {
        record.attempt: record
        for record in records
        if record.ended not in DELIBERATE_ENDS | _REFUSALS and not is_alive(record, now=now, gone=gone)
    }
    told_by_a_stage = {record.within for record in failed.values()}
    row: list[AttemptRecord] = []
    for record in reversed(records):
        if _advanced(record, head):
            break
        if record.attempt in failed and record.attempt not in told_by_a_stage and not _only_waited(record):
            row.append(record)
        if record.afresh:
            break
    return row[::-1]


def _only_waited(record: AttemptRecord) -> bool:
    """Whether it had to go while it waited for stages elsewhere, perhaps for a machine to run them."""
    if LAUNCH not in record.seconds or _ON_DEVICES & record.seconds.keys():
        return False
    if record.ended is None:  # it may have waited before, and then have died of what it does itself
        return record.doing == LAUNCH
    return record.ended in {"time_budget", *_TOLD_TO_GO}


def _advanced(record: AttemptRecord, head: Head) -> bool:
    """Whether the run is further than when the attempt took it up, or was so in between."""
    # A damaged tip, once evaluated, is trained again and is not evaluated any more: that is no progress.
    return _reach(mark_of(head)) > _reach(record.mark) or record.committed_step > record.from_step


def _reach(mark: str) -> tuple[int, bool]:
    """Marks in order: by the tip's step, and then whether it has been evaluated."""
    step, _, evaluated = mark.partition(" ")
    return (int(step) if step.isdecimal() else -1), bool(evaluated)


def _diagnosis(home: Storage, head: Head, row: Sequence[AttemptRecord]) -> str:
    step = 0 if head.tip is None else head.tip.step
    count = f"{len(row)} attempts in a row" if len(row) > 1 else "the last attempt"
    lines = [f"{home.uri}: {count} did not bring the run further than step {step}, so it is not tried again:"]
    if len(row) > _LISTED:
        lines.append(f"  ({len(row) - _LISTED} earlier ones are left out)")
    lines += [f"  {_line(record)}" for record in row[-_LISTED:]]
    lines.append(_reading(row))
    lines.append(f"{HINT}after the repair: baton run FILE --try-again")
    return "\n".join(lines)


def _line(record: AttemptRecord) -> str:
    lived = f"{record.wall_seconds:.0f} s"
    reached = f", at step {record.step}" if record.step > record.from_step else ""
    what = f"ended in {record.doing}" if record.ended else f"died without a word in {record.doing}"
    error = ": ".join(" ".join(text.split()) for text in (record.ended, record.message) if text)
    if len(error) > _ERROR_CHARACTERS:
        error = f"{error[:_ERROR_CHARACTERS]}…"
    began = record.began[:19].replace("T", " ")
    return f"{began}  {record.host}  lived {lived}  {what}{reached}" + (f"  {error}" if error else "")


def _reading(row: Sequence[AttemptRecord]) -> str:
    """What the attempts have in common, and what that usually means."""
    all_of_them = f"all {len(row)}" if len(row) > 1 else "it"
    ends = {record.ended for record in row}
    if ends <= _TOLD_TO_GO:
        return (
            f"Likely: {all_of_them} had to go before the first commit. See how long the machine is given, and "
            f"stop.grace_seconds; {_SOONER}"
        )
    if ends == {"time_budget"}:
        return f"Likely: the time budget of {all_of_them} was used up before the first commit; give more, or {_SOONER}"
    if ends == {None}:
        return f"Likely: {all_of_them} died without a word {_silent_deaths({record.doing for record in row})}"
    if len(ends) == 1:
        return f"Likely: {all_of_them} met the same error, {row[0].ended}; waiting will not repair it"
    return "They ended in different ways; begin with the newest"


def _silent_deaths(phases: set[str]) -> str:
    if len(phases) > 1:
        return f"in different phases: the machine is taken or restarted. See its own log; {_SOONER}"
    phase = next(iter(phases))
    if phase in _BEFORE_TRAINING:
        return (
            f"in {phase}: memory runs out there, or the machine is taken before the first commit. See the machine's "
            "own log (a container's exit code 137 is mostly memory); a smaller batch or model, or a machine that "
            "stays longer"
        )
    if phase == "train":
        return f"in train: the machine is taken before the first commit, or memory runs out. See its own log; {_SOONER}"
    return f"in {phase}: memory or disk runs out there, or the machine is taken just then. See its own log"
