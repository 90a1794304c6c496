"""The time of a process by cause, with heartbeats, so that little is lost if it is killed.

`Ledger` books every second of an attempt and writes its record; `Stopwatch` does so for one stage. Seconds of training
that are not committed yet are counted apart: they would be lost if the process died now. A clock that someone sets must
not fail a commit, so measured values are made sound before they go into the log.
"""

import atexit
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Final, Self, TypeVar

from pydantic import ValidationError

from baton.tasks.foundation.contracts.attempt import (
    CAUSES,
    HUNG,
    INPUT_WAIT,
    LAUNCH,
    SHUT_DOWN,
    UNATTRIBUTED,
    AttemptRecord,
    CommitPaceRecord,
    UsageSample,
    attempt_path,
    mark_of,
    with_sample,
)
from baton.tasks.foundation.contracts.log_entry import Head
from baton.tasks.foundation.errors import whole_traceback
from baton.tasks.foundation.machine.processes import age_seconds, process_name, resident_bytes
from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.storage.interface import Storage, best_effort
from baton.tasks.foundation.telemetry.events import CommitPace, Committed, Event, Note, Phase, Silent, Sink, Training
from baton.tasks.foundation.telemetry.profiling import Profiler


class Uncommitted:
    """Assigns seconds of training to steps and commits; not thread-safe.

    A commit covers the training up to its step. Training may continue during the commit.
    """

    def __init__(self) -> None:
        self.step = 0
        self.discarded = 0.0  # seconds of training that this process discarded
        self._settled = 0.0  # seconds of training that are committed or discarded
        self._reached: list[tuple[int, float]] = []  # uncommitted steps, and seconds of training up to them

    def begin(self, step: int) -> None:
        """This process continues the run from `step`."""
        self.step = step

    def reached(self, step: int, train_seconds: float) -> None:
        """Training reached `step` after `train_seconds` of training in this process."""
        if self._reached and step < self._reached[-1][0]:
            # A rewind, or a segment that starts again, went back to a checkpoint.
            discarded = self._reached[-1][1]
            self.discarded += discarded - self._settled
            self._settled = discarded
            self._reached.clear()
        self._reached.append((step, train_seconds))
        self.step = step

    def committed(self, step: int, train_seconds: float, *, training: bool) -> None:
        """A commit of `step` is in the log.

        Args:
            train_seconds: seconds of training in this process so far.
            training: whether the process is training at this moment.
        """
        if step > self.step or (step == self.step and not training):
            self._settled = train_seconds
        else:
            self._settled = max([self._settled, *(seconds for at, seconds in self._reached if at <= step)])
        self._reached = [mark for mark in self._reached if mark[0] > step]
        self.step = max(self.step, step)

    def uncommitted(self, train_seconds: float) -> float:
        """Seconds of training that are neither committed nor discarded."""
        return max(train_seconds - self._settled, 0.0)


T = TypeVar("T")

# Thirty years. Longer times come from a clock that was set, and their sums overflow.
_LONGEST_SECONDS: Final = 1e9


def sound_seconds(seconds: float) -> float:
    """A measured time; 0 if it is negative, NaN or impossibly long, because the clock was set."""
    return seconds if 0 <= seconds <= _LONGEST_SECONDS else 0.0


def seconds_between(earlier: float, later: float) -> float:
    """Seconds between two readings of a clock; see `sound_seconds`."""
    return sound_seconds(later - earlier)


def measured(build: Callable[[], T], otherwise: T, *, what: str, telemetry: Sink) -> T:
    """The result of `build`, or `otherwise` if a measured value is not valid, so that the commit does not fail.

    Args:
        build: makes a contract from measured values; raises ValueError (as pydantic does) if one is not valid.
        otherwise: the result in that case.
        what: names the values in the warning.
        telemetry: receives the warning.
    """
    try:
        return build()
    except (ValueError, OverflowError) as fault:
        text = f"{what} are not logged, because a measured value is not valid: {_reason(fault)}"
        telemetry.emit(Note(text=text, warning=True))
        return otherwise


def _reason(fault: Exception) -> str:
    if not isinstance(fault, ValidationError):
        return str(fault)
    first = fault.errors()[0]
    return f"{'.'.join(map(str, first['loc']))} = {first['input']}: {first['msg']}"


