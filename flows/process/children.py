"""Child processes that end with their parent, even if it is killed.

On Linux the kernel sends the child a death signal when the *thread* that started it ends. So a thread that lives as
long as the process starts the children. On other systems each child has a watcher process, which reads a pipe that
closes when the parent ends.
"""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TypedDict, Unpack

_SCRIPT = Path(__file__).with_name("die_with_parent.py")
_NO_PIPE = -1

_Start = Callable[[], None]
# One starter thread per process. The key is the process id, because a fork inherits the dict but not the thread.
_STARTERS: "dict[int, queue.SimpleQueue[_Start]]" = {}
_LOCK = threading.Lock()


class ChildSettings(TypedDict, total=False):
    """Settings of `subprocess.Popen` that a child process may have."""

    env: Mapping[str, str] | None
    process_group: int | None
    start_new_session: bool
    pass_fds: Sequence[int]
    stdin: int | IO[bytes] | None
    stdout: int | IO[bytes] | None
    stderr: int | IO[bytes] | None


def start_child(
    command: Sequence[str], *, death_signal: bool = sys.platform.startswith("linux"), **settings: Unpack[ChildSettings]
) -> "subprocess.Popen[bytes]":
    """Start a process as `subprocess.Popen` does. The kernel or a watcher kills it when this process ends.

    Args:
        command: the program's absolute path, and its arguments.
        death_signal: whether the kernel has death signals; otherwise a pipe and a watcher are used.
        settings: keyword arguments of `Popen`.

    Raises:
        OSError: the program cannot be started.
    """
    if not death_signal:
        return _with_pipe(command, settings)

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(_wrapped(command, _NO_PIPE), **settings)

    if threading.current_thread() is threading.main_thread():
        return start()
    started: Future[subprocess.Popen[bytes]] = Future()

    def start_and_report() -> None:
        try:
            started.set_result(start())
        except BaseException as fault:  # noqa: BLE001 - raised in the calling thread
            started.set_exception(fault)

    _starter_queue().put(start_and_report)
    return started.result()


def _with_pipe(command: Sequence[str], settings: ChildSettings) -> "subprocess.Popen[bytes]":
    reader, writer = os.pipe()
    try:
        settings["pass_fds"] = (reader, *settings.get("pass_fds", ()))
        process = subprocess.Popen(_wrapped(command, reader), **settings)
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    # The writing end stays open until this process ends. A process starts few children, so few descriptors are used.
    return process


def _wrapped(command: Sequence[str], descriptor: int) -> list[str]:
    return [sys.executable, "-I", "-S", os.fspath(_SCRIPT), str(os.getpid()), str(descriptor), *command]


def _starter_queue() -> "queue.SimpleQueue[_Start]":
    with _LOCK:
        found = _STARTERS.get(os.getpid())
        if found is None:
            found = _STARTERS[os.getpid()] = queue.SimpleQueue()
            # A daemon thread: Python joins other threads before Prefect sends its last requests.
            threading.Thread(target=_serve, args=(found,), name="baton-starter", daemon=True).start()
        return found


def _serve(requests: "queue.SimpleQueue[_Start]") -> None:
    while True:
        requests.get()()
