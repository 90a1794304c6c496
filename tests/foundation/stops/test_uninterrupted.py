"""Work that is held: what asks for a stop is noted, nothing that asked is swallowed, everything is put back."""

import contextvars
import math
import os
import pty
import signal
import subprocess
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.contracts.segment import StopReason
from tasks.foundation.stops.stops import Stop, Stops
from tasks.foundation.stops.uninterrupted import run_uninterrupted
from tasks.foundation.storage.deadline import Deadline
from tasks.foundation.telemetry.events import Event
from tests.support.lab import Heard
from tests.support.training_process import process, wait_for

SPEC = StopSpec(grace_seconds=25.0)


class ToldError(BaseException):
    """What a handler of before raises, as Prefect's does."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _away_from_google(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "")


def raising(number: int, _frame: FrameType | None) -> None:
    raise ToldError(number)


@pytest.fixture
def _prefect_like_handler() -> Any:
    before = signal.signal(signal.SIGTERM, raising)
    yield
    signal.signal(signal.SIGTERM, before)


def until_asked(stops: Stops) -> Stop:
    wait_for(lambda: stops.asked is not None)
    assert stops.asked is not None
    return stops.asked


@pytest.mark.parametrize("reason", ["sigterm", "sigint", "preempted", "maintenance"])
def test_whatever_asks_bounds_the_waiting_for_the_store(reason: StopReason) -> None:
    """Ctrl-C too: no machine goes then, but nobody who pressed it wants to wait for minutes."""
    clock, leaving = Clock(), Deadline()
    stops = Stops(SPEC, clock=clock, telemetry=Heard(), leaving=leaving)
    stops.stop_within(0)
    assert stops.asked is not None
    assert not leaving.is_set, "a time budget is in no hurry"
    stops.request_stop(reason)
    wait_for(lambda: leaving.is_set)
    assert 0 < leaving.left() <= SPEC.grace_seconds


# Signals, in processes of their own.


def test_a_sigterm_is_heard_while_the_work_is_in_c_code() -> None:
    with process("run_uninterrupted(in_c_code, StopSpec(), telemetry=Printing())") as trainer:
        trainer.read_until("in C code")
        trainer.signal(signal.SIGTERM)
        assert "SIGTERM: finishing the steps in flight" in trainer.read_until("note:")
        assert trainer.popen.poll() is None


CLOSABLE = "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may run under nohup themselves
HELD = """
class PrefectReported(BaseException):
    pass
def handler(*_):
    raise PrefectReported
def work(stops):
    until_asked(stops)
    say("asked:", stops.asked.reason)
    time.sleep(0.2)
    say("committed")
signal.signal(signal.SIGTERM, handler)
try:
    run_uninterrupted(work, StopSpec(), telemetry=Printing())
except PrefectReported:
    say("told")
say("SIGHUP as before:", signal.getsignal(signal.SIGHUP) is signal.SIG_DFL)
"""


def test_a_closed_terminal_is_heard_as_a_sigterm() -> None:
    with process(CLOSABLE + HELD) as trainer:
        trainer.read_until("waiting")
        for _ in range(2):  # the kernel sends one, and the shell another
            trainer.signal(signal.SIGHUP)
        assert trainer.wait() == 0
    assert "asked: sigterm\n" in trainer.lines
    assert trainer.lines[-3:] == ["committed\n", "told\n", "SIGHUP as before: True\n"]
    assert any("note: terminal closed (SIGHUP): finishing the steps in flight" in line for line in trainer.lines)


def test_a_closed_terminal_ends_work_that_nobody_else_handles() -> None:
    with process(CLOSABLE + "run_uninterrupted(until_asked, StopSpec(), telemetry=Printing())") as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGHUP)
        assert "terminal closed" in trainer.read_until("note:")
        assert trainer.wait() == -signal.SIGTERM


def test_under_nohup_a_closed_terminal_changes_nothing() -> None:
    with process("signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + HELD) as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGHUP)
        trainer.signal(signal.SIGTERM)
        assert trainer.wait() == 0
    assert any("note: SIGTERM: finishing" in line for line in trainer.lines)
    assert trainer.lines[-1] == "SIGHUP as before: False\n"


def test_a_second_sigint_leaves_at_once_though_the_work_is_in_c_code() -> None:
    terminal, side = pty.openpty()
    body = "print('flushed at last')\nrun_uninterrupted(in_c_code, StopSpec(), telemetry=Printing())"
    with process(body, stderr=side) as trainer:
        trainer.read_until("in C code")
        trainer.signal(signal.SIGINT)
        assert "press Ctrl-C again to leave at once" in trainer.read_until("note:")
        assert trainer.popen.poll() is None
        trainer.signal(signal.SIGINT)
        assert trainer.wait() == 130
        assert "flushed at last\n" in trainer.lines
        os.set_blocking(terminal, False)
        seen = os.read(terminal, 10_000)
        assert b"\x1b[?25h" in seen
        assert b"left at once: what is committed stays, and the same command goes on from there\r\n" in seen
    os.close(side)
    os.close(terminal)


def test_a_second_sigint_leaves_though_the_output_is_stuck() -> None:
    body = """
