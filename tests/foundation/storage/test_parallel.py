"""Requests side by side: results in order, a bounded number of threads, and an end at the first failure."""

import threading
import time
from typing import Any

import pytest

from tasks.foundation.errors import StorageError
from tasks.foundation.storage.transfers import beside, parallel_map


def test_results_are_in_order_and_threads_are_bounded() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.002 * (7 - number % 7))
        with lock:
            running -= 1
        return number * number

    assert parallel_map(work, range(40), workers=5) == [number * number for number in range(40)]
    assert 1 < most <= 5


@pytest.mark.parametrize("workers", [1, 4])
def test_items_not_started_are_skipped_after_a_failure(workers: int) -> None:
    begun: list[int] = []
    hold = threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise StorageError("refused")
        if workers > 1:
            hold.wait(0.3 if number == 0 else 0.002)

    with pytest.raises(StorageError, match="refused"):
        parallel_map(work, range(1000), workers=workers)
    assert len(begun) < 900


def test_interrupted_caller_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    hold, ended = threading.Event(), threading.Event()

    def work(_: int) -> None:
        hold.wait(30)
        ended.set()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.foundation.storage.transfers.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parallel_map(work, range(3), workers=3)
    assert not ended.is_set()
    hold.set()


def test_work_beside_runs_while_the_body_does() -> None:
    go = threading.Event()
    with beside(lambda: go.wait(30)) as found:
        assert not found.done()
        go.set()
    assert found.result()


def test_failed_body_does_not_wait_for_work_beside() -> None:
    hold = threading.Event()
    with pytest.raises(StorageError, match="refused"), beside(lambda: hold.wait(30)) as found:
        raise StorageError("refused")
    assert not found.done()
    hold.set()


def test_error_of_work_beside_is_raised_by_its_result() -> None:
    with beside(lambda: int("x")) as found:
        pass
    with pytest.raises(ValueError, match="invalid literal"):
        found.result()
