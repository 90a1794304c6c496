"""What is tried again, after how long, and when it is enough. Every wait is logged."""

import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tasks.foundation.errors import BatonError, InvalidInput, StorageError
from tasks.foundation.storage.gcs.answers import UNAUTHORIZED, Garbled, said_by
from tasks.foundation.storage.gcs.refusals import refusal

_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, _FACTOR = 0.5, 30.0, 2.0
_TOO_MANY_UNAUTHORIZED, _TOO_MANY_GARBLED = 3, 4
_WORTH_RETRYING = {401, 408, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for the store.

    Attributes:
        total_seconds: from the first failure of an operation without progress until it is given up.
        stall_seconds: without a byte, until a connection is given up.
        first_wait_seconds: at most so long before the second try; doubled with each further one.
        silent: waits are not worth a line in the log.
    """

    total_seconds: float = 300.0
    stall_seconds: float = 60.0
    first_wait_seconds: float = _FIRST_WAIT_SECONDS
    silent: bool = False

    def hurried(self, seconds: float) -> "Patience":
        """At most so many seconds, and silent."""
        return replace(
            self,
            total_seconds=min(self.total_seconds, seconds),
            stall_seconds=min(self.stall_seconds, seconds),
            silent=True,
        )

    @classmethod
    def of_environment(cls) -> "Patience":
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

    After "Exponential Backoff And Jitter" (Brooker, 2015).
    """

    def __init__(
        self,
        where: str,
        patience: Patience,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Nothing is waited for yet.

        Args:
            where: address of what is worked on, for messages.
            patience: its limits.
            clock: seconds, never going back.
            sleep: waits.
        """
        self._where, self._patience = where, patience
        self._clock, self._sleep = clock, sleep
        self._unauthorized = self._garbled = 0
        self.progress()

    def progress(self) -> None:
        """Something was achieved: the limit counts from the next failure on."""
        self._until: float | None = None
        self._tries = 0

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
        longest = min(self._patience.first_wait_seconds * _FACTOR ** (self._tries - 1), _LONGEST_WAIT_SECONDS)
        wait = random.uniform(0, longest)  # noqa: S311 - spreads clients out, guards nothing
        said = said_by(fault)
        if now + wait > self._until:
            raise StorageError(
                f"{self._where}: {said}; given up after {self._tries} tries in {self._patience.total_seconds:.0f} s "
                "(BATON_STORAGE_PATIENCE_SECONDS); see to the network, or to the store's own status page, and run again"
            ) from fault
        level = logging.DEBUG if self._patience.silent else logging.WARNING
        _LOGGER.log(level, "%s: %s; trying again in %.1f s (try %d)", self._where, said, wait, self._tries + 1)
        self._sleep(wait)

    def _is_worth_retrying(self, fault: Exception) -> bool:
        """Raises StorageError for what has been garbled too often."""
        if getattr(fault, "code", None) == UNAUTHORIZED:
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

    code: Any = getattr(fault, "code", None)
    if code is not None:
        return str(code).isdecimal() and int(code) in _WORTH_RETRYING
    if isinstance(fault, aiohttp.InvalidURL | aiohttp.ClientSSLError):
        return False  # an address, or a certificate, stays what it is
    return isinstance(
        fault,
        Garbled | TimeoutError | ConnectionError | aiohttp.ClientError | google.auth.exceptions.TransportError,
    )


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
