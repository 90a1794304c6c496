"""The process of a command: its signals, standard streams, children, masked output and exit.

Import it before anything else that registers functions with `atexit`: what registers first is called last, and the
last function here ends the process at once, because the machine may disappear within seconds. Python's own teardown
takes seconds to free TensorFlow's memory, and tenths of one for Prefect's modules; the kernel frees them anyway.
"""

import atexit
import errno
import io
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Final, TextIO, TypedDict, Unpack

from baton.tasks.foundation.contracts.log_entry import STOP_REASONS
from baton.tasks.foundation.errors import BatonError, InvalidInput, StoreUnreachable
from baton.tasks.foundation.machine.stops import Terminated, sighup_as_sigterm, terminal_closed
from baton.tasks.foundation.machine.threads import CLEAR_LINE, leaving_in_time, report_signal
from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.storage.local_files import temporary_folder
from baton.tasks.foundation.text import shown

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Time limit of the last transfers; enough for the last heartbeat.
_LAST_SECONDS = 10.0


@dataclass(slots=True)
class _ExitState:
    code: int | None = None


# One per process: `atexit` calls `_exit` without arguments.
_STATE = _ExitState()


def exits_with(code: int) -> int:
    """Make this process exit with `code`, and limit the time that the exit takes.

    Returns:
        `code`, for `sys.exit`.
    """
    from baton.tasks.foundation.machine.threads import limit_exit
    from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE

    _STATE.code = code
    exec("")  # noqa: S102 - Python forgets an interrupt within an earlier `exec`, and does not end as if by SIGINT
    # Prefect's threads may still log, to handlers that cannot start a thread now. Nobody can act on such a traceback.
    logging.raiseExceptions = False
    # Python waits for the threads of abandoned transfers, so the deadline limits how long those wait for the store.
    PROCESS_DEADLINE.start(_LAST_SECONDS)
    limit_exit(code)
    return code


def _exit() -> None:
    if _STATE.code is None or not {"tensorflow", "prefect"} & sys.modules.keys():
        return
    from baton.tasks.foundation.telemetry.ledger import write_last_heartbeat

    write_last_heartbeat()
    logging.shutdown()  # registered before this function, so `atexit` would call it too late
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed before the process started
            continue
        try:
            stream.flush()
        except (OSError, ValueError):  # a closed pipe
            continue
    os._exit(_STATE.code)


