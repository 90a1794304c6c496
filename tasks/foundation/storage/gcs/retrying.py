"""Retries: which errors, how long between attempts, and when to give up. Every wait is logged."""

import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from tasks.foundation.errors import BatonError, InvalidInput, StorageError, StoreUnreachable
from tasks.foundation.storage.gcs.refusals import may_end, refusal
from tasks.foundation.storage.gcs.responses import (
    UNAUTHORIZED,
    ChecksumMismatch,
    ErrorResponse,
    MalformedResponse,
    message_of,
)
from tasks.foundation.storage.transfers import PROCESS_DEADLINE, Deadline

_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, _FACTOR = 0.5, 30.0, 2.0
_MAX_UNAUTHORIZED, _MAX_MISMATCHES = 3, 4
_RESUMABLE = "what is committed stays; run the same command to continue"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to wait for the store.

    Attributes:
        total_seconds: from the first failure of an operation without progress until it gives up.
        stall_seconds: without a byte sent or received until a request is cancelled.
        first_wait_seconds: the longest wait before the second attempt; doubles with each further one.
        best_effort: `total_seconds` count from the first attempt, and waits are logged at debug level.
    """

    total_seconds: float = 300.0
    stall_seconds: float = 60.0
    first_wait_seconds: float = _FIRST_WAIT_SECONDS
    best_effort: bool = False

    def with_deadline(self, seconds: float) -> "RetryPolicy":
        """The same policy as best effort, for about `seconds`."""
        return replace(
            self,
            total_seconds=min(self.total_seconds, seconds),
            stall_seconds=min(self.stall_seconds, seconds),
            best_effort=True,
        )

    @classmethod
    def of_environment(cls) -> "RetryPolicy":
        """The default policy, with BATON_STORAGE_PATIENCE_SECONDS and BATON_STORAGE_STALL_SECONDS applied.

        Raises:
            InvalidInput: one of them is not a number above 0.
        """
        default = cls()
        return cls(
            total_seconds=_seconds("BATON_STORAGE_PATIENCE_SECONDS", default.total_seconds),
            stall_seconds=_seconds("BATON_STORAGE_STALL_SECONDS", default.stall_seconds),
        )


class Retry:
    """The retries of one operation: exponential backoff with full jitter and one time limit for all attempts.

    Source: "Exponential Backoff And Jitter" (Brooker, 2015). A wait beyond the limit is cut to the time that remains,
    and a last attempt follows.
    """

    def __init__(
        self,
        where: str,
        policy: RetryPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
        deadline: Deadline = PROCESS_DEADLINE,
    ) -> None:
        """Prepare for the first attempt.

        Args:
            where: address of the object or bucket, for messages.
            policy: the limits.
            clock: monotonic time in seconds.
            deadline: of the process; also used to sleep.
        """
        self._where, self._policy = where, policy
        self._clock, self._deadline = clock, deadline
        self._unauthorized = self._mismatches = 0
        self.reset()

    def reset(self) -> None:
        """Start counting attempts and time again, because the operation made progress."""
        self._began = self._clock()
        # Best effort has one limit from the first attempt; everything else gets at least two attempts.
        self._until = self._began + self._policy.total_seconds if self._policy.best_effort else None
        self._attempts = 0

    def before_first_attempt(self) -> None:
        """Check that the store is worth a request.

        Raises:
            StoreUnreachable: this process was asked to stop, and the store has not responded since.
        """
        if self._deadline.store_unreachable:
            raise StoreUnreachable(f"{self._where}: stopping, and the store does not respond; {_RESUMABLE}")

    def wait_after(self, error: Exception) -> None:
        """Wait before the next attempt.

        Raises:
            StorageError: the error is permanent, or the time is used up.
        """
        refused = not self._is_worth_retrying(error)
        # What worked before may work again: a token expires while no new one can be had, a role is given back.
        was_allowed = self._deadline.has_written and not self._policy.best_effort
        if refused and not (was_allowed and may_end(error)):
            raise refusal(error, where=self._where) from error
        now = self._clock()
        self._until = now + self._policy.total_seconds if self._until is None else self._until
        self._attempts += 1
        remaining = min(self._until - now, self._deadline.remaining())
        if remaining <= 0:
            raise self._give_up(error, now - self._began, refused=refused) from error
        longest = min(self._policy.first_wait_seconds * _FACTOR ** min(self._attempts - 1, 32), _LONGEST_WAIT_SECONDS)
        wait = min(random.uniform(0, longest), remaining)  # noqa: S311 - spreads clients out, guards nothing
        level = logging.DEBUG if self._policy.best_effort else logging.WARNING
        _LOGGER.log(
            level, "%s: %s; retrying in %.1f s (attempt %d)", self._where, message_of(error), wait, self._attempts + 1
        )
        self._deadline.sleep(wait)

    def _give_up(self, error: Exception, seconds: float, *, refused: bool) -> StorageError:
        attempts = f"{self._attempts} attempts" if self._attempts > 1 else "one attempt"
        if not self._deadline.is_set:
            gave_up = (
                f"gave up after {attempts} in {seconds:.1f} s (BATON_STORAGE_PATIENCE_SECONDS"
                f"={self._policy.total_seconds:g})"
            )
            if refused:
                return StorageError(f"{refusal(error, where=self._where)}; {gave_up}; {_RESUMABLE}")
            return StorageError(
                f"{self._where}: {message_of(error)}; {gave_up}; check the network and the store's status page, and "
                "run again"
            )
        if self._deadline.remaining() <= 0:
            self._deadline.mark_store_unreachable()
        fails = "refuses" if refused else "does not respond"
        return StoreUnreachable(
            f"{self._where}: stopping, and the store {fails} ({message_of(error)}; {attempts} in {seconds:.1f} s); "
            f"{_RESUMABLE}"
        )

    def _is_worth_retrying(self, error: Exception) -> bool:
        """Whether to retry; raises StorageError after repeated checksum mismatches."""
        if isinstance(error, ErrorResponse) and error.code == UNAUTHORIZED:
            # An access token may have just expired; rejected credentials stay rejected.
            self._unauthorized += 1
            cause = error.__cause__
            return self._unauthorized < _MAX_UNAUTHORIZED and (cause is None or getattr(cause, "retryable", False))
        if isinstance(error, ChecksumMismatch):
            self._mismatches += 1
            if self._mismatches == _MAX_MISMATCHES:
                raise StorageError(
                    f"{self._where}: {message_of(error)}, {self._mismatches} times; check the network and this "
                    "machine's memory, and run again"
                ) from error
        return is_transient(error)


def retrying(once: Callable[[], _T], retry: Retry) -> _T:
    """Call `once` until it succeeds.

    Raises:
        FileNotFoundError: the store responded with 404.
        FileExistsError: raised by `once`.
        StorageError: see `Retry.wait_after`.
    """
    retry.before_first_attempt()
    while True:
        try:
            return once()
        except (FileNotFoundError, FileExistsError, BatonError):
            raise
        except Exception as error:  # noqa: BLE001 - unknown errors become a StorageError
            retry.wait_after(error)


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    import aiohttp
    import google.auth.exceptions

    if isinstance(error, ErrorResponse):
        return error.is_transient
    if isinstance(error, google.auth.exceptions.GoogleAuthError):
        # A token server that is down does not mean that the credentials are wrong.
        return error.retryable or isinstance(error, google.auth.exceptions.TransportError)
    if isinstance(error, aiohttp.InvalidURL | aiohttp.ClientSSLError):
        return False
    # aiohttp reports an unreadable status line as code 400, so its codes are ignored.
    return isinstance(
        error, ChecksumMismatch | MalformedResponse | TimeoutError | ConnectionError | aiohttp.ClientError
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
        raise InvalidInput(f"{variable}={text} is not a number of seconds; set a number above 0, or unset it")
    return seconds
