"""Downloads to local files, in blocks or in parts side by side, and computes size and checksum meanwhile."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import google_crc32c

from tasks.foundation.errors import FileTooShort, StorageError
from tasks.foundation.storage.base import FileStat
from tasks.foundation.storage.checksum import BLOCK_BYTES
from tasks.foundation.storage.downloaded import DOWNLOADED


def copy_blocks(blocks: Iterable[bytes], file: IO[bytes] | None, size: int | None, *, source: object) -> FileStat:
    """Consume blocks until they end or `size` bytes have arrived, and write them to a file.

    Args:
        blocks: bytes as they arrive.
        file: an open file; None to compute size and checksum only.
        size: expected number of bytes; None for all.
        source: where the blocks come from, for messages.

    Returns:
        Size and crc32c of the bytes that arrived.

    Raises:
        FileTooShort: the blocks end before `size` bytes.
        StorageError: the file cannot be written.
    """
    done, crc = 0, 0
    for arrived in blocks:
        DOWNLOADED.add(len(arrived))
        block = arrived if size is None else arrived[: size - done]
        if file is not None:
            with _write_errors(file.name):
                file.write(block)
        crc = google_crc32c.extend(crc, block)
        done += len(block)
        if done == size:
            break
    if size is not None and done < size:
        raise _too_short(source, size - done)
    return FileStat(size=done, crc32c=f"{crc:08x}")


class Parts:
    """A file whose parts arrive in any order, from several threads."""

    def __init__(self, file: IO[bytes] | None) -> None:
        """Begin with no part.

        Args:
            file: an open file to write to; None to compute size and checksum only.
        """
        self._file = file
        self._lock = threading.Lock()
        self._crcs: dict[int, tuple[int, int]] = {}

    def take(self, offset: int, data: bytes) -> None:
        """Take the part that begins at an offset.

        Raises:
            StorageError: the file cannot be written.
        """
        DOWNLOADED.add(len(data))
        if self._file is not None:
            with self._lock, _write_errors(self._file.name):
                self._file.seek(offset)
                self._file.write(data)
        self._crcs[offset] = (google_crc32c.value(data), len(data))

    def stat(self, size: int | None, *, source: object) -> FileStat:
        """Size and crc32c of all parts together.

        Args:
            size: expected number of bytes; None for any.
            source: where the parts come from, for messages.

        Raises:
            FileTooShort: there are fewer bytes than that.
        """
        done, crc = 0, 0
        for offset in sorted(self._crcs):
            part_crc, part_size = self._crcs[offset]
            if offset != done:
                raise AssertionError(f"a part begins at {offset}, after {done} bytes")
            crc = joined_crc32c(crc, part_crc, part_size)
            done += part_size
        if size is not None and done < size:
            raise _too_short(source, size - done)
        return FileStat(size=done, crc32c=f"{crc:08x}")


def joined_crc32c(first: int, second: int, second_size: int) -> int:
    """The crc32c of two parts together, from the crc32c of each and the size of the second in bytes.

    A crc is linear: appending zeros to both a text and to nothing differs by the text's own contribution.
    """
    zeros = bytes(second_size)
    appended: int = google_crc32c.extend(first, zeros) ^ google_crc32c.extend(0, zeros) ^ second
    return appended


def blocks_of(file: IO[bytes], begin: int) -> Iterator[bytes]:
    """Blocks of a local file, from offset `begin` to its end."""
    file.seek(begin)
    while block := file.read(BLOCK_BYTES):
        yield block


def _too_short(source: object, missing: int) -> FileTooShort:
    return FileTooShort(f"{source} ends {missing} bytes too early; check whether it was truncated")


@contextmanager
def local_target(target: Path) -> Iterator[IO[bytes]]:
    """Open a local file to download to. Its errors name the local file, not the source.

    Raises:
        StorageError: it cannot be written.
    """
    with _write_errors(target):
        file = target.open("wb")
    try:
        yield file
    finally:
        with _write_errors(target):
            file.close()


@contextmanager
def _write_errors(target: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{target}: cannot write the downloaded file ({error.strerror or error}); free some space there, or set "
            "TMPDIR to another folder, and run again"
        ) from error
