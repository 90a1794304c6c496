"""The thread that saves as a thread of a writer in `interleaving.py`, so that its calls are put in every order too."""

import queue
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import greenlet
import pytest

from tasks.foundation.checkpoint import save
from tests.support.interleaving import Thread


class SteppedThread:
    """As much of `threading.Thread` as `AsyncSaves` uses."""

    def __init__(self, *, target: Callable[[], object], name: str, daemon: bool) -> None:  # noqa: ARG002
        self._target = target

    def start(self) -> None:
        current = Thread.current()
        current.execution.start_thread(current.writer, self._target)


class SteppedQueue:
    """As much of `queue.SimpleQueue` as `AsyncSaves` uses, within one writer."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[Thread] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            waiting = self._waiting.popleft()
            waiting.execution.wake(waiting)

    def get(self, timeout: float | None = None) -> Any:  # noqa: ARG002 - time does not pass
        thread = Thread.current()
        while not self._items:
            if thread.execution.is_over:
                raise greenlet.GreenletExit
            self._waiting.append(thread)
            thread.wait()
        return self._items.popleft()


def step_saves(patch: pytest.MonkeyPatch) -> None:
    """Make every `AsyncSaves`'s thread a thread of its writer."""

    def refuse() -> NoReturn:
        raise OSError("not a thread of the system")

    patch.setattr(save, "threading", SimpleNamespace(Thread=SteppedThread, get_native_id=refuse))
    patch.setattr(save, "queue", SimpleNamespace(SimpleQueue=SteppedQueue, Empty=queue.Empty))