import threading
class Stuck:
    def emit(self, event):
        os.write(2, b"emitting")
        threading.Event().wait()
def work(stops):
    say("working")
    sys.stdout.write("x" * 10_000_000)  # nobody reads it: holds stdout's lock in a write that never ends
run_uninterrupted(work, StopSpec(), telemetry=Stuck())
"""
    with process(body, stderr=subprocess.PIPE) as trainer:
        trainer.read_until("working")
        assert trainer.popen.stdout is not None
        assert trainer.popen.stdout.read(1) == "x"
        trainer.signal(signal.SIGINT)
        assert trainer.popen.stderr is not None
        assert trainer.popen.stderr.read(len("emitting")) == "emitting"
        trainer.signal(signal.SIGINT)
        assert trainer.popen.wait() == 130
        trainer.popen.stderr.close()


def test_more_sigterms_change_nothing() -> None:
    body = """
class PrefectReported(BaseException):
    pass
def handler(*_):
    raise PrefectReported
signal.signal(signal.SIGTERM, handler)
def work(stops):
    until_asked(stops)
    first = stops.asked
    for _ in range(50):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.002)
    assert stops.asked == first
    say("committed")
try:
    run_uninterrupted(work, StopSpec(), telemetry=Printing())
except PrefectReported:
    say("handed on")
"""
    with process(body) as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGTERM)
        assert trainer.wait() == 0, trainer.lines
        assert [line for line in trainer.lines if "committed" in line or "handed" in line] == [
            "committed\n",
            "handed on\n",
        ]
        assert sum("note:" in line for line in trainer.lines) == 1


def test_without_a_handler_the_signal_ends_the_process_once_the_work_is_safe() -> None:
    body = """
def work(stops):
    until_asked(stops)
    say("committed", stops.asked.reason)
run_uninterrupted(work, StopSpec())
say("never here")
"""
    with process(body) as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGTERM)
        assert trainer.wait() == -signal.SIGTERM
        assert trainer.lines[-1] == "committed sigterm\n"


def test_one_ctrl_c_is_a_keyboard_interrupt_once_the_work_is_safe() -> None:
    body = """
def work(stops):
    until_asked(stops)
    say("committed", stops.asked.reason)
try:
    run_uninterrupted(work, StopSpec())
except KeyboardInterrupt:
    say("interrupted")
"""
    with process(body) as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGINT)
        assert trainer.wait() == 0
        assert trainer.lines[-2:] == ["committed sigint\n", "interrupted\n"]


def test_work_with_nothing_at_stake_is_left_alone() -> None:
    """Compiling may take longer than the machine has, and nothing would be lost."""
    body = """
def work(stops):
    stops.at_stake = False
    in_c_code(stops)
try:
    run_uninterrupted(work, StopSpec())
except KeyboardInterrupt:
    say("left")
    os._exit(0)
"""
    with process(body) as trainer:
        trainer.read_until("in C code")
        trainer.signal(signal.SIGINT)
        assert trainer.wait() == 0
        assert trainer.lines[-1] == "left\n"


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    body = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
def work(stops):
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    until_asked(stops)
    say(stops.asked.reason)
run_uninterrupted(work, StopSpec(), telemetry=Printing())
"""
    with process(body) as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGTERM)
        assert trainer.wait() == -signal.SIGTERM
        assert "sigterm\n" in trainer.lines


# The rest of what is promised.


@pytest.mark.usefixtures("_prefect_like_handler")
def test_the_handler_of_before_stays_in_place() -> None:
    """Prefect's runner gets its receipt only while `signal.getsignal` is Prefect's own."""
    seen: list[Any] = []
    run_uninterrupted(lambda _: seen.append(signal.getsignal(signal.SIGTERM)), SPEC)
    assert seen == [raising]


