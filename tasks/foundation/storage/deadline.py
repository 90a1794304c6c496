"""How long this process may still wait for a store: without limit, until it is asked to stop."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# After the deadline a request is given up once nothing has moved for this long. A store that answers can still be used,
# and one that is away costs no more time than this.
LAST_SECONDS = 2.0


class Deadline:
    """A moment after which this process no longer waits. Safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """No deadline yet.

        Args:
            clock: seconds, never going back.
        """
        self._clock = clock
        self._at = math.inf
        self._is_set = threading.Event()
        self._given_up = False

    @property
    def is_set(self) -> bool:
        """Whether this process was asked to stop."""
        return self._at < math.inf

    @property
    def given_up(self) -> bool:
        """Whether the store did not answer after the deadline. It is not asked again."""
        return self._given_up

    def left(self) -> float:
        """Seconds until the deadline; 0 once it has passed, infinite if there is none."""
        return max(self._at - self._clock(), 0.0)

    def bind(self, seconds: float) -> None:
        """Set the deadline to `seconds` from now, unless it is earlier already. Wakes up sleeping threads."""
        self._at = min(self._at, self._clock() + seconds)
        self._is_set.set()

    def lift(self) -> None:
        """Remove the deadline: this process begins another command."""
        self._at, self._given_up = math.inf, False
        self._is_set.clear()

    def give_up(self) -> None:
        """Note that the store did not answer after the deadline."""
        self._given_up = True

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the deadline if that is earlier."""
        until = self._clock() + seconds
        if not self._is_set.wait(seconds):
            return
        left = min(until, self._at) - self._clock()
        if left > 0:
            time.sleep(left)

    @contextmanager
    def of_a_command(self, grace_seconds: float) -> Iterator[None]:
        """For the whole of a command: removes an earlier deadline, then as `bound_by_interruption`."""
        self.lift()
        with self.bound_by_interruption(grace_seconds):
            yield

    @contextmanager
    def bound_by_interruption(self, grace_seconds: float) -> Iterator[None]:
        """Set the deadline when the body is interrupted, so that threads it leaves behind do not wait for the store.

        An interruption is a BaseException that is no Exception: KeyboardInterrupt, or what a SIGTERM handler raises.

        Args:
            grace_seconds: counted from the interruption.
        """
        try:
            yield
        except BaseException as fault:
            if not isinstance(fault, Exception):
                self.bind(grace_seconds)
            raise


# One for the process: a stop concerns all of its threads.
LEAVING = Deadline()
