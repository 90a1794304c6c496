"""Uninterrupted work: signals request a stop, are delivered after the work, and handlers are restored."""

import contextvars
import math
import os
import pty
import signal
import subprocess
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from baton.tasks.foundation.contracts.run_spec import StopSpec
from baton.tasks.foundation.machine.stops import Stop, Stops
from baton.tasks.foundation.machine.threads import run_uninterrupted
from tests.support.clock import FakeClock
from tests.support.event_recorder import EventRecorder
from tests.support.training_process import process, wait_for

SPEC = StopSpec(grace_seconds=25.0)


class TerminationError(BaseException):
    """The exception of the installed handler, like Prefect's."""


@pytest.fixture(autouse=True)
def _away_from_google(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "")


def raising(number: int, _frame: FrameType | None) -> None:
    raise TerminationError(number)


@pytest.fixture
def _prefect_like_handler() -> Any:
    before = signal.signal(signal.SIGTERM, raising)
    yield
    signal.signal(signal.SIGTERM, before)


def until_requested(stops: Stops) -> Stop:
    wait_for(lambda: stops.requested is not None)
    assert stops.requested is not None
    return stops.requested


# Signals, in separate processes.


def test_sigterm_is_handled_while_the_work_is_in_c_code() -> None:
    with process("run_uninterrupted(in_c_code, StopSpec(), telemetry=Printing())") as trainer:
        trainer.read_until("in C code")
        trainer.signal(signal.SIGTERM)
        assert "SIGTERM: finishing the steps in flight" in trainer.read_until("note:")
        assert trainer.popen.poll() is None


CLOSABLE = "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may run under nohup themselves
UNTIL_REQUESTED = """
class Terminated(BaseException):
    pass
def handler(*_):
    raise Terminated
def work(stops):
    until_noted(stops)
    say("requested:", stops.requested.reason)
    say("committed")
signal.signal(signal.SIGTERM, handler)
try:
    run_uninterrupted(work, StopSpec(), telemetry=Printing())
except Terminated:
    say("terminated")
say("SIGHUP as before:", signal.getsignal(signal.SIGHUP) is signal.SIG_DFL)
"""


def test_sighup_is_handled_as_sigterm() -> None:
    with process(CLOSABLE + UNTIL_REQUESTED) as trainer:
        trainer.read_until("waiting")
        for _ in range(2):  # the kernel and the shell may each send one
            trainer.signal(signal.SIGHUP)
        assert trainer.wait() == 0
    assert "requested: sigterm\n" in trainer.lines
    assert trainer.lines[-3:] == ["committed\n", "terminated\n", "SIGHUP as before: True\n"]
    assert any("note: terminal closed (SIGHUP): finishing the steps in flight" in line for line in trainer.lines)


def test_sighup_without_a_handler_ends_the_process_after_the_work() -> None:
    with process(CLOSABLE + "run_uninterrupted(until_noted, StopSpec(), telemetry=Printing())") as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGHUP)
        assert "terminal closed" in trainer.read_until("note:")
        assert trainer.wait() == -signal.SIGTERM


def test_sighup_is_ignored_under_nohup() -> None:
    with process("signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + UNTIL_REQUESTED) as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGHUP)
        trainer.signal(signal.SIGTERM)
        assert trainer.wait() == 0
    assert any("note: SIGTERM: finishing" in line for line in trainer.lines)
    assert trainer.lines[-1] == "SIGHUP as before: False\n"


def test_a_second_sigint_leaves_while_the_work_is_in_c_code() -> None:
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
        assert b"left at once: committed checkpoints are safe, and the same command continues from there\r\n" in seen
    os.close(side)
    os.close(terminal)


def test_a_second_sigint_leaves_while_the_output_is_blocked() -> None:
    body = """
import threading
class Stuck:
    def emit(self, event):
        os.write(2, b"emitting")
        threading.Event().wait()
def work(stops):
    say("working")
    sys.stdout.write("x" * 10_000_000)  # no process reads it: the write holds stdout's lock and never ends
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


def test_repeated_sigterms_change_nothing() -> None:
    body = """
class Terminated(BaseException):
    pass
def handler(*_):
    raise Terminated
signal.signal(signal.SIGTERM, handler)
def work(stops):
    until_noted(stops)
    first = stops.requested
    for _ in range(50):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.002)
    assert stops.requested == first
    say("committed")
try:
    run_uninterrupted(work, StopSpec(), telemetry=Printing())
except Terminated:
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


def test_sigterm_without_a_handler_ends_the_process_after_the_work() -> None:
    body = """
def work(stops):
    until_requested(stops)
    say("committed", stops.requested.reason)
run_uninterrupted(work, StopSpec())
say("never here")
"""
    with process(body) as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGTERM)
        assert trainer.wait() == -signal.SIGTERM
        assert trainer.lines[-1] == "committed sigterm\n"


def test_one_ctrl_c_raises_keyboard_interrupt_after_the_work() -> None:
    body = """
def work(stops):
    until_requested(stops)
    say("committed", stops.requested.reason)
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


def test_work_without_unsaved_work_is_abandoned() -> None:
    """Compiling may take longer than the grace period, and nothing would be lost."""
    body = """