atexit.register(_exit)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise `Terminated` in the main thread on the first SIGTERM or SIGHUP, unless an inner handler replaces this one.

    Later signals are ignored, because the first one is still being handled. The process ends when the grace period is
    over, also if the exception does not get through.
    """
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        with sighup_as_sigterm(), leaving_in_time():
            yield
    except RuntimeError as fault:
        # If TensorFlow is about to raise an error, such as that another host is gone, it raises this one instead.
        if f"REPLACED BY {Terminated.__name__}" not in str(fault):
            raise
        raise Terminated from fault
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    report_signal(number)
    raise Terminated


def stop_signal_name() -> str:
    """Return the name of the signal that raised `Terminated`, for messages."""
    return "the closed terminal (SIGHUP)" if terminal_closed() else "SIGTERM"


def unreachable_store(fault: BaseException) -> StoreUnreachable | None:
    """Find a `StoreUnreachable` in the chain of exceptions that led to `fault`.

    Returns:
        The error, which means that the last work is not committed; None if the chain has none.
    """
    return next((each for each in _chain(fault) if isinstance(each, StoreUnreachable)), None)


def is_clean_stop(fault: BaseException) -> bool:
    """Whether a signal ended the work, and nothing failed before: what was trained is committed."""
    is_signal = not isinstance(fault, Exception | SystemExit)
    return is_signal and not any(isinstance(each, BatonError) for each in _chain(fault))


def stop_reason(fault: BaseException) -> str:
    """Return the exit reason of an interrupted command, from the earliest exception in the chain that has one."""
    reason = "sigint" if isinstance(fault, KeyboardInterrupt) else "sigterm"
    for cause in _chain(fault):
        found = getattr(cause, "reason", None)  # exceptions of other packages may have this attribute, too
        reason = found if found in STOP_REASONS else reason
    return reason


def _chain(fault: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = fault
    while cause is not None:
        yield cause
        cause = cause.__context__


# A pipe without a reader; a closed terminal.
_NO_READER: Final = frozenset({errno.EPIPE, errno.EIO})
_STANDARD: Final = (0, 1, 2)
HOME: Final = "HOME"
_TEMPORARY_HOME: Final = "baton-home-"


class _TolerantOutput(io.FileIO):
    """The file descriptor of a stream. When the reader closes its end, further output is dropped.

    The command continues: a closed terminal must not end a run, and `baton verify | head` must still exit with the code
    for damage.
    """

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as fault:
            if fault.errno not in _NO_READER:
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # libraries and child processes write to the descriptor too
            os.close(null)
            return memoryview(data).nbytes


class _Tail:
    """The last lines that Python code of this process wrote to its standard streams.

    Without locks, because a signal handler and a forked child write too; of lines that threads write at the same
    moment, one may be lost.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=2 * _LAST_LINES)  # a secret may have several lines
        self._unfinished = ""

    def add(self, text: str) -> None:
        """Take notice of what is written. A line that begins anew, as that of a progress bar, counts as it is last."""
        if "\n" not in text and "\r" not in text:  # `print` writes each of its arguments
            self._unfinished = f"{self._unfinished}{text}"[:_LINE_CHARACTERS]
            return
        *lines, unfinished = f"{self._unfinished}{text}".split("\n")
        self._lines.extend(map(self._begun_last, lines))
        self._unfinished = self._begun_last(unfinished)

    def lines(self) -> tuple[str, ...]:
        """The last lines, without secrets, colors and empty lines, each cut to a length for records."""
        text = masked(_TERMINAL_CODE.sub("", "\n".join([*list(self._lines), self._unfinished])))
        lines = (line.rstrip() for line in text.split("\n"))
        return tuple(shown(line, _SHOWN_CHARACTERS) for line in lines if line)[-_LAST_LINES:]

    @staticmethod
    def _begun_last(line: str) -> str:
        return line[line.rstrip("\r").rfind("\r") + 1 :][:_LINE_CHARACTERS]


_LAST_LINES, _LINE_CHARACTERS, _SHOWN_CHARACTERS = 50, 2000, 200
_TERMINAL_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[^\[])")
# One per process, as the streams are.
_TAIL = _Tail()


def last_lines() -> tuple[str, ...]:
    """The last lines of this process's standard streams, since `tolerate_closed_readers`; for its attempt's record."""
    return _TAIL.lines()


class _Stream(io.TextIOWrapper):
    """A standard stream whose last lines are kept.

    Attributes:
        beside_bar: whether another process draws a progress bar on the terminal: lines begin in place of it.
    """

    beside_bar = False
    _in_line = False

    def write(self, text: str, /) -> int:
        if self.beside_bar and text and not self._in_line:
            super().write(CLEAR_LINE)
        self._in_line = not text.endswith("\n") if text else self._in_line
        written = super().write(text)
        _TAIL.add(text)
        return written


@contextmanager
def tolerate_closed_readers(*, beside_bar: bool = False) -> Iterator[None]:
    """Make `sys.stdout` and `sys.stderr` drop output without a reader, and print `?` for unsupported characters.

    Their last lines are kept, see `last_lines`.

    Args:
        beside_bar: whether another process draws a progress bar, if they are a terminal.
    """
    _open_closed_descriptors()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_tolerant, before)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Stream):
            stream.beside_bar = beside_bar and stream.isatty()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a full disk, or a closed stream
                stream.flush()
        sys.stdout, sys.stderr = before


def provide_home_folder() -> None:
    """Give this process and its children a temporary home folder if they have none.

    Prefect and other libraries ask for a home folder when they are imported, and fail without one.

    Raises:
        InvalidInput: no temporary folder can be made.
    """
    with suppress(RuntimeError):
        Path.home()
        return
    kept = ExitStack()
    try:
        folder = kept.enter_context(temporary_folder(_TEMPORARY_HOME))
    except OSError as fault:
        raise InvalidInput(
            f"HOME is not set, user id {os.getuid()} has no home folder, and no temporary one can be made "
            f"({fault.strerror or fault}); set HOME to a writable folder"
        ) from fault
    os.environ[HOME] = str(folder)
    atexit.register(kept.close)  # after what is registered later: Prefect's server ends before


