"""Standard streams whose reader may disappear: `baton log RUN | head`, or a terminal that is closed during a run."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# A pipe without a reader; a closed terminal.
_NO_READER: Final = frozenset({errno.EPIPE, errno.EIO})


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
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_tolerant, before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a full disk, or a closed stream
                stream.flush()
        sys.stdout, sys.stderr = before


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