_START_UP, _TRAIN = "start-up", "train"
# A heartbeat costs one small write; a killed process loses the time since its last one. Cloud Storage accepts one
# write per second to the same object.
_MIN_INTERVAL_SECONDS, _MAX_INTERVAL_SECONDS, _SHARE_OF_AGE = 1.0, 30.0, 0.01
_WRITE_SECONDS = 10.0  # a store that hangs must not delay a process that has to stop
_LEAST_SAMPLE_SECONDS = 0.5  # a commit wakes the thread at any time
_STACKS_CHARACTERS = 100_000  # those of threads that tell something come first
_MESSAGE_CHARACTERS = 2000
# A process that lives longer than this after its run, such as a notebook or a service, is not shutting down.
_MAX_SHUT_DOWN_SECONDS = 60.0

# The ledger that writes at exit. At most one per process, or its time would be counted twice.
_open_at_exit: list["Ledger"] = []


def write_last_heartbeat() -> None:
    """Write this process's last heartbeat; for callers that end the process without running its exit handlers."""
    for ledger in _open_at_exit:
        ledger._write_at_exit()


def heartbeat_interval(age: float) -> float:
    """Seconds until the next heartbeat of a process that is `age` seconds old: 1 % of its age, between 1 and 30."""
    return min(max(_SHARE_OF_AGE * age, _MIN_INTERVAL_SECONDS), _MAX_INTERVAL_SECONDS)


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Ledger:
    """A `Sink` that gives every second of the process to the cause of the last `Phase`; the first is "start-up".

    Use it as a context manager around all work for the run. Counting begins with the process. On exit the attempt's
    record is written, with the error that ended it, if any.

    Attributes:
        attempt: its id.
        profiler: learns at each heartbeat of a trace that the home asks for, once this process has trained a step.
    """

    def __init__(
        self,
        *,
        attempt: str | None = None,
        whole_process: bool = True,
        last_lines: Callable[[], Sequence[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = _utc_now,
        age: Callable[[], float] = age_seconds,
    ) -> None:
        """Prepare the ledger. Nothing is counted before `__enter__`, and nothing is written before `open`.

        Args:
            attempt: a uuid4 made in this process; None to make one.
            whole_process: whether the process exists for this run alone, so that its start-up and its end count too.
                False for a process that outlives its runs, such as a notebook.
            last_lines: those of the process's output, for the record.
            clock: monotonic time in seconds.
            now: current time in UTC; for display and sorting, never for sums.
            age: seconds since the process started.
        """
        self.attempt = attempt or uuid.uuid4().hex
        self.profiler = Profiler()
        self._has_trained = False
        self._whole_process = whole_process
        self._last_lines = last_lines
        self._usage: tuple[UsageSample, ...] = ()
        self._clock, self._now, self._age = clock, now, age
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._cause = _START_UP
        self._work = Uncommitted()
        self._train_known = 0.0  # seconds of training from which input wait is already subtracted
        self._lock = threading.RLock()  # reentrant: a signal handler may emit
        self._last = self._began_clock = 0.0
        self._began = ""
        self._home: Storage | None = None
        self._opening: dict[str, object] = {}
        self._ended: tuple[str, str | None] | None = None
        self._traceback: str | None = None
        self._committed_step: int | None = None
        self._staged: str | None = None
        self._pace: CommitPaceRecord | None = None
        self._writing = threading.Lock()
        self._wake, self._left = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        age = sound_seconds(self._age()) if self._whole_process else 0.0
        self._last = self._clock()
        self._began_clock = self._last - age
        self._seconds[_START_UP] += age
        self._began = (self._now() - timedelta(seconds=age)).isoformat(timespec="milliseconds")
        while _open_at_exit:
            atexit.unregister(_open_at_exit.pop()._write_at_exit)  # this ledger counts from here on
        if self._whole_process:
            # atexit calls the last registered first, so the time of handlers registered later is counted.
            atexit.register(self._write_at_exit)
            _open_at_exit.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._ended is None:
            self._ended = ("left", None) if kind is None else (kind.__name__, _message(str(fault)))
        if isinstance(fault, Exception):  # a signal says nothing about the code that it interrupts
            self._traceback = whole_traceback(fault)
        self._left.set()
        self._wake.set()
        if self._home is not None:
            self.profiler.end(self._home, Silent())
        if self._whole_process:
            self._begin(SHUT_DOWN)
        self.heartbeat()
        if self._home is None:
            atexit.unregister(self._write_at_exit)

    def open(self, home: Storage, head: Head, *, afresh: bool = False, within: str | None = None) -> None:
        """Write the first heartbeat now and others at intervals. A second call does nothing.

        Args:
            home: the run's home, with a log: refused input must write nothing.
            head: the log's head when this attempt began, before it quarantines a damaged tip: replacing a damaged tip
                is no progress.
            afresh: whether the user asked to ignore earlier attempts.
            within: the attempt that waits for this one.
        """
        with self._lock:
            if self._home is not None:
                return
            step = head.tip.step if head.tip is not None else 0
            self._work.begin(step)
            self._opening = {"mark": mark_of(head), "from_step": step, "afresh": afresh, "within": within}
            self._home = home.with_deadline(_WRITE_SECONDS)
        self.heartbeat()
        self._thread = threading.Thread(target=self._write_heartbeats, name="baton-ledger", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Count one event. It is cheap and thread-safe, and writes nothing."""
        match event:
            case Phase(cause=cause):
                self._begin(cause)
            case Training(step=step, input_wait_seconds=waited):
                with self._lock:
                    self._count()
                    waited = min(sound_seconds(waited), max(self._seconds[_TRAIN] - self._train_known, 0.0))
                    self._seconds[_TRAIN] -= waited
                    self._seconds[INPUT_WAIT] += waited
                    self._train_known = self._seconds[_TRAIN]
                    self._has_trained = True
                    self._work.reached(step, self._seconds[_TRAIN])
            case Committed(step=step):
                with self._lock:
                    self._count()
                    self._work.committed(step, self._seconds[_TRAIN], training=self._cause == _TRAIN)
                    self._committed_step = step
                self._wake.set()
            case CommitPace():
                self._pace = CommitPaceRecord(
                    every_seconds=event.every_seconds,
                    cost_seconds=event.cost_seconds,
                    between_losses_seconds=event.between_losses_seconds,
                )
            case _:
                pass

    def end(self, reason: str, message: str | None = None) -> None:
        """Record why the attempt ends, and write it. Later time still counts; later reasons are ignored.

        Args:
            reason: an exit reason such as "complete" or "sigterm".
            message: of the error that ended it, if any.
        """
        if self._ended is None:
            self._ended = (reason, _message(message or ""))
        self.heartbeat()

    def hung(self, message: str, stacks: str) -> None:
        """Record that the process hangs and is about to end, and write it. May be called from any thread.

        Args:
            message: what did not end, and for how long.
            stacks: of all threads.
        """
        if self._ended is None:
            self._traceback = masked(stacks[:_STACKS_CHARACTERS])
            self._ended = (HUNG, _message(message))
        self.heartbeat()

    def staged(self, path: str) -> None:
        """Record that another attempt will commit the checkpoint at `path`, with the work of this attempt."""
        self._staged = path
        self.heartbeat()

    def heartbeat(self) -> None:
        """Write the attempt's record now, if the ledger is open."""
        if self._home is not None:
            problem = "the attempt's record could not be written"
            with best_effort(self._home, problem, then="baton status shows an earlier state until it can"):
                self._write(self._home)

    def record(self) -> AttemptRecord:
        """The attempt's record up to now."""
        last_lines = tuple(self._last_lines())
        with self._lock:
            self._count()
            train = self._seconds[_TRAIN]
            reason, message = self._ended or (None, None)
            opening = {"mark": "none", "from_step": 0, **self._opening}
            return AttemptRecord.model_validate(
                {
                    **opening,
                    "attempt": self.attempt,
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "process": process_name(),
                    "began": self._began,
                    "alive": self._now().isoformat(timespec="milliseconds"),
                    "step": self._work.step,
                    "committed_step": opening["from_step"] if self._committed_step is None else self._committed_step,
                    "doing": self._cause,
                    "seconds": {cause: round(amount, 3) for cause, amount in self._seconds.items() if amount > 0},
                    "uncommitted_seconds": round(self._work.uncommitted(train), 3),
                    "discarded_seconds": round(self._work.discarded, 3),
                    "staged": self._staged,
                    "commit_pace": self._pace,
                    "last_lines": last_lines,
                    "usage": self._usage,
                    "ended": reason,
                    "message": message,
                    "traceback": self._traceback,
                }
            )

    def _begin(self, cause: str) -> None:
        with self._lock:
            self._count()
            waited = self._cause == LAUNCH
            self._cause = cause if cause in CAUSES else UNATTRIBUTED
        if waited and self._cause != LAUNCH:
            self._wake.set()  # the record must no longer show a wait

    def _count(self) -> None:
        """Give the time since the last call to the current cause."""
        now = self._clock()
        self._seconds[self._cause] += seconds_between(self._last, now)
        self._last = max(self._last, now)  # in this order, a NaN changes nothing

    def _write_heartbeats(self) -> None:
        at, used = self._began_clock, 0.0
        while not self._left.is_set():
            self._wake.wait(heartbeat_interval(self._clock() - self._began_clock))
            self._wake.clear()
            if not self._left.is_set():
                at, used = self._sample(at, used)
                self.heartbeat()
                self._look_for_requests()

    def _look_for_requests(self) -> None:
        if self._home is not None and self._has_trained:
            within = self._opening.get("within")
            self.profiler.look(self._home, [self.attempt, within if isinstance(within, str) else None])

    def _sample(self, before: float, used_before: float) -> tuple[float, float]:
        """Keep what the process used since the sample before; returns the time and its processor seconds until now."""
        now, used, memory = self._clock(), time.process_time(), resident_bytes()
        passed = seconds_between(before, now)
        if memory is None or passed < _LEAST_SAMPLE_SECONDS:
            return before, used_before
        sample = UsageSample(
            seconds=round(seconds_between(self._began_clock, now), 1),
            cpu=round(sound_seconds(used - used_before) / passed, 2),
            memory_bytes=memory,
        )
        self._usage = with_sample(self._usage, sample)
        return now, used

    def _write(self, home: Storage) -> None:
        # One write at a time, each with the newest record, so that an older record never replaces a newer one.
        if not self._writing.acquire(timeout=_WRITE_SECONDS):
            return
        try:
            home.write(attempt_path(self.attempt), self.record().to_json())
        finally:
            self._writing.release()

    def _write_at_exit(self) -> None:
        # The run may have been deleted meanwhile, and a warning at exit helps no user.
        with suppress(Exception):
            if self._clock() - self._last > _MAX_SHUT_DOWN_SECONDS or self._home is None:
                return
            if self._home.exists(attempt_path(self.attempt)):
                self._write(self._home)


def _message(text: str) -> str | None:
    """A message as the record has it; None for an empty one."""
    return masked(text)[:_MESSAGE_CHARACTERS] or None


class Stopwatch:
    """Wall-clock seconds by cause. From `begin(cause)` until the next `begin`, all time goes to `cause`.

    Use it in one thread only. Work in other threads, such as an upload, must not begin a cause: its seconds would count
    twice.
    """

    def __init__(self, telemetry: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare the stopwatch. It counts from the first `begin` on.

        Args:
            telemetry: receives a `Phase` for every `begin`.
            clock: monotonic time in seconds.
        """
        self._telemetry = telemetry
        self._clock = clock
        self._laps: dict[str, float] = {}
        self._cause: str | None = None
        self._since = 0.0

    def begin(self, cause: str) -> None:
        """Give the time from now on to `cause`.

        Args:
            cause: one of `contracts.attempt.CAUSES`. If it is the current one, `Phase` is emitted again, because
                another sender may have emitted a different one.
        """
        now = self._clock()
        self._close(now)
        self._cause, self._since = cause, now
        self._telemetry.emit(Phase(cause=cause))

    def move(self, seconds: float, source: str, to: str) -> None:
        """Move past time to another cause, without a `Phase`.

        Args:
            seconds: time to move; at most what `source` has so far.
            source: the cause that it was given to.
            to: the cause that it belongs to.
        """
        seconds = sound_seconds(seconds)
        self._laps[source] = self._laps.get(source, 0.0) - seconds
        self._laps[to] = self._laps.get(to, 0.0) + seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by cause since the first `begin`, up to now."""
        self._close(self._clock())
        # Clocks that disagree about moved time could make a value negative.
        return {cause: max(amount, 0.0) for cause, amount in self._laps.items()}

    def _close(self, now: float) -> None:
        if self._cause is not None:
            self._laps[self._cause] = self._laps.get(self._cause, 0.0) + seconds_between(self._since, now)
            self._since = now
