"""Stops: what asks for one, that nothing that asked is swallowed, and that everything is put back."""

import contextvars
import math
import os
import pty
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from lab import Heard
from training_process import process, wait_for

from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.contracts.segment import StopReason
from tasks.foundation.stops.listening import Stop, Stops, listening
from tasks.foundation.telemetry.events import Event, Silent

SPEC = StopSpec(grace_seconds=25)


class Told(BaseException):
    """What a handler of before raises, as Prefect's does."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _away_from_google(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "")


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Handlers as somebody else may have them before; what they received."""
    numbers: list[int] = []

    def handler(number: int, _frame: FrameType | None) -> None:
        numbers.append(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    yield numbers
    for number, was in before.items():
        signal.signal(number, was)


def raising(number: int, _frame: FrameType | None) -> None:
    raise Told(number)


def wakeup_descriptor() -> int:
    current = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(current)
    return current


def in_another_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


# Signals, in processes of their own.


def test_a_sigterm_is_heard_while_the_main_thread_is_in_c_code() -> None:
    with process("with listening(StopSpec(), telemetry=Printing()):\n    in_c_code()") as trainer:
        trainer.read_until("in C code")
        trainer.signal(signal.SIGTERM)
        assert "SIGTERM: finishing the steps in flight" in trainer.read_until("note:")
        assert trainer.popen.poll() is None


def test_a_second_sigint_leaves_at_once_though_the_main_thread_is_in_c_code() -> None:
    terminal, side = pty.openpty()
    body = "print('not flushed')\nwith listening(StopSpec(), telemetry=Printing()):\n    in_c_code()"
    with process(body, stderr=side) as trainer:
        trainer.read_until("in C code")
        trainer.signal(signal.SIGINT)
        assert "press Ctrl-C again to leave at once" in trainer.read_until("note:")
        assert trainer.popen.poll() is None
        trainer.signal(signal.SIGINT)
        assert trainer.wait() == 130
        os.set_blocking(terminal, False)
        assert b"\x1b[?25h" in os.read(terminal, 10_000)
    os.close(side)
    os.close(terminal)


def test_more_sigterms_change_nothing() -> None:
    body = """
signal.signal(signal.SIGTERM, lambda *_: print("handed on", flush=True))
with listening(StopSpec(), telemetry=Printing()) as stops:
    until_asked(stops)
    first = stops.asked
    for _ in range(10_000):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stops.asked == first
    print("committed", flush=True)
"""
    with process(body) as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGTERM)
        assert trainer.wait() == 0
        assert [line for line in trainer.lines if "committed" in line or "handed" in line] == [
            "committed\n",
            "handed on\n",
        ]
        assert sum("note:" in line for line in trainer.lines) == 1


def test_a_second_sigint_leaves_though_the_output_is_stuck() -> None:
    body = """
import threading
class Stuck:
    def emit(self, event):
        os.write(2, b"emitting")
        threading.Event().wait()
with listening(StopSpec(), telemetry=Stuck()):
    print("listening", flush=True)
    sys.stdout.write("x" * 10_000_000)  # nobody reads it: holds stdout's lock in a write that never ends
"""
    with process(body, stderr=subprocess.PIPE) as trainer:
        trainer.read_until("listening")
        trainer.signal(signal.SIGINT)
        assert trainer.popen.stderr is not None
        assert trainer.popen.stderr.read(len("emitting")) == "emitting"
        trainer.signal(signal.SIGINT)
        assert trainer.popen.wait() == 130
        trainer.popen.stderr.close()


def test_without_a_handler_the_signal_ends_the_process_once_the_work_is_safe() -> None:
    body = """
with listening(StopSpec()) as stops:
    until_asked(stops)
    print("committed", stops.asked.reason, flush=True)
print("never here", flush=True)
"""
    with process(body) as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGTERM)
        assert trainer.wait() == -signal.SIGTERM
        assert trainer.lines[-1] == "committed sigterm\n"


def test_one_ctrl_c_is_a_keyboard_interrupt_once_the_work_is_safe() -> None:
    body = """
try:
    with listening(StopSpec()) as stops:
        until_asked(stops)
        print("committed", stops.asked.reason, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    with process(body) as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGINT)
        assert trainer.wait() == 0
        assert trainer.lines[-2:] == ["committed sigint\n", "interrupted\n"]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    body = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
with listening(StopSpec(), telemetry=Printing()) as stops:
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    assert stops.asked is None
    until_asked(stops)
    print(stops.asked.reason, flush=True)
"""
    with process(body) as trainer:
        trainer.read_until("waiting")
        trainer.signal(signal.SIGTERM)
        assert trainer.wait() == -signal.SIGTERM
        assert "sigterm\n" in trainer.lines