@pytest.mark.usefixtures("_prefect_like_handler")
def test_what_the_handler_raised_is_raised_after_the_work() -> None:
    heard, done = Heard(), []

    def work(stops: Stops) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert until_asked(stops).reason == "sigterm"
        done.append(True)

    with pytest.raises(ToldError):
        run_uninterrupted(work, SPEC, telemetry=heard)
    assert done == [True]
    wait_for(lambda: len(heard.warnings) == 1)


@pytest.mark.usefixtures("_prefect_like_handler")
def test_the_signal_s_exception_leaves_with_the_work_s_as_its_context() -> None:
    def work(stops: Stops) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        until_asked(stops)
        raise RuntimeError("the commit failed")

    with pytest.raises(ToldError) as told:
        run_uninterrupted(work, SPEC)
    assert isinstance(told.value.__context__, RuntimeError)


@pytest.mark.usefixtures("_prefect_like_handler")
def test_of_both_signals_the_machine_s_end_leaves() -> None:
    def work(stops: Stops) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        until_asked(stops)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: stops.grace_left() < math.inf)

    with pytest.raises(ToldError):
        run_uninterrupted(work, SPEC)


def test_the_work_s_result_and_error_come_through() -> None:
    assert run_uninterrupted(lambda stops: (stops.asked, stops.grace_left()), SPEC) == (None, math.inf)
    with pytest.raises(ZeroDivisionError):
        run_uninterrupted(lambda _: 1 / 0, SPEC)
    with pytest.raises(SystemExit):
        run_uninterrupted(lambda _: (_ for _ in ()).throw(SystemExit(3)), SPEC)


def test_all_such_work_of_a_process_is_done_by_one_thread_which_is_not_the_main_one() -> None:
    threads = {run_uninterrupted(lambda _: threading.current_thread(), SPEC) for _ in range(3)}
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def test_the_work_sees_the_caller_s_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")
    variable.set("seen")
    assert run_uninterrupted(lambda _: variable.get(), SPEC) == "seen"


def test_work_within_work_joins_it() -> None:
    def outer(stops: Stops) -> tuple[Stops, Stops, threading.Thread, threading.Thread]:
        inner = run_uninterrupted(lambda inner: (inner, threading.current_thread()), StopSpec(grace_seconds=1.0))
        return stops, inner[0], threading.current_thread(), inner[1]

    stops, inner, thread, inner_thread = run_uninterrupted(outer, SPEC)
    assert stops is inner
    assert thread is inner_thread
    assert run_uninterrupted(lambda another: another, SPEC) is not stops


def test_the_tighter_budget_holds() -> None:
    clock = Clock()

    def work(stops: Stops) -> Stop | None:
        run_uninterrupted(lambda _: None, SPEC, within_seconds=10)
        clock.now += 9
        assert stops.asked is None
        clock.now += 1
        return stops.asked

    assert run_uninterrupted(work, SPEC, within_seconds=99, clock=clock) == Stop("time_budget", 110.0)


def test_outside_the_main_thread_the_work_is_done_right_there() -> None:
    results: list[Any] = []

    def call() -> None:
        results.append(run_uninterrupted(lambda _: threading.current_thread(), SPEC))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert results == [thread]


@pytest.mark.parametrize(
    ("ask", "grace"),
    [
        (lambda stops: stops.request_stop("preempted"), 25.0 - 3),
        (lambda stops: stops.request_stop("sigterm"), 25.0 - 3),
        (lambda stops: stops.request_stop("sigint"), math.inf),
        (lambda stops: stops.stop_within(0), math.inf),
    ],
)
def test_the_grace_that_is_left(ask: Callable[[Stops], None], grace: float) -> None:
    clock = Clock()
    stops = Stops(SPEC, clock=clock, telemetry=Heard())
    ask(stops)
    clock.now += 3
    assert stops.asked is not None
    assert stops.asked.at == 100.0
    assert stops.grace_left() == grace


def test_what_asked_first_stays() -> None:
    clock = Clock()
    stops = Stops(SPEC, clock=clock, telemetry=Heard())
    stops.stop_within(50)
    clock.now += 10
    stops.request_stop("sigint")
    clock.now += 10
    stops.request_stop("sigterm")
    clock.now += 80
    assert stops.asked == Stop("sigint", 110.0)
    assert stops.grace_left() == 25.0 - 80


def test_a_sink_that_raises_ends_nothing() -> None:
    class Broken:
        def emit(self, event: Event) -> None:
            raise RuntimeError(str(event))

    stops = Stops(SPEC, clock=Clock(), telemetry=Broken())
    stops.stop_within(0)
    assert stops.asked is not None
