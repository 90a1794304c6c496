"""`Popen` and `run` of `subprocess`, on fork servers: Python processes that need not import TensorFlow again.

A command of this interpreter becomes a fork of a process that has imported everything (fork_server.py). The fork has
its own id, streams, folder, environment and exit code. Other commands start as usual: other programs, and commands
whose environment differs in a variable that is read at import.

Two servers take turns. Values that depend on addresses or on an unseeded generator therefore differ between one process
and the next, as they do between fresh processes. All have the hash seed 0, which commands give themselves.
"""

import atexit
import inspect
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

_SERVER = Path(__file__).with_name("fork_server.py")
_FORKING_PYTHON = Path(__file__).with_name("forking_python.py")
_COUNT = 2
_FORKING = "BATON_TEST_FORKING_PYTHON"
# Variables that no preloaded module reads at import (Prefect, gcsfs, MLflow and W&B are not preloaded).
_READ_LATE = {
    "COLUMNS",
    "CUDA_VISIBLE_DEVICES",
    "CURL_CA_BUNDLE",
    "DOCKER_HOST",
    "GCE_METADATA_HOST",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT",
    "GCS_RETRY_CONFIG_MAX_RETRIES",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING",
    "NO_GCE_CHECK",
    "NO_PROXY",
    "PYTEST_CURRENT_TEST",
    "PYTHONPATH",
    "STORAGE_EMULATOR_HOST",
    "TF_CONFIG",
    "TMPDIR",
    "TPU_LOAD_LIBRARY",
    "TF_XLA_FLAGS",
    "WANDB_SERVICE",
    "XLA_FLAGS",
    "https_proxy",
    "no_proxy",
}
_READ_LATE_PREFIXES = ("BATON_", "PREFECT_", "_MLFLOW_")
_ENVIRONMENT = dict(os.environ)  # before any test changes it
# Variables that importing Baton, TensorFlow and Prefect sets, here and in the servers.
_SET_BY_IMPORTS = {
    "DO_NOT_TRACK": "1",
    "ENABLE_RUNTIME_UPTIME_TELEMETRY": "1",
    "KERAS_BACKEND": "tensorflow",
    "KMP_DUPLICATE_LIB_OK": "True",
    "KMP_INIT_AT_FORK": "FALSE",
    "TF2_BEHAVIOR": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_ML_PLATFORM": "Tensorflow",
    "TPU_ML_PLATFORM_VERSION": version("tensorflow-cpu"),
}
_HASHES = {"PYTHONHASHSEED": "0"}
_PARAMETERS = tuple(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]


class _Server:
    """A fork server, started when it is first needed."""

    def __init__(self, folder: Path, number: int) -> None:
        """Start it; its socket and its stand-in for the interpreter are in `folder`."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests = ours
        self._lock = threading.Lock()
        address = folder / f"{number}.sock"
        self.python = folder / f"python{number}"
        source = _FORKING_PYTHON.read_text(encoding="utf-8")
        source = source.replace("@INTERPRETER@", sys.executable).replace("@SERVER@", str(address))
        self.python.write_text(f"#!{sys.executable} -IS\n{source}", encoding="utf-8")
        self.python.chmod(0o700)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(_SERVER), str(its.fileno()), str(address)],
                pass_fds=(its.fileno(),),
                env=_ENVIRONMENT | _HASHES,
                # Pipes: a fork must not inherit streams that can seek.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )

    def fork(self, request: dict[str, Any], streams: tuple[int, int, int]) -> tuple[int, socket.socket]:
        """Start a process; returns its id and the socket that receives its exit code."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its, self._lock:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [*streams, its.fileno()])
        reply = ours.recv(64)
        if not reply:
            raise RuntimeError(f"the fork server has ended: {self.end().decode(errors='replace')[-3000:]}")
        return int(reply), ours

    def end(self) -> bytes:
        """End it; returns its output, which is empty unless it failed."""
        self._requests.close()
        return bytes(self._process.communicate()[0])


class _Servers:
    """The fork servers of this process."""

    def __init__(self) -> None:
        self._running: list[_Server] = []
        self._turns = itertools.count()
        self._lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def next(self) -> _Server:
        """The server whose turn it is; starts them at the first call."""
        with self._lock:
            if not self._running:
                self._folder = tempfile.TemporaryDirectory(prefix="baton-forks-")
                self._running = [_Server(Path(self._folder.name), number) for number in range(_COUNT)]
                atexit.register(self.end)
            return self._running[next(self._turns) % _COUNT]

    def end(self) -> None:
        """End the servers; the next call of `next` starts new ones."""
        with self._lock:
            while self._running:
                self._running.pop().end()
            if self._folder is not None:
                self._folder.cleanup()
                self._folder = None