def test_a_forked_child_dies_of_its_own_sigterm_and_does_not_stop_its_parent() -> None:
    body = """
with listening(StopSpec(), telemetry=Printing()) as stops:
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    # Another one that outlives the body, with whatever descriptors it has inherited.
    child = os.fork()
    if child == 0:
        time.sleep(1000)
print("left", stops.asked, flush=True)
os.kill(child, signal.SIGKILL)
"""
    with process(body) as trainer:
        assert trainer.read_until("left") == "left None\n"
        assert trainer.wait() == 0


# The rest of what is promised of signals.


def test_who_held_the_signal_hears_of_it_after_the_body(received: list[int]) -> None:
    heard = Heard()
    with listening(SPEC, telemetry=heard) as stops:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops.asked is not None
        assert stops.asked.reason == "sigterm"
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == []
    assert received == [signal.SIGTERM]
    assert len(heard.warnings) == 1


def test_nothing_is_raised_when_nothing_came(received: list[int]) -> None:
    with listening(SPEC) as stops:
        assert stops.asked is None
        assert stops.grace_left() == math.inf
    assert received == []


@pytest.mark.usefixtures("received")
def test_the_exception_of_the_handler_leaves_with_the_body_s_as_its_context() -> None:
    signal.signal(signal.SIGTERM, raising)

    def train() -> None:
        with listening(SPEC):
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("the commit failed")

    with pytest.raises(Told) as told:
        train()
    assert isinstance(told.value.__context__, RuntimeError)
    assert signal.getsignal(signal.SIGTERM) is raising
    assert wakeup_descriptor() == -1


def test_the_body_s_exception_leaves_if_the_handler_raises_none(received: list[int]) -> None:
    def train() -> None:
        with listening(SPEC):
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("the commit failed")

    with pytest.raises(RuntimeError, match="the commit failed"):
        train()
    assert received == [signal.SIGTERM]


@pytest.mark.usefixtures("received")
def test_of_both_signals_both_are_handed_on_and_sigterm_s_exception_leaves() -> None:
    signal.signal(signal.SIGTERM, raising)
    signal.signal(signal.SIGINT, raising)

    def train() -> None:
        with listening(SPEC):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Told) as told:
        train()
    assert told.value.args == (signal.SIGTERM,)
    assert isinstance(told.value.__context__, Told)
    assert told.value.__context__.args == (signal.SIGINT,)


@pytest.mark.usefixtures("received")
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(fails: bool) -> None:
    def state() -> tuple[Any, ...]:
        handlers = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
        return *handlers, wakeup_descriptor(), threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    mine, theirs = socket.socketpair()
    theirs.setblocking(False)
    previous = signal.set_wakeup_fd(theirs.fileno())
    try:
        before = state()
        with pytest.raises(RuntimeError) if fails else nullcontext(), listening(SPEC):
            assert all(was != now for was, now in zip(before, state(), strict=True))
            os.kill(os.getpid(), signal.SIGTERM)
            if fails:
                raise RuntimeError("failed")
        assert state() == before
    finally:
        signal.set_wakeup_fd(previous)
        mine.close()
        theirs.close()


@pytest.mark.usefixtures("received")
def test_other_signals_still_wake_whoever_had_the_descriptor() -> None:
    mine, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    previous = signal.set_wakeup_fd(theirs.fileno())
    try:
        with listening(SPEC) as stops:
            os.kill(os.getpid(), signal.SIGUSR1)
            mine.settimeout(60)
            assert mine.recv(10) == bytes([signal.SIGUSR1])
            assert stops.asked is None
    finally:
        signal.set_wakeup_fd(previous)
        signal.signal(signal.SIGUSR1, before)
        mine.close()
        theirs.close()


# One within another.


def test_an_inner_one_joins_the_outer_one(received: list[int]) -> None:
    with listening(SPEC) as outer:
        with listening(StopSpec(grace_seconds=1)) as inner:
            assert inner is outer
            os.kill(os.getpid(), signal.SIGTERM)
        assert received == []
        assert outer.asked is not None
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == []
    assert received == [signal.SIGTERM]
    with listening(SPEC) as another:
        assert another is not outer
        assert another.asked is None


