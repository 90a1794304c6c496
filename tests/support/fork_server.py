"""A process that has imported TensorFlow, Keras, Prefect and Baton without using them. Each fork runs one program.

forked.py starts it as `python fork_server.py FD PATH`. FD is one end of a socket pair, PATH is where the server listens
for `forking_python.py`. A request is a JSON message with the program's arguments, folder and environment, together with
file descriptors: the three standard streams and, on FD, a socket for the reply. The reply is the process id, then the
exit code. When the other end of the pair is closed, the server kills the forks that are left, and ends.
"""

from baton.flows.process import exits_with  # isort: skip - registers first what is to be called last

import atexit
import copy
import fcntl
import gc
import importlib
import json
import logging
import os
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


class KeptModules(MetaPathFinder):
    """Finds the kept modules of a package: the first import of the package brings back all of them."""

    def __init__(self, package: str, names: Iterable[str], *, reader: str, refresh: Callable[[], None]) -> None:
        """Import modules and keep them.

        Args:
            package: the package.
            names: modules of the package.
            reader: the module that reads the settings at import.
            refresh: reads them again; called when all modules are back. If it raises a ValueError, `reader` is imported
                as usual, which raises it too.
        """
        for name in names:
            importlib.import_module(name)
        self._kept = {name: module for name, module in sys.modules.items() if f"{name}.".startswith(f"{package}.")}
        self._reader, self._refresh = reader, refresh
        for name in self._kept:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def forget(self, name: str) -> None:
        """Let a module be imported as usual, because it is the program."""
        self._kept.pop(name, None)

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        module = self._kept.get(name)
        if module is None or module.__spec__ is None:
            return None
        sys.modules.update(self._kept)
        self._kept = {}
        try:
            self._refresh()
        except ValueError:
            del sys.modules[self._reader]
        spec = copy.copy(module.__spec__)
        spec.loader = _Imported(module)
        return spec


