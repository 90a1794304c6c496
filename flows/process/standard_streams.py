"""What a command may be started without, or lose: a reader of its output, its standard streams, a home folder.

A reader disappears in `baton log RUN | head`, and when a terminal is closed during a run. A stream is closed in
`baton run >&-`, and a supervisor may give none. A container with an arbitrary user id has no HOME.
"""

import atexit
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from tasks.foundation.errors import InvalidInput
from tasks.foundation.storage.local_files import temporary_folder

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# A pipe without a reader; a closed terminal.
_NO_READER: Final = frozenset({errno.EPIPE, errno.EIO})
_STANDARD: Final = (0, 1, 2)
HOME: Final = "HOME"
_TEMPORARY_HOME: Final = "baton-home-"


class _Output(io.FileIO):
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


@contextmanager
def tolerate_closed_readers() -> Iterator[None]:
    """Make `sys.stdout` and `sys.stderr` drop output without a reader, and print `?` for unsupported characters."""
    _open_closed_descriptors()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_tolerant, before)
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
    output = _Output(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        output if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(output),  # python -u
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
