"""Whether another process trains the run at this moment: said before a second one trains for minutes in vain.

A courtesy, and no lock: two that begin at once both find nobody, and the log lets one of them commit.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from flows.goal import storage_of
from tasks.foundation.contracts.attempt import AttemptRecord, utc_time
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.errors import RunAtWork, StorageError
from tasks.foundation.messages import message
from tasks.foundation.process import is_gone, is_here, process_name
from tasks.foundation.runlog.attempts import is_alive, read_attempts
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Note, Sink
from tasks.foundation.telemetry.formatting import duration_words
from tasks.foundation.telemetry.ledger import sign_interval

# Beyond the interval between signs of life: so long one may take to be written and seen.
_LATE_FACTOR, _LATE_SECONDS = 1.5, 2.0
_LOOK_EVERY_SECONDS = 0.5

# Attempts that gave no sign when they were waited for, with the last one that they gave.
_SILENT: set[tuple[str, str]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Looking:
    """How it is found out; tests put in their own."""

    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    here: Callable[[str], bool] = is_here
    gone: Callable[[str], bool] = is_gone


def require_nobody_at_work(
    run: RunFile,
    *,
    take_over: bool,
    telemetry: Sink,
    looking: Looking = Looking(),
) -> None:
    """Refuse to train beside another process.

    A process of this machine is looked up. Of one elsewhere only the signs of life in its record are known, and the
    last may be from just before its death: the next one is waited for, a few seconds for a young process, at most 47.

    Args:
        run: the run file.
        take_over: begin all the same.
        telemetry: is told of the waiting.
        looking: how it is found out.

    Raises:
        RunAtWork: another process is at work.
    """
    if take_over:
        return
    home = storage_of(run).at(run.spec.run)
    known = _may_live(home, looking)
    rivals = [record for record in known if looking.here(record.process)]
    unsure = [record for record in known if record not in rivals and (record.attempt, record.alive) not in _SILENT]
    if not rivals and unsure:
        rivals = _that_sign_again(unsure, home, telemetry, looking)
    if rivals:
        raise RunAtWork(
            message(
                f"{run.spec.run} is at work: {_words(rivals[0], looking)}",
                details=[_words(record, looking) for record in rivals[1:]],
                hints=[
                    "wait until it has ended, or stop it; the same command then continues",
                    "--take-over begins beside it; the first to commit goes on, the other ends with StaleWriter",
                ],
            )
        )


def _may_live(home: Storage, looking: Looking) -> list[AttemptRecord]:
    try:
        records = read_attempts(home).records
    except StorageError:  # whoever reads the log next says what is wrong; this only informs
        return []
    now, own = looking.now(), process_name()
    return [
        record
        for record in records
        if is_alive(record, now=now, gone=looking.gone)
        # A stage that runs elsewhere belongs to its parent, which counts itself, or is looked after by the next one.
        and record.within is None
        and (not own or record.process != own)
    ]


def _that_sign_again(
    unsure: list[AttemptRecord], home: Storage, telemetry: Sink, looking: Looking
) -> list[AttemptRecord]:
    seconds = max(_until_next_sign(record) for record in unsure)
    telemetry.emit(
        Note(
            text=f"another process may be at work: {_words(unsure[0], looking)}; waiting up to "
            f"{duration_words(seconds)} for its next sign of life (--take-over does not wait)"
        )
    )
    seen = {record.attempt: record.alive for record in unsure}
    until = looking.clock() + seconds
    while looking.clock() < until:
        looking.sleep(_LOOK_EVERY_SECONDS)
        now_known = [record for record in _may_live(home, looking) if record.attempt in seen]
        again = [record for record in now_known if record.alive != seen[record.attempt]]
        if again or not now_known:
            return again
    _SILENT.update(seen.items())
    return []


def _until_next_sign(record: AttemptRecord) -> float:
    age = max((utc_time(record.alive) - utc_time(record.began)).total_seconds(), 0.0)
    return _LATE_FACTOR * sign_interval(age) + _LATE_SECONDS


def _words(record: AttemptRecord, looking: Looking) -> str:
    silent = max((looking.now() - utc_time(record.alive)).total_seconds(), 0.0)  # another machine's clock
    return f"process {record.pid} on {record.host}, step {record.step}, last sign of life {duration_words(silent)} ago"
