"""Writes large files from memory past the page cache, and reads them back from the disk to compare every byte.

A checkpoint is larger than anything else that is written, and nobody reads it soon. Through the page cache it would be
copied once more, and push out the training data. Where a file system refuses direct access, the same calls go through
the page cache.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import google_crc32c

from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import FileStat
from tasks.foundation.storage.checksum import as_array

# Direct access wants addresses, offsets and sizes to be multiples of the disk's block size; no disk has larger ones.
ALIGNMENT = 4096
_READ_BYTES = 4 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def write_buffers_durably(file: Path, buffers: Sequence[memoryview]) -> None:
    """Replace the content of a file with that of `buffers`, and sync it.

    Args:
        file: exists.
        buffers: contiguous bytes. They are written without a copy if the first begins at a multiple of `ALIGNMENT` in
            memory, and so does each after it in memory and in the file.
    """
    direct = all(_address(buffer) % ALIGNMENT == 0 for buffer in buffers if buffer.nbytes) and all(
        buffer.nbytes % ALIGNMENT == 0 for buffer in buffers[:-1]
    )
    with _opened(file, os.O_WRONLY | os.O_TRUNC, direct=direct) as handle:
        offset = 0
        for buffer in buffers:
            offset = _write(handle, buffer, offset)
        os.fsync(handle)


def compare_with_buffers(file: Path, buffers: Sequence[memoryview]) -> FileStat:
    """Read a file from the disk and compare it with what was written.

    Returns:
        Its size and crc32c.

    Raises:
        StorageError: the disk holds other bytes.
    """
    crc, offset = 0, 0
    block = mmap.mmap(-1, _READ_BYTES)
    with _opened(file, os.O_RDONLY, direct=True) as handle:
        found = os.fstat(handle).st_size
        for buffer in buffers:
            for begin in range(0, buffer.nbytes, _READ_BYTES):
                expected = as_array(buffer[begin : begin + _READ_BYTES])
                size = _read(handle, memoryview(block), expected.nbytes, offset)
                if size != expected.nbytes or not (as_array(memoryview(block)[:size]) == expected).all():
                    raise _other_bytes(file, offset)
                crc = google_crc32c.extend(crc, expected)
                offset += size
    if found != offset:
        raise _other_bytes(file, min(found, offset))
    return FileStat(size=offset, crc32c=f"{crc:08x}")


def blocks_from_disk(file: Path) -> Iterator[memoryview]:
    """Yield the bytes of a file, read past the page cache. A block is valid until the next one.

    Raises:
        OSError: it does not exist, or the disk failed.
    """
    block, offset = memoryview(mmap.mmap(-1, _READ_BYTES)), 0
    with _opened(file, os.O_RDONLY, direct=True) as handle:
        while size := _read(handle, block, _READ_BYTES, offset):
            yield block[:size]
            offset += size


def _other_bytes(file: Path, offset: int) -> StorageError:
    return StorageError(
        f"{file}: the disk returned other bytes than were written, after byte {offset}; check the disk and this "
        "machine's memory, and run again"
    )


def _address(buffer: memoryview) -> int:
    address: int = as_array(buffer).ctypes.data
    return address


def _write(handle: int, buffer: memoryview, offset: int) -> int:
    """Write a buffer at an offset. Returns the offset after it."""
    end = offset + buffer.nbytes
    while offset < end:
        rest = buffer[buffer.nbytes - (end - offset) :]
        whole = len(rest) // ALIGNMENT * ALIGNMENT
        if not whole or offset % ALIGNMENT:
            _use_page_cache(handle)
            whole = len(rest)
        try:
            offset += os.pwrite(handle, rest[:whole], offset)
        except OSError as refused:
            if refused.errno not in _REFUSED or not _use_page_cache(handle):
                raise
    return end


def _read(handle: int, block: memoryview, size: int, offset: int) -> int:
    """Read up to `size` bytes at an offset into a block. Returns the number of bytes, smaller at the file's end."""
    done = 0
    while done < size:
        if done % ALIGNMENT or offset % ALIGNMENT:
            _use_page_cache(handle)
        try:
            count = os.preadv(handle, [block[done : done + -(-(size - done) // ALIGNMENT) * ALIGNMENT]], offset + done)
        except OSError as refused:
            if refused.errno not in _REFUSED or not _use_page_cache(handle):
                raise
            continue
        if not count:
            break
        done += count
    return min(done, size)


@contextmanager
def _opened(file: Path, flags: int, *, direct: bool) -> Iterator[int]:
    handle = -1
    if direct and _DIRECT:
        with suppress(OSError):  # some file systems refuse it; any other error comes again
            handle = os.open(file, flags | _DIRECT)
    if handle < 0:
        handle = os.open(file, flags)
    try:
        yield handle
    finally:
        os.close(handle)


def _use_page_cache(handle: int) -> bool:
    """Go on through the page cache. False if the handle already did."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    if not flags & _DIRECT:
        return False
    fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~_DIRECT)
    return True
