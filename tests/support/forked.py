"""Processes of the tests' own that need not import TensorFlow again: `subprocess`'s face, on fork servers.

`Popen` and `run` take what those of `subprocess` take. A command of this interpreter becomes a fork of a process that
has imported everything (fork_server.py): with an id, streams, folder and environment of its own, and its own end.
Anything else starts as ever: other programs, and commands whose environment differs in what is read at import.

There are two servers, which take turns: what depends on the hash seed, on addresses or on a generator that nobody seeds
differs between one process and the next, as it does between fresh ones.
"""

import atexit
import inspect
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

_SERVER = Path(__file__).with_name("fork_server.py")
_SERVERS = 2
# Not read when the server imports what it imports (not Prefect, nor gcsfs), so these may differ from the server's.
_READ_LATE = {
    "COLUMNS",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT",
    "NO_GCE_CHECK",
    "NO_PROXY",
    "PYTEST_CURRENT_TEST",
    "PYTHONPATH",
    "STORAGE_EMULATOR_HOST",
    "TF_CONFIG",
    "TMPDIR",
    "XLA_FLAGS",
    "no_proxy",
}
_READ_LATE_BEGINNINGS = ("BATON_", "PREFECT_")
_ENVIRONMENT = dict(os.environ)  # as it is before any test changes it
# What importing Baton, TensorFlow and Prefect sets, here and in the servers.
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
_PARAMETERS = tuple(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]


class _Server:
    """One fork server, started when it is first needed."""

    def __init__(self) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests = ours
        self._lock = threading.Lock()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(_SERVER), str(its.fileno())],
                pass_fds=(its.fileno(),),
                env=_ENVIRONMENT,
                # Pipes, so that no fork takes its streams for files in which one can seek.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )

    def fork(self, request: dict[str, Any], streams: tuple[int, int, int]) -> tuple[int, socket.socket]:
        """A new process; its id, and the socket that tells how it ends."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its, self._lock:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [*streams, its.fileno()])
        told = ours.recv(64)
        if not told:
            raise RuntimeError(f"the fork server has ended: {self.end().decode(errors='replace')[-3000:]}")
        return int(told), ours

    def end(self) -> bytes:
        """What it said; nothing, where all went well."""
        self._requests.close()
        return bytes(self._process.communicate()[0])


_servers: list[_Server] = []
_turns = itertools.count()
_starting = threading.Lock()


def _next_server() -> _Server:
    with _starting:
        if not _servers:
            _servers.extend(_Server() for _ in range(_SERVERS))
            atexit.register(end)
        return _servers[next(_turns) % _SERVERS]


def end() -> None:
    """End the servers; the next process starts new ones."""
    with _starting:
        while _servers:
            _servers.pop().end()


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, whose process is a fork of a server's where that can be."""

    _end: socket.socket | None = None

    def _execute_child(self, *given: Any) -> None:
        told = dict(zip(_PARAMETERS, given, strict=True))
        request = _request_of(told)
        if request is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        pipes = [told[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = tuple(number if pipe == -1 else pipe for number, pipe in enumerate(pipes))
        self.pid, self._end = _next_server().fork(request, streams)  # type: ignore[arg-type]
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(told[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._end is None:
            return super()._internal_poll(*given, **named)  # type: ignore[misc,no-any-return]
        return self._ended(0)

    def _wait(self, timeout: float | None) -> int:
        if self._end is None:
            return super()._wait(timeout=timeout)  # type: ignore[misc,no-any-return]
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return int(self.returncode)

    def _ended(self, timeout: float | None) -> int | None:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and self._end is not None:
                poll = select.poll()
                poll.register(self._end, select.POLLIN)
                if poll.poll(None if timeout is None else timeout * 1000):
                    told = self._end.recv(64)
                    self._end.close()
                    # No word: the server itself was killed, and nobody knows.
                    self.returncode = int(told) if told else 255
        return self.returncode


def run(
    command: list[str], *, capture_output: bool = False, timeout: float | None = None, check: bool = False, **named: Any
) -> "subprocess.CompletedProcess[Any]":
    """`subprocess.run`, by `Popen`."""
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


def _request_of(told: dict[str, Any]) -> dict[str, Any] | None:
    """What to ask a server for; None for what only a fresh process can be."""
    program = _program_of([os.fspath(word) for word in told["args"]])
    plain = not (told["preexec_fn"] or told["pass_fds"] or told["shell"] or told["executable"])
    own_rights = any(told[name] not in {None, -1} for name in ("gid", "gids", "uid")) or told["umask"] != -1
    environment = dict(os.environ if told["env"] is None else told["env"])
    if program is None or not plain or own_rights or not hasattr(os, "pidfd_open") or _read_early(environment):
        return None
    cwd = told["cwd"]
    group = told["process_group"]
    return program | {
        "environment": environment,
        "cwd": None if cwd is None else os.fspath(cwd),
        "session": bool(told["start_new_session"]),
        "group": None if group == -1 else group,
    }


def _read_early(environment: dict[str, str]) -> set[str]:
    """Variables that differ from the server's and may be read when something is imported."""
    servers, asked = _SET_BY_IMPORTS | _ENVIRONMENT, _SET_BY_IMPORTS | environment
    changed = {name for name in servers.keys() | asked.keys() if servers.get(name) != asked.get(name)}
    return {name for name in changed - _READ_LATE if not name.startswith(_READ_LATE_BEGINNINGS)}


def _program_of(command: list[str]) -> dict[str, Any] | None:
    """The interpreter's options, and what it is to run; None if this is not this interpreter, or not known here."""
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
