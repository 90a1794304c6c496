"""Refuses a run that another process is training, before a second process wastes minutes of training.

This is no lock. Two processes that start together find nobody, and the log lets only one of them commit.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from flows.run import Run
from tasks.foundation.contracts.attempt import AttemptRecord, utc_time
from tasks.foundation.errors import RunAtWork, StorageError
from tasks.foundation.messages import message
from tasks.foundation.process import is_gone, is_running, process_name
from tasks.foundation.runlog.attempts import AttemptReader, Attempts, is_alive
from tasks.foundation.telemetry.events import Note, Sink
from tasks.foundation.telemetry.formatting import duration_words
from tasks.foundation.telemetry.ledger import heartbeat_interval

# A heartbeat may take this much longer than its interval to be written and read.
_LATE_FACTOR, _LATE_SECONDS = 1.5, 2.0
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessProbe:
    """Clocks and the process table; tests replace them."""

    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    is_running: Callable[[str], bool] = is_running
    is_gone: Callable[[str], bool] = is_gone


def require_idle(
    run: Run,
    *,
    take_over: bool,
    telemetry: Sink,
    attempts: Attempts | None = None,
    probe: LivenessProbe = LivenessProbe(),
) -> None:
    """Refuse to train a run that another process is training.

    A process of this machine is looked up in the process table. A process of another machine is known only by the
    heartbeats in its record, and the last one may be from just before it died. So this waits for its next heartbeat: a
    few seconds for a young process, at most 47.

    Args:
        run: the run.
        take_over: do not look.
        telemetry: receives a note before the wait.
        attempts: the records of its attempts, if the caller has just read them.
        probe: clocks and the process table.

    Raises:
        RunAtWork: another process trains the run.
    """
    if take_over:
        return
    known = _possibly_alive(run.attempts, probe, attempts)
    rivals = [record for record in known if probe.is_running(record.process)]
    unsure = [record for record in known if record not in rivals]
    if not rivals and unsure:
        rivals = _wait_for_heartbeats(unsure, run.attempts, telemetry, probe)
    if rivals:
        raise RunAtWork(
            message(
                f"{run.spec.run} is at work: {_words(rivals[0], probe)}",
                details=[_words(record, probe) for record in rivals[1:]],
                hints=[
                    "wait until it ends, or stop it; the same command then continues",
                    "--take-over starts anyway; the first to commit continues, the other ends with StaleWriter",
                ],
            )
        )


def _possibly_alive(
    reader: AttemptReader, probe: LivenessProbe, attempts: Attempts | None = None
) -> list[AttemptRecord]:
    try:
        records = (attempts or reader.read()).records
    except StorageError:  # the next reader of the log reports it
        return []
    now, own = probe.now(), process_name()
    return [
        record
        for record in records
        if is_alive(record, now=now, gone=probe.is_gone)
        # A remote stage belongs to its parent, which has its own record.
        and record.within is None
        and (not own or record.process != own)
    ]


def _wait_for_heartbeats(
    unsure: list[AttemptRecord], reader: AttemptReader, telemetry: Sink, probe: LivenessProbe
) -> list[AttemptRecord]:
    seconds = max(_until_next_sign(record) for record in unsure)
    telemetry.emit(
        Note(
            text=f"another process may be at work: {_words(unsure[0], probe)}; waiting up to "
            f"{duration_words(seconds)} for its next heartbeat (--take-over does not wait)"
        )
    )
    seen = {record.attempt: record.alive for record in unsure}
    until = probe.clock() + seconds
    while probe.clock() < until:
        probe.sleep(_POLL_SECONDS)
        alive = [record for record in _possibly_alive(reader, probe) if record.attempt in seen]
        again = [record for record in alive if record.alive != seen[record.attempt]]
        if again or not alive:
            return again
    return []


def _until_next_sign(record: AttemptRecord) -> float:
    age = max((utc_time(record.alive) - utc_time(record.began)).total_seconds(), 0.0)
    return _LATE_FACTOR * heartbeat_interval(age) + _LATE_SECONDS


def _words(record: AttemptRecord, probe: LivenessProbe) -> str:
    silent = max((probe.now() - utc_time(record.alive)).total_seconds(), 0.0)  # another machine's clock
    return f"process {record.pid} on {record.host}, step {record.step}, last heartbeat {duration_words(silent)} ago"
