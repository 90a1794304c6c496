"""Standard streams whose reader may go away: `baton log RUN | head`, or a terminal that is closed during a run."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

# A pipe without a reader; a terminal that is gone.
_NOBODY_READS: Final = frozenset({errno.EPIPE, errno.EIO})


class _Output(io.FileIO):
    """The file descriptor of a stream. Once nobody reads it, everything written to it is dropped.

    The command then goes on: a run must not end because its output is not read any more, and `baton verify | head`
    still ends with the exit code for damage.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as fault:
            if fault.errno not in _NOBODY_READS:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for what libraries and child processes write, too
            os.close(nowhere)
            return memoryview(data).nbytes


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Within, `sys.stdout` and `sys.stderr` drop what nobody reads, and print what their encoding lacks as `?`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_outliving, before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a full disk, or closed by somebody else
                stream.flush()
        sys.stdout, sys.stderr = before


def _outliving(stream: TextIO | None) -> TextIO:
    if stream is None:  # started without this stream
        return Path(os.devnull).open("w", encoding="utf-8")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal without "…" must not end a run
    if type(stream) is not io.TextIOWrapper:
        return stream  # a test's, or a notebook's
    output = _Output(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        output if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(output),  # as with python -u
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