class _Imported(Loader):
    """Loads a module that is imported already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


# Modules that the tests' processes need. Importing them starts no thread.
PRELOADED = (
    "baton.flows.train",
    "baton.tasks.prepare_data.stage",
    "baton.tasks.init_or_restore.stage",
    "baton.tasks.train_segment.stage",
    "baton.tasks.checkpoint_to_gcs.stage",
    "baton.tasks.evaluate.stage",
    "tensorflow",
    "keras",
    "h5py",
    "sklearn.datasets",
    # Not gcsfs, which reads its settings at import, but what it imports.
    "aiohttp",
    "anyio",
    "cyclopts",
    "fsspec.asyn",
    "google.auth",
    "griffe",
    "h2.connection",
    "httpx",
    "jsonschema",
    "opentelemetry.trace",
    "pendulum",
    "pydantic_settings",
    "typer",
    "websockets",
    "tensorflow.python.data.util.convert",
)
# Prefect reads its settings at import, so a fork gets these when it imports one of them.
PREFECT = (
    "prefect.main",
    "prefect.cli",
    "prefect.server.api.server",
)
_STREAMS = 3
_MOST_PIPES = 8  # more than these that a process may get
_CTRL_C_EXIT = 256
_set_by_imports: dict[str, str] = {}


def preload() -> KeptModules:
    """Import the modules and check that a fork is safe: TensorFlow has no device and no thread yet.

    OpenBLAS has threads, and handles forks.
    """
    from baton.tasks.foundation.machine.environment import quiet_tensorflow

    gc.disable()  # the imports leave next to no garbage
    before = dict(os.environ)
    quiet_tensorflow()
    for name in PRELOADED:
        importlib.import_module(name)
    kept = _preload_prefect()
    _set_by_imports.update((name, value) for name, value in os.environ.items() if before.get(name) != value)
    from tensorflow.python.eager import context

    if context.context()._context_handle is not None:
        raise RuntimeError("TensorFlow is already in use; a fork would miss its threads")
    gc.collect()
    if threading.active_count() > 1:
        raise RuntimeError("an import has started a thread, which a fork would miss")
    gc.freeze()  # collections in a fork would copy the pages of every object
    gc.enable()
    return kept


def _preload_prefect() -> KeptModules:
    """Import Prefect with a home of its own, and undo what it does to the process."""
    handlers, level = logging.root.handlers[:], logging.root.level
    with tempfile.TemporaryDirectory() as home:
        os.environ["PREFECT_HOME"] = home
        try:
            kept = KeptModules("prefect", PREFECT, reader="prefect.context", refresh=_read_prefect_settings)
        finally:
            del os.environ["PREFECT_HOME"]
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    return kept


def _read_prefect_settings() -> None:
    """Do what importing Prefect does with the settings of a process."""
    from prefect.context import refresh_global_settings_context
    from prefect.logging import configuration

    refresh_global_settings_context()
    configuration.PROCESS_LOGGING_CONFIG.clear()
    configuration.setup_logging()


class ForkServer:
    """Forks for each request and reports how each process ends."""

    def __init__(self, requests: socket.socket, listener: socket.socket) -> None:
        """Serve requests from a socket pair and from clients that connect to `listener`."""
        self._requests = requests
        self._listener = listener
        self._clients: dict[int, socket.socket] = {}
        self._processes: dict[int, tuple[int, socket.socket]] = {}  # by pidfd, readable when the process ends
        self._poll = select.poll()
        for each in (requests, listener):
            self._poll.register(each, select.POLLIN)

    def serve(self) -> dict[str, Any] | None:
        """Serve until the requests' socket is closed.

        Returns:
            the request in each new process; None in the server.
        """
        while True:
            for ready, _event in self._poll.poll():
                if ready in self._processes:
                    self._report_exit(ready)
                elif ready == self._listener.fileno():
                    client, _address = self._listener.accept()
                    self._clients[client.fileno()] = client
                    self._poll.register(client, select.POLLIN)
                elif ready in self._clients:
                    request = self._serve_client(ready)
                    if request is not None:
                        return request
                else:
                    message, descriptors, _flags, _address = socket.recv_fds(self._requests, 1 << 20, _STREAMS + 1)
                    if not message:
                        self._kill_forks()
                        return None
                    request = self._fork(message, descriptors[:_STREAMS], socket.socket(fileno=descriptors[_STREAMS]))
                    if request is not None:
                        return request

    def _serve_client(self, ready: int) -> dict[str, Any] | None:
        """Fork for a client's request. If a client has ended, kill the process group of its fork."""
        client = self._clients[ready]
        message, descriptors, _flags, _address = socket.recv_fds(client, 1 << 20, _STREAMS + _MOST_PIPES)
        if message:
            return self._fork(message, descriptors, client)
        self._poll.unregister(client)
        del self._clients[ready]
        for process, status in self._processes.values():
            if status is client:
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
        return None

    def _fork(self, message: bytes, streams: list[int], status: socket.socket) -> dict[str, Any] | None:
        child = os.fork()
        if child == 0:
            for each in (self._requests, self._listener, status, *self._clients.values()):
                each.close()
            for handle, (_process, other) in self._processes.items():
                os.close(handle)
                other.close()
            request = dict(json.loads(message))
            targets = [*range(_STREAMS), *request.get("descriptors", ())]
            # Away from all targets first, one of which may be the number of another one.
            moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1 + max(targets)) for descriptor in streams]
            for descriptor in streams:
                os.close(descriptor)
            for number, descriptor in zip(targets, moved, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return request
        for descriptor in streams:
            os.close(descriptor)
        handle = os.pidfd_open(child)
        self._processes[handle] = (child, status)
        self._poll.register(handle, select.POLLIN)
        with suppress(BrokenPipeError):  # the client was killed; the next poll notices
            status.send(str(child).encode())
        return None

    def _kill_forks(self) -> None:
        """The tests have ended, perhaps by a kill: a fork that trains on would take a core from the next ones."""
        for process, _status in self._processes.values():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _report_exit(self, handle: int) -> None:
        process, status = self._processes.pop(handle)
        self._poll.unregister(handle)
        os.close(handle)
        _process, exit_status = os.waitpid(process, 0)
        if self._clients.pop(status.fileno(), None):
            self._poll.unregister(status)
        with status, suppress(BrokenPipeError):  # its parent is gone
            status.send(str(os.waitstatus_to_exitcode(exit_status)).encode())


def become(request: dict[str, Any]) -> None:
    """Make this fork look like a fresh interpreter to the program that it runs."""
    if request["session"]:
        os.setsid()
    if request["group"] is not None:
        os.setpgid(0, request["group"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["cwd"] is not None:
        os.chdir(request["cwd"])
    paths = _python_path()
    hashes = {"PYTHONHASHSEED": os.environ["PYTHONHASHSEED"]}
    os.environ.clear()
    os.environ.update(_set_by_imports | hashes | request["environment"])
    sys.path[:] = [*_python_path(), *(path for path in sys.path[1:] if path not in paths)]
    sys.executable = request["executable"] or sys.executable
    tempfile.tempdir = None
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    warnings._processoptions(request["warnings"])  # type: ignore[attr-defined]
    sys.warnoptions[:] = request["warnings"]


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def run(request: dict[str, Any], kept: KeptModules) -> None:
    """Run the program as `python FILE`, `python -m MODULE` or `python -c CODE` does."""
    kind, what, words = request["kind"], request["what"], request["words"]
    program = types.ModuleType("__main__")
    program.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = program
    option = {"module": "-m", "code": "-c"}.get(kind)
    sys.argv = [option or what, *words]
    safe_path = ["-P"] if request["safe_path"] else []
    sys.orig_argv = [sys.executable, *safe_path, *([option] if option else []), what, *words]
    first = {"file": str(Path(what).resolve().parent), "module": str(Path.cwd()), "code": ""}[kind]
    if not request["safe_path"]:
        sys.path.insert(0, first)
    if kind == "module":
        sys.modules.pop(what, None)
        kept.forget(what)
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
        return
    if kind == "file":
        program.__file__ = what
    source = Path(what).read_bytes() if kind == "file" else what
    exec(compile(source, what if kind == "file" else "<string>", "exec"), program.__dict__)  # noqa: S102


def run_and_exit(request: dict[str, Any], kept: KeptModules) -> NoReturn:
    """Run the program and exit as the interpreter does, without its teardown, which takes seconds."""
    code = 0
    try:
        run(request, kept)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException as fault:  # noqa: BLE001 - as the interpreter itself
        sys.excepthook(type(fault), fault, fault.__traceback__)
        code = _CTRL_C_EXIT if isinstance(fault, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe
            stream.flush()
    if code == _CTRL_C_EXIT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def main(descriptor: int, path: str) -> None:
    """Serve until the tests end; in a fork, run the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; the server ends with them
    with socket.socket(fileno=descriptor) as requests, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # Clients may connect while the server still imports.
        listener.bind(path)
        listener.listen(64)
        kept = preload()
        request = ForkServer(requests, listener).serve()
    if request is None:
        sys.exit(exits_with(0))
    become(request)
    run_and_exit(request, kept)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
