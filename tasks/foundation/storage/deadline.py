"""How long this process may still wait for a store: without limit until it is asked to stop.

A store that refuses is waited for only once a command that trains has written: until then, its credentials are wrong
and it ends at once; afterwards they were right, and what has changed may change back.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# After the deadline, a request is cancelled once no bytes have moved for this long. A store that responds stays usable,
# and one that does not respond costs at most this time.
LAST_SECONDS = 2.0
_GRACE_SECONDS = 25.0  # until a run file says otherwise; as its default


class Deadline:
    """A moment after which this process no longer waits. Safe to use from any thread.

    Attributes:
        grace_seconds: from a request to stop to the end of the machine, for the newest command that trains.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create it without a deadline.

        Args:
            clock: monotonic time in seconds.
        """
        self.grace_seconds = _GRACE_SECONDS
        self._clock = clock
        self._at = math.inf
        self._is_set = threading.Event()
        self._store_unreachable = False
        self._in_command = self._has_written = False

    @property
    def has_written(self) -> bool:
        """Whether a command that trains has written. From then on, a refusal is an outage and not refused input."""
        return self._has_written

    @property
    def is_set(self) -> bool:
        """Whether this process was asked to stop."""
        return self._at < math.inf

    @property
    def store_unreachable(self) -> bool:
        """Whether the store failed to respond after the deadline. No further request is sent then."""
        return self._store_unreachable

    def remaining(self) -> float:
        """Seconds until the deadline: 0 once it has passed, infinite if there is none."""
        return max(self._at - self._clock(), 0.0)

    def start(self, seconds: float) -> None:
        """Set the deadline to `seconds` from now, unless it is earlier already. Wakes up sleeping threads."""
        self._at = min(self._at, self._clock() + seconds)
        self._is_set.set()

    def clear(self) -> None:
        """Remove the deadline: this process begins another command."""
        self._at, self._store_unreachable, self._has_written = math.inf, False, False
        self.grace_seconds = _GRACE_SECONDS
        self._is_set.clear()

    def mark_written(self) -> None:
        """Record that something was written, if this is within `for_command`."""
        self._has_written = self._in_command

    def mark_store_unreachable(self) -> None:
        """Record that the store did not respond after the deadline."""
        self._store_unreachable = True

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the deadline if that is earlier."""
        until = self._clock() + seconds
        if not self._is_set.wait(seconds):
            return
        remaining = min(until, self._at) - self._clock()
        if remaining > 0:
            time.sleep(remaining)

    @contextmanager
    def for_command(self, grace_seconds: float) -> Iterator[None]:
        """Use around a command that trains: clears an earlier deadline, then does what `start_on_interrupt` does."""
        self.clear()
        self._in_command, self.grace_seconds = True, grace_seconds
        try:
            with self.start_on_interrupt(grace_seconds):
                yield
        finally:
            # The next command of a notebook begins with its own checks.
            self._in_command = self._has_written = False

    @contextmanager
    def start_on_interrupt(self, grace_seconds: float) -> Iterator[None]:
        """Start the deadline when the body is interrupted, so that its remaining threads stop waiting.

        An interrupt is a BaseException that is not an Exception: KeyboardInterrupt, or what a SIGTERM handler raises.

        Args:
            grace_seconds: counted from the interrupt.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self.start(grace_seconds)
            raise


# A module global on purpose: a signal stops the whole process, so all of its threads share one deadline.
PROCESS_DEADLINE = Deadline()