_servers = _Servers()  # one set for each process, as the servers are its children


def end() -> None:
    """End the servers."""
    _servers.end()


def forking_python() -> dict[str, str]:
    """The environment that makes a Prefect worker's own processes forks too.

    It takes effect in processes that `Popen` forks. Their `sys.executable` is then `forking_python.py`.
    """
    return {_FORKING: str(_servers.next().python)}


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`; its process is a fork where possible."""

    _status: socket.socket | None = None  # receives the exit code

    def _execute_child(self, *given: Any) -> None:
        arguments = dict(zip(_PARAMETERS, given, strict=True))
        request = _request_of(arguments)
        if request is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        pipes = [arguments[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = tuple(number if pipe == -1 else pipe for number, pipe in enumerate(pipes))
        self.pid, self._status = _servers.next().fork(request, streams)  # type: ignore[arg-type]
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(arguments[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*given, **named)  # type: ignore[misc,no-any-return]
        return self._poll_status(0)

    def _wait(self, timeout: float | None) -> int:
        if self._status is None:
            return super()._wait(timeout=timeout)  # type: ignore[misc,no-any-return]
        if self._poll_status(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return int(self.returncode)

    def _poll_status(self, timeout: float | None) -> int | None:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and self._status is not None:
                poll = select.poll()
                poll.register(self._status, select.POLLIN)
                if poll.poll(None if timeout is None else timeout * 1000):
                    reply = self._status.recv(64)
                    self._status.close()
                    # No reply: the server itself was killed, and the exit code is unknown.
                    self.returncode = int(reply) if reply else 255
        return self.returncode


@contextmanager
def killed_at_end(process: "subprocess.Popen[Any]") -> Iterator["subprocess.Popen[Any]"]:
    """Kill a process at the end of the block, if it still runs, with what it started, and wait for its end."""
    try:
        yield process
    finally:
        kill_all(process)


def descendants(pid: int) -> list[int]:
    """Ids of all child processes, and of theirs."""
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def kill_all(process: "subprocess.Popen[Any]") -> None:
    """Kill a process and all that it started, as the loss of the machine does; and wait for its end."""
    family = descendants(process.pid)
    if process.poll() is None:
        process.kill()
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def run(
    command: list[str], *, capture_output: bool = False, timeout: float | None = None, check: bool = False, **named: Any
) -> "subprocess.CompletedProcess[Any]":
    """`subprocess.run` with `Popen` of this module."""
    if capture_output:
        named |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **named) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _request_of(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The request for a server; None for a command that needs a fresh process."""
    program = _program_of([os.fspath(word) for word in arguments["args"]])
    special = any(arguments[name] for name in ("preexec_fn", "pass_fds", "shell", "executable"))
    other_user = any(arguments[name] not in {None, -1} for name in ("gid", "gids", "uid")) or arguments["umask"] != -1
    environment = dict(os.environ if arguments["env"] is None else arguments["env"])
    if program is None or special or other_user or not hasattr(os, "pidfd_open") or read_early(environment):
        return None
    cwd = arguments["cwd"]
    group = arguments["process_group"]
    return program | {
        "executable": environment.pop(_FORKING, None),
        "environment": environment,
        "cwd": None if cwd is None else os.fspath(cwd),
        "session": bool(arguments["start_new_session"]),
        "group": None if group == -1 else group,
    }


def read_early(environment: dict[str, str]) -> set[str]:
    """Variables that differ from the server's and may be read at import."""
    servers, wanted = _SET_BY_IMPORTS | _ENVIRONMENT | _HASHES, _SET_BY_IMPORTS | _HASHES | environment
    changed = {name for name in servers.keys() | wanted.keys() if servers.get(name) != wanted.get(name)}
    return {name for name in changed - _READ_LATE if not name.startswith(_READ_LATE_PREFIXES)}


def _program_of(command: list[str]) -> dict[str, Any] | None:
    """The interpreter's options and its program; None for another program or an unknown option."""
    if command[0] != sys.executable:
        return None
    words, found = command[1:], {"warnings": [], "safe_path": False}
    while words:
        word, *rest = words
        match word:
            case "-W":
                found["warnings"], words = [*found["warnings"], rest[0]], rest[1:]
            case "-P":
                found["safe_path"], words = True, rest
            case "-m":
                return found | {"kind": "module", "what": rest[0], "words": rest[1:]}
            case "-c":
                return found | {"kind": "code", "what": rest[0], "words": rest[1:]}
            case _ if word.startswith("-"):
                return None
            case _:
                return found | {"kind": "file", "what": word, "words": rest}
    return None
