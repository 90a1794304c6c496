"""Splits a source by time: its last records are held out, in the order in which it gives them."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import IO

from tasks.foundation.errors import SourceError
from tasks.prepare_data.disk_space import disk_errors, scratch_file, scratch_folder

_MEMORY_BYTES = 64 << 20
_LENGTH_BYTES = 8
_AT_LEAST = 2


def last_of(length: int, *, fraction: float) -> int:
    """Return how many of `length` records are held out: the rounded fraction, at least 1, and not all of them."""
    return min(max(math.floor(length * fraction + 0.5), 1), length - 1)


def split_last(records: Iterable[bytes], *, fraction: float) -> Iterator[tuple[bool, bytes]]:
    """Yield (held out, record) for each record, in source order; the last ones are held out.

    The number of records need not be known: as many as would be held out if the source ended here wait in a queue.

    Args:
        records: in source order.
        fraction: fraction that is held out, above 0 and below 1.

    Raises:
        SourceError: there is a single record.
        StorageError: the temporary folder has too little space.
    """
    count = 0
    with ExitStack() as stack:
        waiting = _Queue(stack)
        for count, record in enumerate(records, start=1):
            waiting.append(record)
            while len(waiting) > last_of(count, fraction=fraction):
                yield False, waiting.popleft()
        if 0 < count < _AT_LEAST:
            raise SourceError(
                "data.split: last: the source has a single example, which cannot be split; set "
                "data.validation_fraction to 0, or add examples"
            )
        while len(waiting):
            yield True, waiting.popleft()


class _Queue:
    """Records, first in, first out: in memory up to a size, then in a temporary file."""

    def __init__(self, stack: ExitStack) -> None:
        """Create an empty queue; `stack` closes its file, if it needs one."""
        self._stack = stack
        self._recent: deque[bytes] = deque()
        self._memory_bytes = 0
        self._file: IO[bytes] | None = None
        self._in_file = self._begin = self._end = 0

    def __len__(self) -> int:
        return len(self._recent) + self._in_file

    def append(self, record: bytes) -> None:
        """Add a record. While the file has some, later ones go there too, because they come later."""
        if not self._in_file and self._memory_bytes + len(record) <= _MEMORY_BYTES:
            self._recent.append(record)
            self._memory_bytes += len(record)
            return
        if self._file is None:
            self._file = self._stack.enter_context(scratch_file())
        with disk_errors(scratch_folder()):
            self._file.seek(self._end)
            data = memoryview(len(record).to_bytes(_LENGTH_BYTES, "little") + record)
            while data:
                written = self._file.write(data)
                data, self._end = data[written:], self._end + written
        self._in_file += 1

    def popleft(self) -> bytes:
        """Take the first record."""
        if self._recent:
            record = self._recent.popleft()
            self._memory_bytes -= len(record)
            return record
        if self._file is None:
            raise IndexError("the queue is empty")
        with disk_errors(scratch_folder()):
            self._file.seek(self._begin)
            length = int.from_bytes(self._read(self._file, _LENGTH_BYTES), "little")
            record = self._read(self._file, length)
            self._begin += _LENGTH_BYTES + length
            self._in_file -= 1
            if not self._in_file:
                self._begin = self._end = 0
                self._file.truncate(0)
        return record

    @staticmethod
    def _read(file: IO[bytes], size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = file.read(size - len(parts))
            if not part:
                raise OSError(f"a temporary file ends {size - len(parts)} bytes early")
            parts += part
        return bytes(parts)
