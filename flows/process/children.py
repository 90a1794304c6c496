"""Processes that end with the process that started them, whatever ends it: a SIGKILL leaves no orphans behind.

On Linux the kernel sends them a death signal. It does so when the *thread* ends that started them, so a thread that
lasts as long as the process starts them. Elsewhere they have a watcher, which reads a pipe that this process holds.
"""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("die_with_parent.py")
_NO_PIPE = -1

_Start = Callable[[], None]
_STARTERS: "dict[int, queue.SimpleQueue[_Start]]" = {}  # by process id: a fork has no threads
_LOCK = threading.Lock()


def start_child(
    command: Sequence[str], *, death_signal: bool = sys.platform.startswith("linux"), **settings: Any
) -> "subprocess.Popen[Any]":
    """As `subprocess.Popen`; the process is killed when this one ends.

    Args:
        command: the program's absolute path, and its arguments.
        death_signal: whether the kernel has one; else a pipe is used.
        settings: as for `Popen`.
    """
    if not death_signal:
        return _with_pipe(command, settings)

    def start() -> "subprocess.Popen[Any]":
        return subprocess.Popen(_wrapped(command, _NO_PIPE), **settings)

    if threading.current_thread() is threading.main_thread():
        return start()
    started: Future[subprocess.Popen[Any]] = Future()

    def answer() -> None:
        try:
            started.set_result(start())
        except BaseException as fault:  # noqa: BLE001 - raised where it was asked for
            started.set_exception(fault)

    _starter().put(answer)
    return started.result()


def _with_pipe(command: Sequence[str], settings: dict[str, Any]) -> "subprocess.Popen[Any]":
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(_wrapped(command, reader), pass_fds=(reader,), **settings)
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    # Never closed by this process: that it ends is what closes it. A process starts few children.
    return process


def _wrapped(command: Sequence[str], descriptor: int) -> list[str]:
    return [sys.executable, "-I", "-S", os.fspath(_SCRIPT), str(os.getpid()), str(descriptor), *command]


def _starter() -> "queue.SimpleQueue[_Start]":
    with _LOCK:
        found = _STARTERS.get(os.getpid())
        if found is None:
            found = _STARTERS[os.getpid()] = queue.SimpleQueue()
            # A daemon: other threads are joined before Prefect tells its server the last things.
            threading.Thread(target=_serve, args=(found,), name="baton-starter", daemon=True).start()
        return found


def _serve(asked: "queue.SimpleQueue[_Start]") -> None:
    while True:
        asked.get()()
