"""Where a process's time goes, from its start to its end, with signs of life for when it dies without a word."""

import atexit
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self

from tasks.foundation.contracts.attempt import (
    CAUSES,
    INPUT_WAIT,
    LAUNCH,
    SHUT_DOWN,
    UNATTRIBUTED,
    AttemptRecord,
    attempt_path,
    mark_of,
)
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.process import age_seconds, process_name
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Committed, Event, Phase, Training
from tasks.foundation.telemetry.lost_work import Uncommitted
from tasks.foundation.telemetry.measurements import seconds_between, sound_seconds

_LOGGER = logging.getLogger(__name__)
_START_UP, _TRAIN = "start-up", "train"
# A sign of life costs what a small file costs; what a death may leave uncounted is one interval. Cloud Storage takes
# one write a second of the same object.
_SHORTEST_SECONDS, _LONGEST_SECONDS, _SHARE_OF_AGE = 1.0, 30.0, 0.01
_PATIENCE_SECONDS = 10.0  # a store that hangs must not hold up a process that has to go
_MESSAGE_CHARACTERS = 2000
# Whoever is still there after that is not shutting down: a notebook, or a service that takes the next run.
_LONGEST_SHUT_DOWN_SECONDS = 60.0

# The ledger that is to sign at exit; one for the process, or a second would be counted twice.
_to_sign_at_exit: list["Ledger"] = []


def sign_off() -> None:
    """The last sign of this process, for whoever knows that it ends here."""
    for ledger in _to_sign_at_exit:
        ledger._sign_at_exit()


