"""Work that may be abandoned runs where the model lives, and signals are handled at once."""

import contextvars
import signal
import threading

import pytest

from baton.tasks.foundation.machine.threads import run_in_work_thread

SETTING = contextvars.ContextVar("SETTING", default="none")


def test_work_runs_in_one_thread_with_the_callers_context() -> None:
    SETTING.set("given")
    seen = [run_in_work_thread(lambda: (threading.get_ident(), SETTING.get())) for _ in range(2)]
    assert seen[0] == seen[1]
    assert seen[0] == (seen[1][0], "given")
    assert seen[0][0] != threading.get_ident()


def test_work_within_work_stays_in_its_thread() -> None:
    outer, inner = run_in_work_thread(
        lambda: (threading.get_ident(), run_in_work_thread(threading.get_ident)),
    )
    assert outer == inner


def test_error_of_the_work_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_work_thread(lambda: 1 // 0)


def test_signal_abandons_the_work() -> None:
    started, go_on = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go_on.wait()

    def interrupt(_number: int, _frame: object) -> None:
        raise InterruptedError("asked to stop")

    before = signal.signal(signal.SIGUSR1, interrupt)
    threading.Thread(target=lambda: (started.wait(), signal.raise_signal(signal.SIGUSR1)), daemon=True).start()
    try:
        with pytest.raises(InterruptedError):
            run_in_work_thread(work)
        assert not go_on.is_set()
    finally:
        go_on.set()
        signal.signal(signal.SIGUSR1, before)
    run_in_work_thread(lambda: None)  # the thread is free again
