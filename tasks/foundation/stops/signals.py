"""SIGTERM and SIGINT while training runs: noted when they arrive, handed on when the work is safe.

Python runs its signal handlers between two bytecodes of the main thread, and that thread can be inside one
TensorFlow call for seconds. But the interpreter writes the number of each signal into the wakeup descriptor at once,
and a thread that reads there hears it as long as the main thread's C code has released the interpreter.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from signal import Signals
from types import FrameType
from typing import Any, Final, Protocol

from tasks.foundation.contracts.segment import StopReason

_REASON_OF: Final[dict[Signals, StopReason]] = {Signals.SIGINT: "sigint", Signals.SIGTERM: "sigterm"}
_SHOW_CURSOR: Final = "\x1b[?25h"
_EXIT_CODE: Final = 128 + Signals.SIGINT
_LAST_WORDS_SECONDS: Final = 0.5
_NOTE_SECONDS: Final = 1.0
_PUTTING_BACK_TRIES: Final = 3

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Listener(Protocol):
    """Who is told."""

    def hear(self, reason: StopReason) -> None:
        """Called at once, from a thread and from a signal handler, more than once for a signal; must take no lock."""

    def tell(self, reason: StopReason) -> None:
        """Called once for a signal, from a thread of its own."""


@contextmanager
def hearing_signals(listener: Listener, arrived: set[Signals]) -> Iterator[None]:
    """Take SIGTERM and SIGINT over from whoever has them, for the body; a second SIGINT ends the process.

    Does nothing within another one, nor outside the main thread, where Python installs no handlers.

    Args:
        listener: is told of each.
        arrived: after the exit, what arrived and was kept from the handlers of before: see `raise_again`.
    """
    if threading.current_thread() is not threading.main_thread() or _Ears.of_process is not None:
        yield
        return
    ears = _Ears(listener, arrived)
    try:
        ears.open()
        yield
    finally:
        ears.close()


def raise_again(arrived: set[Signals]) -> None:
    """Let whoever holds the signals now hear of those that arrived. Main thread only, unless there are none.

    Raises:
        BaseException: whatever their handlers raise.
    """
    try:
        if Signals.SIGINT in arrived:
            signal.raise_signal(Signals.SIGINT)
    finally:
        # Last, so that of both its exception leaves: a machine that goes weighs more than a key press.
        if Signals.SIGTERM in arrived:
            signal.raise_signal(Signals.SIGTERM)


class _Ears:
    """The handlers, the wakeup descriptor and the thread that reads it."""

    of_process: "_Ears | None" = None

    def __init__(self, listener: Listener, arrived: set[Signals]) -> None:
        self._listener = listener
        self._arrived = arrived
        self._previous: dict[Signals, _Handler] = {}
        self._previous_wakeup = -1
        self._telling: dict[Signals, threading.Thread] = {}

    def open(self) -> None:
        for number in _REASON_OF:
            handler = signal.getsignal(number)
            # Ignored on purpose (nohup, a shell's background) stays so; None is C code's, and could not be put back.
            if handler not in {signal.SIG_IGN, None}:
                self._previous[number] = handler
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)  # a wakeup descriptor must not block
        self._thread = threading.Thread(target=self._read, name="baton-signals", daemon=True)
        self._thread.start()
        _Ears.of_process = self
        self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._previous:
            signal.signal(number, self._handle)

    def close(self) -> None:
        if _Ears.of_process is not self:  # a forked child has forgotten it
            return
        try:
            self._give_back()
        finally:
            _Ears.of_process = None
            # Ends the reader even if a forked child holds the descriptor still, which closing would not.
            self._writer.shutdown(socket.SHUT_WR)
            self._thread.join()
            for telling in self._telling.values():
                telling.join(_NOTE_SECONDS)
            self._reader.close()
            self._writer.close()

    def _give_back(self) -> None:
        # In this order a signal in between reaches our handler still: it is noted once and lost never.
        try:
            signal.set_wakeup_fd(self._previous_wakeup)
        except (OSError, ValueError):  # its owner has closed it meanwhile
            signal.set_wakeup_fd(-1)
        raised: BaseException | None = None
        left = dict(self._previous)
        # `signal.signal` runs the handlers of what is pending before it changes anything; one that is back already
        # may raise there, and the other one has to be put back all the same.
        for _ in range(_PUTTING_BACK_TRIES):
            try:
                for number in list(left):
                    signal.signal(number, left[number])
                    del left[number]
            except BaseException as error:  # noqa: BLE001 - raised below
                raised = error
        if raised is not None:
            raise raised

    def forget(self) -> None:
        """In a forked child, which must die of a SIGTERM, and must not write into its parent's descriptor."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._arrived.clear()
        self._reader.close()
        self._writer.close()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._arrived.add(Signals(number))
        self._listener.hear(_REASON_OF[Signals(number)])

    def _read(self) -> None:
        interrupts = 0
        while numbers := self._reader.recv(4096):
            for number in numbers:
                if number not in self._previous:
                    self._pass_on(number)
                    continue
                interrupts += number == Signals.SIGINT
                if interrupts > 1:
                    _leave_at_once()
                self._listener.hear(_REASON_OF[Signals(number)])
                self._start_telling(Signals(number))

    def _pass_on(self, number: int) -> None:
        """Other signals' numbers belong to whoever had the descriptor before, such as an event loop."""
        if self._previous_wakeup != -1:
            with suppress(OSError):
                os.write(self._previous_wakeup, bytes([number]))

    def _start_telling(self, number: Signals) -> None:
        # Not in the reader: a sink can wait for a stuck terminal, and the second Ctrl-C must be heard just then.
        if number not in self._telling:
            self._telling[number] = threading.Thread(
                target=self._listener.tell, args=(_REASON_OF[number],), name="baton-note", daemon=True
            )
            self._telling[number].start()


def _leave_at_once() -> None:
    # Writing can wait for ever, for a stopped terminal or a full pipe; leaving must not.
    last_words = threading.Thread(target=_last_words, daemon=True)
    last_words.start()
    last_words.join(_LAST_WORDS_SECONDS)
    os._exit(_EXIT_CODE)


def _last_words() -> None:
    for stream in (sys.stderr, sys.stdout):
        # AttributeError: a process without a console has None here.
        with suppress(AttributeError, OSError, ValueError):
            if stream.isatty():
                stream.write(_SHOW_CURSOR)  # a progress bar hides it
            stream.flush()


# A child that is forked has our handlers and the wakeup descriptor that it shares with its parent. Until it has got rid
# of them, a signal to it would be lost on it and heard by its parent; so signals wait for that long.
_held_back = threading.local()


def _before_fork() -> None:
    if _Ears.of_process is not None:
        _held_back.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _REASON_OF)


def _after_fork() -> None:
    mask = vars(_held_back).pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    ears, _Ears.of_process = _Ears.of_process, None
    if ears is not None:
        ears.forget()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
