"""What is tried again, after how long, and when it is enough. Every wait is logged."""

import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from tasks.foundation.errors import BatonError, InvalidInput, StorageError, StoreUnreachable
from tasks.foundation.storage.deadline import LEAVING, Deadline
from tasks.foundation.storage.gcs.refusals import refusal
from tasks.foundation.storage.gcs.responses import UNAUTHORIZED, Answered, Garbled, Malformed, said_by

_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, _FACTOR = 0.5, 30.0, 2.0
_TOO_MANY_UNAUTHORIZED, _TOO_MANY_GARBLED = 3, 4
_STAYS = "what is committed stays; run the same command to continue"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to wait for the store.

    Attributes:
        total_seconds: from the first failure of an operation without progress until it is given up.
        stall_seconds: without a byte, until a connection is given up.
        first_wait_seconds: at most so long before the second try; doubled with each further one.
        best_effort: `total_seconds` count from the first try on, and waits are not worth a line in the log.
    """

    total_seconds: float = 300.0
    stall_seconds: float = 60.0
    first_wait_seconds: float = _FIRST_WAIT_SECONDS
    best_effort: bool = False

    def with_deadline(self, seconds: float) -> "RetryPolicy":
        """Best effort, for about this many seconds."""
        return replace(
            self,
            total_seconds=min(self.total_seconds, seconds),
            stall_seconds=min(self.stall_seconds, seconds),
            best_effort=True,
        )

    @classmethod
    def of_environment(cls) -> "RetryPolicy":
        """As BATON_STORAGE_PATIENCE_SECONDS and BATON_STORAGE_STALL_SECONDS say, where they are set.

        Raises:
            InvalidInput: one of them is no number above 0.
        """
        default = cls()
        return cls(
            total_seconds=_seconds("BATON_STORAGE_PATIENCE_SECONDS", default.total_seconds),
            stall_seconds=_seconds("BATON_STORAGE_STALL_SECONDS", default.stall_seconds),
        )


class Tries:
    """The tries of one operation: exponential backoff with full jitter, and one limit on all of it together.

    After "Exponential Backoff And Jitter" (Brooker, 2015). A wait that would go beyond the limit is cut to what is
    left, and a last try follows.
    """

    def __init__(
        self,
        where: str,
        patience: RetryPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
        leaving: Deadline = LEAVING,
    ) -> None:
        """Nothing is waited for yet.

        Args:
            where: address of what is worked on, for messages.
            patience: its limits.
            clock: seconds, never going back.
            leaving: the process's deadline; sleeps.
        """
        self._where, self._patience = where, patience
        self._clock, self._leaving = clock, leaving
        self._unauthorized = self._garbled = 0
        self.progress()

    def progress(self) -> None:
        """Start counting tries and time again: the operation got further."""
        self._began = self._clock()
        # Best effort has one limit from the first try on; everything else is tried at least twice.
        self._until = self._began + self._patience.total_seconds if self._patience.best_effort else None
        self._tries = 0

    def begin(self) -> None:
        """To be called before the first try.

        Raises:
            StoreUnreachable: this process was asked to stop, and the store did not answer before.
        """
        if self._leaving.given_up:
            raise StoreUnreachable(f"{self._where}: asked to stop, and the store could not be reached before; {_STAYS}")

    def again_after(self, fault: Exception) -> None:
        """Wait before the next try.

        Raises:
            StorageError: it is not worth another try, or the time for that is used up.
        """
        if not self._is_worth_retrying(fault):
            raise refusal(fault, where=self._where) from fault
        now = self._clock()
        self._until = now + self._patience.total_seconds if self._until is None else self._until
        self._tries += 1
        left = min(self._until - now, self._leaving.left())
        said = said_by(fault)
        if left <= 0:
            raise self._given_up(said, now - self._began) from fault
        longest = min(self._patience.first_wait_seconds * _FACTOR ** min(self._tries - 1, 32), _LONGEST_WAIT_SECONDS)
        wait = min(random.uniform(0, longest), left)  # noqa: S311 - spreads clients out, guards nothing
        level = logging.DEBUG if self._patience.best_effort else logging.WARNING
        _LOGGER.log(level, "%s: %s; trying again in %.1f s (try %d)", self._where, said, wait, self._tries + 1)
        self._leaving.sleep(wait)

    def _given_up(self, said: str, seconds: float) -> StorageError:
        tries = f"{self._tries} tries in {seconds:.1f} s" if self._tries > 1 else f"one try, {seconds:.1f} s"
        if not self._leaving.is_set:
            return StorageError(
                f"{self._where}: {said}; given up after {tries} (BATON_STORAGE_PATIENCE_SECONDS is "
                f"{self._patience.total_seconds:g}); see to the network, or to the store's status page, and run again"
            )
        if self._leaving.left() <= 0:
            self._leaving.give_up()
        return StoreUnreachable(
            f"{self._where}: asked to stop, and the store could not be reached ({said}; {tries}); {_STAYS}"
        )

    def _is_worth_retrying(self, fault: Exception) -> bool:
        """Raises StorageError for what has been garbled too often."""
        if isinstance(fault, Answered) and fault.code == UNAUTHORIZED:
            # An access token may have run out a moment ago; credentials that are refused stay refused.
            self._unauthorized += 1
            cause = fault.__cause__
            return self._unauthorized < _TOO_MANY_UNAUTHORIZED and (cause is None or getattr(cause, "retryable", False))
        if isinstance(fault, Garbled):
            # The wire may garble once or twice; what garbles each time is not the wire.
            self._garbled += 1
            if self._garbled == _TOO_MANY_GARBLED:
                raise StorageError(
                    f"{self._where}: {said_by(fault)}, {self._garbled} times; see to the network between here and "
                    "the store, and to this machine's memory, and run again"
                ) from fault
        return is_transient(fault)


def retrying(work: Callable[[], _T], tries: Tries) -> _T:
    """The result of `work`, tried until it succeeds.

    Raises:
        FileNotFoundError: the store answered 404.
        FileExistsError: what `work` made of an answer.
        StorageError: see `Tries.again_after`.
    """
    tries.begin()
    while True:
        try:
            return work()
        except (FileNotFoundError, FileExistsError, BatonError):
            raise
        except Exception as fault:  # noqa: BLE001 - sorted there; what is unknown is raised as a StorageError
            tries.again_after(fault)


def is_transient(fault: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    import aiohttp
    import google.auth.exceptions

    if isinstance(fault, Answered):
        return fault.is_transient
    if isinstance(fault, google.auth.exceptions.GoogleAuthError):
        # A token server that is away does not mean that the credentials are wrong.
        return fault.retryable or isinstance(fault, google.auth.exceptions.TransportError)
    if isinstance(fault, aiohttp.InvalidURL | aiohttp.ClientSSLError):
        return False  # an address, or a certificate, stays what it is
    # aiohttp gives a status line that it cannot read the code 400, so its codes are not looked at.
    return isinstance(fault, Garbled | Malformed | TimeoutError | ConnectionError | aiohttp.ClientError)


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidInput(f"{variable}={text} is no number of seconds; set one above 0, or leave it out")
    return seconds
