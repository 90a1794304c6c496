"""Python processes that handle signals, and helpers that wait for their output."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.support import forked
from tests.support.checkout import CHECKOUT

LONGEST_SECONDS = 300.0  # only a hanging test waits this long

PRELUDE = """
import hashlib, os, signal, sys, threading, time
from baton.tasks.foundation.contracts.run_spec import StopSpec
from baton.tasks.foundation.machine.threads import run_uninterrupted

def say(*words):
    # One write: another thread prints the notes.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

class Printing:
    noted = threading.Event()

    def emit(self, event):
        say("note:", event.text)
        self.noted.set()

def in_c_code(_stops):
    # Minutes in one call without the GIL, like a call of TensorFlow.
    say("in C code")
    hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 2**31 - 1)

def until_requested(stops):
    say("waiting")
    while stops.requested is None:
        time.sleep(0.01)

def until_noted(stops):
    # Another thread prints the note, and the process may end with its work.
    until_requested(stops)
    Printing.noted.wait()
"""


class Process:
    """A Python process that runs PRELUDE first; reads its stdout by line."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.lines: list[str] = []

    def read_until(self, text: str) -> str:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"{text!r} was not printed; {self.lines}, {self.popen.wait()}")

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self) -> int:
        assert self.popen.stdout is not None
        self.lines += self.popen.stdout.readlines()
        return self.popen.wait()


@contextmanager
def process(body: str, **settings: Any) -> Iterator[Process]:
    """Start a Python process that runs `body` after PRELUDE; kill its process group at the end of the block."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "GCE_METADATA_HOST": ""}
    environment.pop("PYTHONUNBUFFERED", None)  # the tests cover the buffering of pipes
    started = forked.Popen(
        [sys.executable, "-c", PRELUDE + body],
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its children are killed with it
        **settings,
    )

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)

    # Kills a process that hangs, which also ends the reading.
    watchdog = threading.Timer(LONGEST_SECONDS, end)
    watchdog.start()
    try:
        yield Process(started)
    finally:
        watchdog.cancel()
        end()
        started.wait()
        assert started.stdout is not None
        started.stdout.close()


def wait_for(happened: Any) -> None:
    """Wait until `happened()` is true; fails after `LONGEST_SECONDS`."""
    pause = threading.Event()
    for _ in range(int(LONGEST_SECONDS / 0.01)):
        if happened():
            return
        pause.wait(0.01)
    raise AssertionError("the condition never became true")
