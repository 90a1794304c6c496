"""The records of attempts: whether the run makes progress, how often a process is lost; old ones many in a file.

An attempt is one process's try to bring a run further. Its record is rewritten at every heartbeat, and informational:
no commit depends on it. A run whose attempts in a row make no progress is stopped, with what they have in common.

So that a run that goes on for weeks does not read each of them again, `attempts/closed/<digest>.json` holds the bytes
of records whose attempts are over, and never changes. It is written before the records that it holds are deleted, so a
crash leaves both. A record outside of it counts more: a process that wakes up after days writes its own again.
"""

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from baton.tasks.foundation import errors
from baton.tasks.foundation.contracts.attempt import HUNG, LAUNCH, AttemptRecord, attempt_path, mark_of, utc_time
from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.home_files import most_bytes
from baton.tasks.foundation.contracts.log_entry import Head
from baton.tasks.foundation.errors import (
    AnotherVersion,
    FileAlreadyThere,
    FileMissing,
    NoProgress,
    RunLogError,
    StaleWriter,
    StorageError,
)
from baton.tasks.foundation.machine.processes import is_gone
from baton.tasks.foundation.machine.stops import RESUMABLE
from baton.tasks.foundation.storage.interface import Storage, discard
from baton.tasks.foundation.storage.transfers import parallel_map
from baton.tasks.foundation.text import HINT, command, message, time_words

_LOGGER = logging.getLogger(__name__)
_FOLDER: Final = "attempts/closed/"
# Nobody writes to a record any more after this time, unless a process slept for it.
_CLOSED_AFTER: Final = timedelta(days=1)
# Fewer are not worth a file. Of 10,000 records, about 100 packs and 100 files are left.
_LEAST_RECORDS: Final = 100
# More are packed by the next process, so that the first one in an old home does not work for long.
_MOST_RECORDS: Final = 1000
# A line of JSON becomes a text in JSON, where quotes and line ends take twice the bytes.
_JSON_IN_JSON: Final = 2


class AttemptPack(Contract):
    """Records of attempts that are over."""

    format: Literal[1] = 1
    records: tuple[str, ...]  # as they were in their files, also what a newer version has added


def is_pack(path: str) -> bool:
    """Whether a file below `attempts/` is a pack."""
    return path.startswith(_FOLDER)


def read_pack(home: Storage, path: str) -> tuple[list[AttemptRecord], int] | None:
    """Return the records of a pack, and how many of them cannot be read; None if the pack cannot be read.

    Raises:
        FileMissing: it is not there.
    """
    texts = _texts(home, path)
    if texts is None:
        return None
    records = []
    for text in texts:
        with suppress(RunLogError, AnotherVersion):
            records.append(AttemptRecord.from_json(text.encode(), where=path, error=RunLogError))
    return records, len(texts) - len(records)


def _texts(home: Storage, path: str) -> tuple[str, ...] | None:
    """The records of a pack as they were in their files; None if the pack cannot be read."""
    try:
        data = home.read(path)
        if path != _path(data):
            return None
        return AttemptPack.from_json(data, where=path, error=RunLogError).records
    except FileMissing:
        raise
    except (StorageError, RunLogError, AnotherVersion):
        return None


def pack_beside(home: Storage, records: Sequence[AttemptRecord], loose: Sequence[str], *, now: datetime) -> None:
    """Pack old records in another thread, if there are enough of them. Best effort; a later process tries again.

    Args:
        loose: paths of the records that are files of their own.
        now: current time in UTC.
    """
    paths = packable(records, loose, now=now)
    if paths:
        threading.Thread(target=pack, args=(home, paths), name="baton-attempt-packs", daemon=True).start()


def packable(records: Sequence[AttemptRecord], loose: Sequence[str], *, now: datetime) -> list[str]:
    """Return the paths of the records to pack; none if they are few."""
    files = set(loose)
    old = [attempt_path(record.attempt) for record in records if now - utc_time(record.alive) > _CLOSED_AFTER]
    paths = [path for path in old if path in files]
    return paths[:_MOST_RECORDS] if len(paths) >= _LEAST_RECORDS else []