def sign_interval(age: float) -> float:
    """Seconds until the next sign of life of a process that is `age` seconds old: 1 % of it, within 1 and 30."""
    return min(max(_SHARE_OF_AGE * age, _SHORTEST_SECONDS), _LONGEST_SECONDS)


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Ledger:
    """A `Sink` that counts. Every second belongs to the last cause that was announced; the first is "start-up".

    Use it as a context manager around all that the process does for the run: it counts from entering (and from the
    process's start before), and leaving it writes the last sign of life, with the error that ended it, if one did.
    """

    def __init__(
        self,
        *,
        attempt: str | None = None,
        whole_process: bool = True,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = _utc_now,
        age: Callable[[], float] = age_seconds,
    ) -> None:
        """Nothing is counted before entering, nothing is written before `open`.

        Args:
            attempt: a uuid4 made in this process; left out: one is made.
            whole_process: the process is there for this run alone, so the time before entering and after leaving is
                the run's too. False for a process that outlives its runs, such as a notebook.
            clock: seconds, never going back.
            now: the time of day, UTC; for people and for order, never for sums.
            age: seconds since the process started.
        """
        self.attempt = attempt or uuid.uuid4().hex
        self._whole_process = whole_process
        self._clock, self._now, self._age = clock, now, age
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._cause = _START_UP
        self._work = Uncommitted()
        self._train_known = 0.0  # seconds of training that the wait for input was taken out of
        self._lock = threading.RLock()  # again by the same thread: a signal's handler may emit
        self._last = self._began_clock = 0.0
        self._began = ""
        self._home: Storage | None = None
        self._opening: dict[str, object] = {}
        self._ended: tuple[str, str | None] | None = None
        self._committed_step: int | None = None
        self._staged: str | None = None
        self._writing = threading.Lock()
        self._warned = False
        self._wake, self._left = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        age = sound_seconds(self._age()) if self._whole_process else 0.0
        self._last = self._clock()
        self._began_clock = self._last - age
        self._seconds[_START_UP] += age
        self._began = (self._now() - timedelta(seconds=age)).isoformat(timespec="milliseconds")
        while _to_sign_at_exit:
            atexit.unregister(_to_sign_at_exit.pop()._sign_at_exit)  # what comes now is ours to count
        if self._whole_process:
            # The last registered is the first called: what others tear down at exit is counted, if they come later.
            atexit.register(self._sign_at_exit)
            _to_sign_at_exit.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._ended is None:
            self._ended = ("left", None) if kind is None else (kind.__name__, str(fault)[:_MESSAGE_CHARACTERS] or None)
        self._left.set()
        self._wake.set()
        if self._whole_process:
            self._begin(SHUT_DOWN)
        self.sign()
        if self._home is None:
            atexit.unregister(self._sign_at_exit)

    def open(self, home: Storage, head: Head, *, afresh: bool = False, within: str | None = None) -> None:
        """From now on signs of life are written, the first one at once. Open it again, and nothing happens.

        Args:
            home: the run's home; the log's first entry must be in it, since refused input writes nothing.
            head: the log's newest state as this attempt first sees it, before a damaged tip is quarantined: otherwise
                attempts that do nothing but replace a damaged tip would look like progress.
            afresh: the user asked to forget the attempts before.
            within: the attempt that waits for this one.
        """
        with self._lock:
            if self._home is not None:
                return
            step = head.tip.step if head.tip is not None else 0
            self._work.starts(step)
            self._opening = {"mark": mark_of(head), "from_step": step, "afresh": afresh, "within": within}
            self._home = home.with_deadline(_PATIENCE_SECONDS)
        self.sign()
        self._thread = threading.Thread(target=self._keep_signing, name="baton-ledger", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Take one event. Any thread; cheap: nothing is written here."""
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
                    self._work.reached(step, self._seconds[_TRAIN])
            case Committed(step=step):
                with self._lock:
                    self._count()
                    self._work.committed(step, self._seconds[_TRAIN], training=self._cause == _TRAIN)
                    self._committed_step = step
                self._wake.set()
            case _:
                pass

    def end(self, reason: str, message: str | None = None) -> None:
        """Say why the attempt ends, and write it. What follows is counted still, but the first reason stands.

        Args:
            reason: an exit reason such as "complete" or "sigterm".
            message: the error, if one ended it.
        """
        if self._ended is None:
            self._ended = (reason, message[:_MESSAGE_CHARACTERS] if message else None)
        self.sign()

    def hands_on(self, staged: str) -> None:
        """What this attempt trained is in a checkpoint that another is to commit: lost only if that does not happen."""
        self._staged = staged
        self.sign()

    def sign(self) -> None:
        """Write a sign of life now, if the ledger is open: before the ledger is read by this very process, say."""
        if self._home is not None:
            self._write(warns=True)

    def record(self) -> AttemptRecord:
        """The account of this process up to this moment."""
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
                    "ended": reason,
                    "message": message,
                }
            )

    def _begin(self, cause: str) -> None:
        with self._lock:
            self._count()
            waited = self._cause == LAUNCH
            self._cause = cause if cause in CAUSES else UNATTRIBUTED
        if waited and self._cause != LAUNCH:
            self._wake.set()  # whoever dies now has not died waiting

    def _count(self) -> None:
        """Give the time since the last look to the running cause."""
        now = self._clock()
        self._seconds[self._cause] += seconds_between(self._last, now)
        self._last = max(self._last, now)  # in this order a reading that is NaN changes nothing

    def _keep_signing(self) -> None:
        while not self._left.is_set():
            self._wake.wait(sign_interval(self._clock() - self._began_clock))
            self._wake.clear()
            if not self._left.is_set():
                self._write(warns=True)

    def _write(self, *, warns: bool) -> None:
        home = self._home
        # One at a time, and each takes the account of its own moment: an older one never replaces a newer one.
        if home is None or not self._writing.acquire(timeout=_PATIENCE_SECONDS):
            return
        try:
            home.write(attempt_path(self.attempt), self.record().to_json())
        except Exception as fault:  # noqa: BLE001 - whatever a store raises, an account is not worth a training run
            if warns and not self._warned:
                self._warned = True
                _LOGGER.warning("this attempt's sign of life could not be written, training goes on: %s", fault)
        finally:
            self._writing.release()

    def _sign_at_exit(self) -> None:
        # The run may have been deleted meanwhile. Nobody reads warnings any more.
        with suppress(Exception):
            if self._clock() - self._last > _LONGEST_SHUT_DOWN_SECONDS or self._home is None:
                return
            if self._home.exists(attempt_path(self.attempt)):
                self._write(warns=False)