def test_another_thread_joins_and_handlers_stay_the_main_thread_s(received: list[int]) -> None:
    def join() -> Stops:
        with listening(SPEC) as stops:
            return stops

    with listening(SPEC) as outer:
        ours = signal.getsignal(signal.SIGTERM)
        assert in_another_thread(join) is outer
        assert signal.getsignal(signal.SIGTERM) is ours
        os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_outside_the_main_thread_the_budget_works_and_no_handler_is_installed(received: list[int]) -> None:
    clock = Clock()
    held = signal.getsignal(signal.SIGTERM)

    def train() -> Stop | None:
        with listening(SPEC, within_seconds=10, clock=clock) as stops:
            assert signal.getsignal(signal.SIGTERM) is held
            assert stops.asked is None
            clock.now += 10
            return stops.asked

    assert in_another_thread(train) == Stop("time_budget", 110.0)
    assert received == []


def test_the_main_thread_hears_signals_though_another_thread_was_first(received: list[int]) -> None:
    entered, leave = threading.Event(), threading.Event()
    seen: list[Stops] = []

    def first() -> None:
        with listening(SPEC) as stops:
            seen.append(stops)
            entered.set()
            leave.wait()

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait()
    try:
        with listening(SPEC) as stops:
            assert stops is seen[0]
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == []
        assert received == [signal.SIGTERM]
        assert stops.asked is not None
    finally:
        leave.set()
        thread.join()


# The time budget, the grace period, the news.


def test_the_budget_asks_when_it_is_used_up_and_says_so_once(received: list[int]) -> None:
    clock, heard = Clock(), Heard()
    with listening(SPEC, within_seconds=10, clock=clock, telemetry=heard) as stops:
        clock.now = 109.9
        assert stops.asked is None
        assert heard.warnings == []
        clock.now = 200.0
        assert stops.asked == Stop("time_budget", 110.0)
        assert stops.asked == Stop("time_budget", 110.0)
        assert stops.grace_left() == math.inf
        assert len(heard.warnings) == 1
        assert "time budget" in heard.warnings[0]
    assert received == []


@pytest.mark.usefixtures("received")
@pytest.mark.parametrize(("inner", "fires_at"), [(5, 107.0), (20, 110.0), (None, 110.0)])
def test_the_tighter_budget_holds(inner: float | None, fires_at: float) -> None:
    clock = Clock()
    with listening(SPEC, within_seconds=10, clock=clock) as stops:
        clock.now = 102.0
        with listening(SPEC, within_seconds=inner):
            clock.now = 150.0
            assert stops.asked == Stop("time_budget", fires_at)


def test_what_was_asked_first_stays(received: list[int]) -> None:
    clock = Clock()
    with listening(SPEC, within_seconds=10, clock=clock) as stops:
        clock.now = 105.0
        os.kill(os.getpid(), signal.SIGTERM)
        clock.now = 150.0
        assert stops.asked == Stop("sigterm", 105.0)
    with listening(SPEC, within_seconds=10, clock=clock) as stops:
        clock.now = 165.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops.asked == Stop("time_budget", 160.0)
    assert received == [signal.SIGTERM] * 2


@pytest.mark.parametrize(
    ("reason", "left"),
    [("sigterm", 18.0), ("preempted", 18.0), ("maintenance", 18.0), ("sigint", math.inf)],
)
def test_the_grace_period_runs_after_a_notice(reason: StopReason, left: float) -> None:
    clock = Clock()
    stops = Stops(SPEC, clock=clock, telemetry=Silent())
    stops.hear(reason)
    clock.now += 7
    assert stops.grace_left() == left
    clock.now += 100
    assert stops.grace_left() == left - 100


def test_the_grace_period_runs_though_something_harmless_asked_before() -> None:
    clock = Clock()
    stops = Stops(SPEC, clock=clock, telemetry=Silent())
    stops.hear("sigint")
    clock.now += 50
    stops.hear("preempted")
    stops.hear("sigterm")
    clock.now += 5
    assert stops.asked == Stop("sigint", 100.0)
    assert stops.grace_left() == 20.0


@pytest.mark.usefixtures("received")
def test_each_reason_is_told_once() -> None:
    heard = Heard()
    with listening(SPEC, telemetry=heard):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert sorted(text.split(":")[0] for text in heard.warnings) == ["SIGINT", "SIGTERM"]


@pytest.mark.usefixtures("received")
def test_a_sink_finds_the_context_of_whoever_listens() -> None:
    run: contextvars.ContextVar[str] = contextvars.ContextVar("run")
    found: list[str] = []

    class Contextual:
        def emit(self, _event: Event) -> None:
            found.append(run.get())

    run.set("digits")
    with listening(SPEC, telemetry=Contextual()):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: found)
    assert found == ["digits"]


def test_a_sink_that_fails_ends_nothing(received: list[int], caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def emit(self, _event: Event) -> None:
            raise OSError("no terminal")

    with listening(SPEC, telemetry=Failing()) as stops:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops.asked is not None
    assert received == [signal.SIGTERM]
    assert "no terminal" in caplog.text