def pack(home: Storage, paths: Sequence[str]) -> None:
    """Write one pack of these records, except those that are in a pack already, and delete their files."""
    try:
        texts = _texts_of_one_pack(parallel_map(home.read, paths, workers=home.transfers))
        paths = paths[: len(texts)]
        # A process that died between the two steps has left both.
        known = {text for path in home.files("attempts") if is_pack(path) for text in _texts(home, path) or ()}
        new = tuple(text for text in texts if text not in known)
        if new:
            data = AttemptPack(records=new).to_json()
            with suppress(FileAlreadyThere):
                home.create(_path(data), data)
            if home.read(_path(data)) != data:
                return
        parallel_map(lambda path: discard(home, path), paths, workers=home.transfers)
    except (StorageError, UnicodeDecodeError) as fault:  # another process may be packing them
        _LOGGER.debug("%s: records of attempts are not packed: %s", home.uri, fault)


def _texts_of_one_pack(records: Sequence[bytes]) -> list[str]:
    """The first records, as many as fit into a pack; the next process packs the others."""
    room, texts = most_bytes(f"{_FOLDER}x.json") // _JSON_IN_JSON, []
    for data in records:
        room -= len(data)
        if room < 0:
            break
        texts.append(data.decode())
    return texts


def _path(data: bytes) -> str:
    return f"{_FOLDER}{hashlib.sha256(data).hexdigest()[:32]}.json"


# Three times the longest interval between heartbeats: two may be late or lost.
SILENT_AFTER_SECONDS = 90.0
_READERS = 8

IsGone = Callable[[str], bool]
_Gone = Literal["gone"]
_GONE: _Gone = "gone"


@dataclass(frozen=True, slots=True)
class Attempts:
    """The records of a run.

    Attributes:
        records: all readable records, by start time.
        unreadable: number of files that are not a record, or whose name is not that of their attempt.
        files: paths of the records that are files of their own.
    """

    records: tuple[AttemptRecord, ...]
    unreadable: int
    files: tuple[str, ...] = ()


class AttemptReader:
    """Reads the records of a run. It remembers those of attempts that ended, and reads only the others again."""

    def __init__(self, home: Storage) -> None:
        """Read nothing yet."""
        self._home = home
        self._ended: dict[str, AttemptRecord] = {}
        self._packs: dict[str, tuple[list[AttemptRecord], int]] = {}

    def read(self) -> Attempts:
        """Read the records; for a run without any this is one listing.

        Raises:
            StorageError: the listing fails.
        """
        paths = sorted(self._home.files("attempts"))
        if not paths:
            return Attempts((), 0)
        files = [path for path in paths if not is_pack(path)]
        # Parallel reads hide the latency of remote storage.
        found = parallel_map(self._record, files, workers=_READERS)
        if _GONE in found:  # packed since they were listed, so the pack is in no listing yet
            paths = sorted(self._home.files("attempts"))
        of_packs = parallel_map(self._pack, [path for path in paths if is_pack(path)], workers=_READERS)
        records = [record for record in found if isinstance(record, AttemptRecord)]
        # Seconds of the shut-down may still be added to them; nobody who reads twice needs those.
        self._ended = {attempt_path(record.attempt): record for record in records if record.ended is not None}
        known = {record.attempt: record for packed, _ in of_packs for record in packed}
        known |= {record.attempt: record for record in records}
        in_order = sorted(known.values(), key=lambda record: (utc_time(record.began), record.attempt))
        unreadable = found.count(None) + sum(count for _, count in of_packs)
        return Attempts(tuple(in_order), unreadable, tuple(files))

    def _pack(self, path: str) -> tuple[list[AttemptRecord], int]:
        """The records of a pack, which never changes, and how many cannot be read; an unreadable pack counts as one."""
        if path not in self._packs:
            try:
                found = read_pack(self._home, path)
            except FileMissing:
                return [], 0
            if found is None:
                return [], 1
            self._packs[path] = found
        return self._packs[path]

    def _record(self, path: str) -> "AttemptRecord | _Gone | None":
        return self._ended.get(path) or _read(self._home, path)


