"""Downloads to local files, block by block, and computes size and checksum meanwhile."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import google_crc32c

from tasks.foundation.errors import FileTooShort, StorageError
from tasks.foundation.storage.base import FileStat
from tasks.foundation.storage.checksum import BLOCK_BYTES


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
        block = arrived if size is None else arrived[: size - done]
        if file is not None:
            with _write_errors(file.name):
                file.write(block)
        crc = google_crc32c.extend(crc, block)
        done += len(block)
        if done == size:
            break
    if size is not None and done < size:
        raise FileTooShort(f"{source} ends {size - done} bytes too early; check whether it was truncated")
    return FileStat(size=done, crc32c=f"{crc:08x}")


def blocks_of(file: IO[bytes], begin: int) -> Iterator[bytes]:
    """Blocks of a local file, from offset `begin` to its end."""
    file.seek(begin)
    while block := file.read(BLOCK_BYTES):
        yield block


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