def work(stops):
    stops.unsaved_work = False
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


def test_an_ignored_signal_stays_ignored() -> None:
    body = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
def work(stops):
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    until_requested(stops)
    say(stops.requested.reason)
run_uninterrupted(work, StopSpec(), telemetry=Printing())
"""
    with process(body) as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGTERM)
        assert trainer.wait() == -signal.SIGTERM
        assert "sigterm\n" in trainer.lines


# Other behaviours, in this process.


@pytest.mark.usefixtures("_prefect_like_handler")
def test_the_installed_handler_stays_in_place() -> None:
    """Prefect's runner gets its receipt only while Prefect's own handler is installed."""
    seen: list[Any] = []
    run_uninterrupted(lambda _: seen.append(signal.getsignal(signal.SIGTERM)), SPEC)
    assert seen == [raising]


@pytest.mark.usefixtures("_prefect_like_handler")
def test_exception_of_a_handler_is_raised_after_the_work() -> None:
    recorder, done = EventRecorder(), []

    def work(stops: Stops) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert until_requested(stops).reason == "sigterm"
        done.append(True)

    with pytest.raises(TerminationError):
        run_uninterrupted(work, SPEC, telemetry=recorder)
    assert done == [True]
    wait_for(lambda: len(recorder.warnings) == 1)


@pytest.mark.usefixtures("_prefect_like_handler")
def test_error_of_the_work_is_context_of_the_signals_exception() -> None:
    def work(stops: Stops) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        until_requested(stops)
        raise RuntimeError("the commit failed")

    with pytest.raises(TerminationError) as caught:
        run_uninterrupted(work, SPEC)
    assert isinstance(caught.value.__context__, RuntimeError)


@pytest.mark.usefixtures("_prefect_like_handler")
def test_sigterm_takes_precedence_over_sigint() -> None:
    def work(stops: Stops) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        until_requested(stops)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: stops.grace_left() < math.inf)

    with pytest.raises(TerminationError):
        run_uninterrupted(work, SPEC)


def test_results_and_errors_of_the_work_are_passed_on() -> None:
    assert run_uninterrupted(lambda stops: (stops.requested, stops.grace_left()), SPEC) == (None, math.inf)
    with pytest.raises(ZeroDivisionError):
        run_uninterrupted(lambda _: 1 / 0, SPEC)
    with pytest.raises(SystemExit):
        run_uninterrupted(lambda _: (_ for _ in ()).throw(SystemExit(3)), SPEC)


def test_all_work_runs_in_one_thread() -> None:
    threads = {run_uninterrupted(lambda _: threading.current_thread(), SPEC) for _ in range(3)}
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def test_the_work_runs_in_the_context_of_its_caller() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")
    variable.set("seen")
    assert run_uninterrupted(lambda _: variable.get(), SPEC) == "seen"


def test_nested_work_joins_the_outer_work() -> None:
    def outer(stops: Stops) -> tuple[Stops, Stops, threading.Thread, threading.Thread]:
        inner = run_uninterrupted(lambda inner: (inner, threading.current_thread()), StopSpec(grace_seconds=1.0))
        return stops, inner[0], threading.current_thread(), inner[1]

    stops, inner, thread, inner_thread = run_uninterrupted(outer, SPEC)
    assert stops is inner
    assert thread is inner_thread
    assert run_uninterrupted(lambda another: another, SPEC) is not stops


def test_the_shorter_time_budget_applies() -> None:
    clock = FakeClock(100.0)

    def work(stops: Stops) -> Stop | None:
        run_uninterrupted(lambda _: None, SPEC, within_seconds=10)
        clock.seconds += 9
        assert stops.requested is None
        clock.seconds += 1
        return stops.requested

    assert run_uninterrupted(work, SPEC, within_seconds=99, clock=clock) == Stop("time_budget", 110.0)


def test_outside_the_main_thread_the_work_is_called_directly() -> None:
    results: list[Any] = []

    def call() -> None:
        results.append(run_uninterrupted(lambda _: threading.current_thread(), SPEC))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert results == [thread]


SAVES_PAST_THE_GRACE_PERIOD = """
import signal, sys, time
from baton.tasks.foundation.machine.stops import PROCESS_STOP
from baton.tasks.foundation.machine.threads import leaving_in_time
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE

signal.signal(signal.SIGTERM, lambda *_: None)
PROCESS_DEADLINE.grace_seconds = 0.1
with leaving_in_time():
    signal.raise_signal(signal.SIGTERM)
    until = time.monotonic() + 0.5
    PROCESS_STOP.save_in_flight = lambda: time.monotonic() < until
    while time.monotonic() < until + 0.6:  # a busy processor
        pass
    print("the save failed")
"""


def test_process_says_what_became_of_a_save_that_the_grace_period_was_too_short_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAVES_PAST_THE_GRACE_PERIOD], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "the save failed\n"), done.stderr