def read_attempts(home: Storage) -> Attempts:
    """Read the records of a run once; see `AttemptReader.read`."""
    return AttemptReader(home).read()


def is_alive(record: AttemptRecord, *, now: datetime, gone: IsGone = is_gone) -> bool:
    """Return whether an attempt is still running, as far as its record shows.

    Args:
        now: current time in UTC.
        gone: whether the named process is known to have ended, see `process.is_gone`.
    """
    if record.ended is not None or gone(record.process):
        return False
    # A heartbeat in the future means that a clock was changed, not that the process is alive.
    return abs((now - utc_time(record.alive)).total_seconds()) <= SILENT_AFTER_SECONDS


def _read(home: Storage, path: str) -> "AttemptRecord | _Gone | None":
    try:
        record = AttemptRecord.from_json(home.read(path), where=path, error=RunLogError)
    except FileMissing:  # packed since it was listed
        return _GONE
    except (StorageError, RunLogError, AnotherVersion):
        return None
    return record if path == attempt_path(record.attempt) else None


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
_RESUMABLE = frozenset(
    {"time_budget", *(name for name, kind in vars(errors).items() if getattr(kind, "exit_code", 0) == RESUMABLE)}
)
BEFORE_TRAINING = frozenset({"start-up", "prepare-data", "build", "restore", "compile"})
# Causes that only a process with the accelerator has.
_ON_DEVICES = frozenset({"restore", "compile", "train"})
_REACHED = frozenset({"complete", "nothing_to_do", "finished_early", "left"})
_STOP_WORDS: Final = {
    **dict.fromkeys(("sigint", "KeyboardInterrupt"), "stopped by Ctrl-C (SIGINT)"),
    **dict.fromkeys(("sigterm", "Terminated", "TerminationSignal"), "stopped by SIGTERM"),
    "max_segments": "stopped by --max-segments",
    "until_step": "stopped at --until-step",
    "time_budget": "stopped, the time budget was used up",
}
_ERROR_CHARACTERS = 160
_LISTED = 10
_SOONER = "commit sooner: use shorter segments (train.segment_steps, train.segment_seconds) or checkpoint.every_seconds"


State = Literal["at work", "complete", "ended early", "failed", "incomplete", "unknown"]


def state_of(*, at_work: bool, ended_early: bool, step: int, target: int | None, last: AttemptRecord | None) -> State:
    """The state of a run.

    Args:
        at_work: whether a process trains it.
        ended_early: whether its callbacks ended it.
        step: of its tip.
        target: the step to train to; None if it is not known.
        last: its last attempt, see `last_attempt`.
    """
    if at_work:
        return "at work"
    if ended_early:
        return "ended early"
    if target is not None and step >= target:
        return "complete"
    if last is not None and failed(last):
        return "failed"
    return "unknown" if target is None else "incomplete"


def last_attempt(records: Iterable[AttemptRecord]) -> AttemptRecord | None:
    """The attempt that was alive last. No stage, whose parent says the same, and no loser of a race for the run."""
    own = [record for record in records if record.within is None and record.ended != StaleWriter.__name__]
    return max(own, key=lambda record: utc_time(record.alive), default=None)


def failed(record: AttemptRecord) -> bool:
    """Whether an error ended the attempt. A stop, a refusal of input and what can be resumed as it is are none."""
    return record.ended is not None and record.ended not in DELIBERATE_ENDS | _REFUSALS | _ASKED_TO_STOP | _RESUMABLE