def has_temporary_home() -> bool:
    """Whether the home folder is one of `provide_home_folder`."""
    return Path(os.environ.get(HOME, "")).name.startswith(_TEMPORARY_HOME)


def _open_closed_descriptors() -> None:
    """Open the standard descriptors that are closed, so that no other file gets their numbers.

    What this process and its children write to them would go into that file, or fail.
    """
    for descriptor in _STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)


def _tolerant(stream: TextIO | None) -> TextIO:
    if stream is None:  # started without this stream
        return Path(os.devnull).open("w", encoding="utf-8")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal that cannot show "…" must not end a run
    if type(stream) is not io.TextIOWrapper:
        return stream  # the stream of a test or a notebook
    output = _TolerantOutput(stream.fileno(), "wb", closefd=False)
    return _Stream(
        output if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(output),  # python -u
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


_SCRIPT = Path(__file__).with_name("process_start.py")

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
    command: Sequence[str],
    *,
    at_parents_end: signal.Signals = signal.SIGKILL,
    blocked: Collection[signal.Signals] = (),
    **settings: Unpack[ChildSettings],
) -> "subprocess.Popen[bytes]":
    """Start a process as `subprocess.Popen` does. The kernel signals it when this process ends.

    Args:
        command: the program's absolute path, and its arguments.
        at_parents_end: the signal.
        blocked: signals that wait until the process unblocks them.
        settings: keyword arguments of `Popen`.

    Raises:
        OSError: the program cannot be started.
    """
    parent = (str(os.getpid()), str(int(at_parents_end)))
    wrapped = [sys.executable, "-I", "-S", os.fspath(_SCRIPT), *parent, *command]

    def start() -> "subprocess.Popen[bytes]":
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # what it starts inherits it
        try:
            return subprocess.Popen(wrapped, **settings)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

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


def start_module(
    module: str,
    words: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    at_parents_end: signal.Signals = signal.SIGKILL,
    blocked: Collection[signal.Signals] = (),
    **settings: Unpack[ChildSettings],
) -> "subprocess.Popen[bytes]":
    """Start `python -m MODULE WORDS...` of Baton as `start_child` does.

    Args:
        module: its full name.
        words: its arguments.
        environment: more environment variables.
        at_parents_end: as for `start_child`, and so is `blocked`.
        settings: keyword arguments of `Popen`.

    Raises:
        OSError: the process cannot be started.
    """
    settings["env"] = {**os.environ, **(environment or {})}
    # -P: a baton.py in the working folder must not hide Baton.
    command = [sys.executable, "-P", "-m", module, *words]
    return start_child(command, at_parents_end=at_parents_end, blocked=blocked, **settings)


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


class _MaskedRecord(logging.LogRecord):
    """A record of any logger; each handler formats what this class gives it."""

    def __setattr__(self, name: str, value: object) -> None:
        """Mask the traceback, which the first handler formats and keeps here."""
        super().__setattr__(name, masked(value) if name == "exc_text" and isinstance(value, str) else value)

    def getMessage(self) -> str:  # noqa: N802 - the name in `logging`
        """See `logging`."""
        return masked(super().getMessage())


_format_warning = warnings.formatwarning


def _masked_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return masked(_format_warning(message, category, filename, lineno, line))


def mask_library_output() -> None:
    """Mask secrets in log records and warnings from here on, in this process. Repeating it changes nothing."""
    logging.setLogRecordFactory(_MaskedRecord)
    warnings.formatwarning = _masked_warning


def keep_main_module_from_children() -> None:
    """Do not let child processes of the user's code import the main module of this process.

    A child with the start method *spawn* or *forkserver* imports the main module of its parent, since a function that
    it is sent may be from there. None of the user's is, and it takes seconds to import a command of Baton.
    `multiprocessing` leaves a main module alone if its name ends with `.__main__`.
    """
    sys.modules["__main__"].__spec__ = ModuleSpec("baton.__main__", loader=None)
