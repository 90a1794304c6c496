"""Real processes that listen for signals, and waiting for what they say."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.support.checkout import CHECKOUT

PATIENCE_SECONDS = 300.0  # a bound for tests that would hang, never an expectation

PRELUDE = """
import hashlib, os, signal, sys, time
from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.stops.uninterrupted import run_uninterrupted

def say(*words):
    # In one piece: notes are printed by another thread.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

class Printing:
    def emit(self, event):
        say("note:", event.text)

def in_c_code(_stops):
    # Minutes in one call that lets other threads run, as TensorFlow's calls do.
    say("in C code")
    hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 2**31 - 1)

def until_asked(stops):
    say("waiting")
    while stops.asked is None:
        time.sleep(0.01)
"""


class Process:
    """A Python process with PRELUDE; its stdout is read by line."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.lines: list[str] = []

    def read_until(self, text: str) -> str:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"{text!r} never came; {self.lines}, {self.popen.wait()}")

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self) -> int:
        assert self.popen.stdout is not None
        self.lines += self.popen.stdout.readlines()
        return self.popen.wait()


@contextmanager
def process(body: str, **settings: Any) -> Iterator[Process]:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "GCE_METADATA_HOST": ""}
    environment.pop("PYTHONUNBUFFERED", None)  # a pipe's buffer is part of what is tested
    started = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + body],
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, to end with its children
        **settings,
    )

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)

    # Ends it if it hangs, so that reading from it ends too.
    watchdog = threading.Timer(PATIENCE_SECONDS, end)
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
    """Until `happened()` is true; fails after a generous time."""
    patience = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.01)):
        if happened():
            return
        patience.wait(0.01)
    raise AssertionError("it never happened")