def end_words(record: AttemptRecord) -> str:
    """Why an attempt that is not alive ended, on one line: `killed or crashed in train`, `NonFinite: the loss …`."""
    if record.ended is None:
        return f"killed or crashed in {record.doing}"
    lines = [line.strip() for line in (record.message or "").splitlines() if not line.startswith(HINT)]
    if lines and re.fullmatch(r".+, line \d+(, in \S+)?:", lines[0]):  # an error of the user's code: its line first
        lines = [lines[-1], f"({lines[0].removesuffix(':')})"]
    reason = _STOP_WORDS.get(record.ended, record.ended.replace("_", " "))
    return f"{reason}: {' '.join(lines)}" if lines else reason


def cause_of(state: State, last: AttemptRecord | None) -> str:
    """Why a run is not further, for people; empty if it is at work or over."""
    over = last is None or state in {"at work", "complete", "ended early"} or last.ended in _REACHED
    return "" if over or last is None else end_words(last)


def require_progress(
    home: Storage,
    head: Head,
    *,
    limit: int,
    now: datetime,
    attempts: Attempts | None = None,
) -> None:
    """Refuse to continue if the last attempts made no progress. Call it before an accelerator is acquired.

    Attempts that are still alive or that ended on request are skipped: they do not count and do not end the row.

    Args:
        limit: refuse after this number of attempts in a row without progress; at least 1.
        now: current time in UTC.
        attempts: the records of the run, if the caller has just read them.

    Raises:
        NoProgress: with one line per attempt, the likely reason and the remedy.
    """
    records = (attempts or read_attempts(home)).records
    row = attempts_in_a_row(records, head, now=now)
    if len(row) >= limit:
        raise NoProgress(_diagnosis(home, head, row))


def attempts_in_a_row(records: Sequence[AttemptRecord], head: Head, *, now: datetime) -> list[AttemptRecord]:
    """Return the newest attempts that made no progress, oldest first.

    Args:
        records: all attempts by start time.
        now: current time in UTC.
    """
    failed = {
        record.attempt: record
        for record in records
        if record.ended not in DELIBERATE_ENDS | _REFUSALS and not is_alive(record, now=now)
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
    return message("\n".join(lines), hints=["after fixing the cause: " + command("run", ("try-again", True))])


def _line(record: AttemptRecord) -> str:
    duration = f"{record.wall_seconds:.0f} s"
    reached = f", at step {record.step}" if record.step > record.from_step else ""
    end = f"ended in {record.doing}" if record.ended else f"killed or crashed in {record.doing}"
    error = ": ".join(" ".join(text.split()) for text in (record.ended, record.message) if text)
    if len(error) > _ERROR_CHARACTERS:
        error = f"{error[:_ERROR_CHARACTERS]}…"
    began = time_words(record.began)
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
    if phase in BEFORE_TRAINING:
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


# What is assumed before anything is known: one loss in this time. Spot machines are often taken after some hours.
PRIOR_SECONDS: Final = 4 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What the records say.

    Attributes:
        count: attempts that were killed, crashed, or were stopped before their work was committed.
        seconds: time of all attempts.
    """

    count: int
    seconds: float

    @property
    def mean_seconds(self) -> float:
        """Mean time between losses: the mean of a gamma distribution whose prior is one loss in `PRIOR_SECONDS`."""
        return (self.seconds + PRIOR_SECONDS) / (self.count + 1)


def losses_of(records: Iterable[AttemptRecord], *, now: datetime) -> Losses:
    """Count the losses among the attempts that trained.

    Args:
        now: current time in UTC.
    """
    trained = [record for record in records if record.seconds.get("train", 0.0) > 0]
    lost = [record for record in trained if _lost_work(record, now=now)]
    return Losses(count=len(lost), seconds=sum(record.wall_seconds for record in trained))


def _lost_work(record: AttemptRecord, *, now: datetime) -> bool:
    if record.ended is None:
        return not is_alive(record, now=now)
    return record.ended not in DELIBERATE_ENDS and record.uncommitted_seconds > 0
