"""A process that has imported TensorFlow, Keras and Baton and used nothing of them: each of its forks runs one program.

Started by forked.py as `python fork_server.py FD`, with its end of a socket pair. A request is a message with the
program's words, folder and environment, and four descriptors: its three streams, and the socket on which the process's
id is told, and how it ended. The server ends when the other end of the pair is closed.
"""

from flows.process.leaving import leaves_with  # isort: skip - registers first what is to be called last

import atexit
import gc
import importlib
import json
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
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# What the processes of the tests import sooner or later, and none of which starts a thread when it is imported.
IMPORTED = (
    "flows.without_prefect",
    "tasks.prepare_data.stage",
    "tasks.init_or_restore.stage",
    "tasks.train_segment.stage",
    "tasks.checkpoint_to_gcs.stage",
    "tasks.evaluate.stage",
    "tensorflow",
    "keras",
    "h5py",
    "sklearn.datasets",
    # Not gcsfs and not Prefect, whose settings are read when they are imported, but what they import.
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
_STREAMS = 3
_set_by_imports: dict[str, str] = {}
_BY_CTRL_C = 256


def prepare() -> None:
    """Import, and see that a fork is safe: no thread but OpenBLAS's, which know of forks, and no device yet."""
    from tasks.foundation.accelerator.environment import quiet_tensorflow

    before = dict(os.environ)
    quiet_tensorflow()
    for name in IMPORTED:
        importlib.import_module(name)
    _set_by_imports.update((name, value) for name, value in os.environ.items() if before.get(name) != value)
    from tensorflow.python.eager import context

    if context.context()._context_handle is not None:
        raise RuntimeError("TensorFlow is in use already; its threads would be missing in a fork")
    gc.collect()
    gc.freeze()  # what is here stays, in every fork: collections need not look at it, nor copy its pages


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for every request; returns the request in the new process, and None in the server when it is over."""
    waiting: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that becomes readable when a process ends
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for ready, _event in poll.poll():
            if ready in waiting:
                poll.unregister(ready)
                _tell_the_end(ready, *waiting.pop(ready))
                continue
            message, descriptors, _flags, _address = socket.recv_fds(requests, 1 << 20, _STREAMS + 1)
            if not message:
                return None
            status = socket.socket(fileno=descriptors[_STREAMS])
            child = os.fork()
            if child == 0:
                requests.close()
                status.close()
                for handle, (_process, other) in waiting.items():
                    os.close(handle)
                    other.close()
                for number, descriptor in enumerate(descriptors[:_STREAMS]):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                return dict(json.loads(message))
            for descriptor in descriptors[:_STREAMS]:
                os.close(descriptor)
            status.send(str(child).encode())
            handle = os.pidfd_open(child)
            waiting[handle] = (child, status)
            poll.register(handle, select.POLLIN)


def _tell_the_end(handle: int, process: int, status: socket.socket) -> None:
    _process, how = os.waitpid(process, 0)
    os.close(handle)
    try:
        status.send(str(os.waitstatus_to_exitcode(how)).encode())
    except BrokenPipeError:  # who started it does not ask any more
        return
    finally:
        status.close()


def become(request: dict[str, Any]) -> None:
    """Make this fork what a fresh interpreter would be, as far as a program can see."""
    if request["session"]:
        os.setsid()
    if request["group"] is not None:
        os.setpgid(0, request["group"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["cwd"] is not None:
        os.chdir(request["cwd"])
    paths = _python_path()
    os.environ.clear()
    os.environ.update(_set_by_imports | request["environment"])
    sys.path[:] = [*_python_path(), *(path for path in sys.path[1:] if path not in paths)]
    tempfile.tempdir = None
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    warnings._processoptions(request["warnings"])  # type: ignore[attr-defined]
    sys.warnoptions[:] = request["warnings"]


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def run(request: dict[str, Any]) -> None:
    """What `python FILE`, `python -m MODULE` and `python -c CODE` do."""
    kind, what, words = request["kind"], request["what"], request["words"]
    program = types.ModuleType("__main__")
    program.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = program
    sys.argv = [{"module": "-m", "code": "-c"}.get(kind, what), *words]
    first = {"file": str(Path(what).resolve().parent), "module": str(Path.cwd()), "code": ""}[kind]
    if not request["safe_path"]:
        sys.path.insert(0, first)
    if kind == "module":
        sys.modules.pop(what, None)
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
        return
    if kind == "file":
        program.__file__ = what
    source = Path(what).read_bytes() if kind == "file" else what
    exec(compile(source, what if kind == "file" else "<string>", "exec"), program.__dict__)  # noqa: S102


def run_and_leave(request: dict[str, Any]) -> NoReturn:
    """Run it, and end as the interpreter does, without its teardown, which takes seconds."""
    code = 0
    try:
        run(request)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException as fault:  # noqa: BLE001 - as the interpreter itself
        sys.excepthook(type(fault), fault, fault.__traceback__)
        code = _BY_CTRL_C if isinstance(fault, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe
            stream.flush()
    if code == _BY_CTRL_C:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; the server ends with them
    prepare()
    with socket.socket(fileno=int(sys.argv[1])) as given:
        asked = serve(given)
    if asked is None:
        sys.exit(leaves_with(0))
    become(asked)
    run_and_leave(asked)
