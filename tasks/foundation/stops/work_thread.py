"""Run work in the work thread of the process, while the main thread waits and receives signals."""

import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, NoReturn, TypeVar, cast

from tasks.foundation.stops.process_stop import PROCESS_STOP

T = TypeVar("T")

_POLL_SECONDS: Final = 0.1


class WorkThreadTask(Generic[T]):
    """One piece of work.

    A signal may interrupt the main thread at any bytecode of these methods, so none of them holds a Python lock.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self.outcome: list[tuple[T | None, BaseException | None]] = []
        self._work = work
        self._queued = self._begun = False
        self._reader, self._writer = socket.socketpair()

    def begin(self) -> None:
        """Hand the work to the thread. If a signal interrupts this, it may be handed over twice; it runs once."""
        if not self._queued:
            PROCESS_STOP.work_queue.put(self._run)
            self._queued = True

    def wait(self) -> None:
        """Wait until the work is done, or for a tenth of a second. `outcome` says which.

        A signal that arrives between Python's last check and the call of `select` does not interrupt it. Python finds
        the signal after the call.
        """
        select.select([self._reader], [], [], _POLL_SECONDS)

    def result(self) -> T:
        """Return what the work returned, or raise what it raised."""
        value, fault = self.outcome[0]
        if fault is not None:
            raise fault
        return cast("T", value)

    def close(self) -> None:
        """Close the sockets; call it once the work is done."""
        self._reader.close()
        self._writer.close()

    def _run(self) -> None:
        if self._begun:
            return
        self._begun = True
        try:
            self.outcome.append((self._work(), None))
        except BaseException as fault:  # noqa: BLE001 - raised in the main thread
            self.outcome.append((None, fault))
        finally:
            self._work = _already_done  # the work refers to a model
            with suppress(OSError):  # the main thread saw the outcome and closed the socket
                self._writer.send(b".")


def _already_done() -> NoReturn:
    raise AssertionError("this work is done already")
