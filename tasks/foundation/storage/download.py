"""From a store to files of this machine: block by block, counted and checksummed on the way; and side by side."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

import google_crc32c

from tasks.foundation.errors import FileTooShort, StorageError
from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.checksum import BLOCK_BYTES

_T = TypeVar("_T")
_R = TypeVar("_R")


def copy_blocks(blocks: Iterable[bytes], file: IO[bytes] | None, size: int | None, *, where: object) -> Stored:
    """Count blocks, and write them to a file, until they end or `size` bytes have come.

    Args:
        blocks: bytes as they arrive.
        file: an open file; None if they are only to be counted.
        size: how many bytes are wanted; None for all.
        where: the source, for the message.

    Returns:
        Size and crc32c of what came.

    Raises:
        FileTooShort: the blocks end too early.
    """
    done, crc = 0, 0
    for arrived in blocks:
        block = arrived if size is None else arrived[: size - done]
        if file is not None:
            with _errors_of(file.name):
                file.write(block)
        crc = google_crc32c.extend(crc, block)
        done += len(block)
        if done == size:
            break
    if size is not None and done < size:
        raise FileTooShort(f"{where} ends {size - done} bytes too early; see whether it was cut off")
    return Stored(size=done, crc32c=f"{crc:08x}")


def blocks_of(file: IO[bytes], begin: int) -> Iterator[bytes]:
    """A local file's bytes from `begin` on."""
    file.seek(begin)
    while block := file.read(BLOCK_BYTES):
        yield block


@contextmanager
def local_target(target: Path) -> Iterator[IO[bytes]]:
    """A local file to download to; what its disk says names the file here, not the one in the store.

    Raises:
        StorageError: it cannot be written.
    """
    with _errors_of(target):
        file = target.open("wb")
    try:
        yield file
    finally:
        with _errors_of(target):
            file.close()


@contextmanager
def _errors_of(target: object) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise StorageError(
            f"{target}: what was downloaded could not be written ({fault.strerror or fault}); free some space there, "
            "or name another folder with TMPDIR, and run again"
        ) from fault


def side_by_side(work: Callable[[_T], _R], items: Sequence[_T], *, workers: int) -> list[_R]:
    """`work` on each item, so many at a time; the results in order.

    Once one has failed, what had not begun is left, what had begun is waited for, and the first error in order is
    raised. Nothing is waited for where the caller itself is interrupted.
    """
    if workers == 1 or len(items) < 2:  # noqa: PLR2004 - nothing to be beside of
        return [work(item) for item in items]
    pool = ThreadPoolExecutor(min(workers, len(items)), thread_name_prefix="baton-transfer")
    interrupted = True
    try:
        futures = [pool.submit(work, item) for item in items]
        wait(futures, return_when=FIRST_EXCEPTION)
        interrupted = False
    finally:
        pool.shutdown(wait=not interrupted, cancel_futures=True)
    failed = [future for future in futures if not future.cancelled() and future.exception() is not None]
    return [future.result() for future in failed or futures]
