"""Moves bytes, and knows whether they arrived and how long to wait: checksums, parts, parallel requests, damage.

crc32c is the checksum that Cloud Storage reports for each object. A download computes it as bytes arrive; two reads
that differ from what was expected are damage in the store only if the store's own checksum agrees with them.

A process waits for a store without limit until it is asked to stop. A store that refuses is waited for only once a
command that trains has written: until then, its credentials are wrong and it ends at once; afterwards they were right,
and what has changed may change back.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import google_crc32c

from baton.tasks.foundation.errors import FileMissing, FileTooShort, StorageError
from baton.tasks.foundation.storage.interface import FileStat, Storage

# After the deadline, a request is cancelled once no bytes have moved for this long. A store that responds stays usable,
# and one that does not respond costs at most this time.
LAST_SECONDS = 2.0
_GRACE_SECONDS = 25.0  # until a run file says otherwise; as its default
BLOCK_BYTES = 1 << 20
_T = TypeVar("_T")
_R = TypeVar("_R")
REMEDY = "check the network, proxies and this machine's memory, and run again"


class Deadline:
    """A moment after which this process no longer waits. Safe to use from any thread.

    Attributes:
        grace_seconds: from a request to stop to the end of the machine, for the newest command that trains.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create it without a deadline.

        Args:
            clock: monotonic time in seconds.
        """
        self.grace_seconds = _GRACE_SECONDS
        self._clock = clock
        self._at = math.inf
        self._is_set = threading.Event()
        self._store_unreachable = False
        self._in_command = self._has_written = False

    @property
    def has_written(self) -> bool:
        """Whether a command that trains has written. From then on, a refusal is an outage and not refused input."""
        return self._has_written

    @property
    def is_set(self) -> bool:
        """Whether this process was asked to stop."""
        return self._at < math.inf

    @property
    def store_unreachable(self) -> bool:
        """Whether the store failed to respond after the deadline. No further request is sent then."""
        return self._store_unreachable

    def now(self) -> float:
        """Monotonic time in seconds."""
        return self._clock()

    def remaining(self) -> float:
        """Seconds until the deadline: 0 once it has passed, infinite if there is none."""
        return max(self._at - self._clock(), 0.0)

    def start(self, seconds: float) -> None:
        """Set the deadline to `seconds` from now, unless it is earlier already. Wakes up sleeping threads."""
        self._at = min(self._at, self._clock() + seconds)
        self._is_set.set()

    def clear(self) -> None:
        """Remove the deadline: this process begins another command."""
        self._at, self._store_unreachable, self._has_written = math.inf, False, False
        self.grace_seconds = _GRACE_SECONDS
        self._is_set.clear()

    def mark_written(self) -> None:
        """Record that something was written, if this is within `for_command`."""
        self._has_written = self._in_command

    def mark_store_unreachable(self) -> None:
        """Record that the store did not respond after the deadline."""
        self._store_unreachable = True

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the deadline if that is earlier."""
        until = self._clock() + seconds
        if not self._is_set.wait(seconds):
            return
        remaining = min(until, self._at) - self._clock()
        if remaining > 0:
            time.sleep(remaining)

    @contextmanager
    def for_command(self, grace_seconds: float) -> Iterator[None]:
        """Use around a command that trains: clears an earlier deadline, then does what `start_on_interrupt` does."""
        self.clear()
        self._in_command, self.grace_seconds = True, grace_seconds
        try:
            with self.start_on_interrupt(grace_seconds):
                yield
        finally:
            # The next command of a notebook begins with its own checks.
            self._in_command = self._has_written = False

    @contextmanager
    def start_on_interrupt(self, grace_seconds: float) -> Iterator[None]:
        """Start the deadline when the body is interrupted, so that its remaining threads stop waiting.

        An interrupt is a BaseException that is not an Exception: KeyboardInterrupt, or what a SIGTERM handler raises.

        Args:
            grace_seconds: counted from the interrupt.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self.start(grace_seconds)
            raise


# A module global on purpose: a signal stops the whole process, so all of its threads share one deadline.
PROCESS_DEADLINE = Deadline()


def checksum_bytes(data: bytes) -> FileStat:
    """Size and crc32c of bytes."""
    return FileStat(size=len(data), crc32c=f"{google_crc32c.value(data):08x}")


def as_array(buffer: memoryview) -> Any:
    """The bytes of a buffer without a copy, uint8 [size]; google_crc32c takes no memoryview."""
    import numpy as np  # an image that only commits has none

    return np.frombuffer(buffer, np.uint8)


def extend_crc32c(crc: int, buffer: memoryview) -> int:
    """The crc32c of bytes that are followed by `buffer`.

    Args:
        crc: of the bytes before; 0 if there are none.
        buffer: contiguous bytes.
    """
    if buffer.nbytes <= BLOCK_BYTES:
        # An image that only commits has no numpy, and writes small files only.
        return int(google_crc32c.extend(crc, bytes(buffer)))
    return int(google_crc32c.extend(crc, as_array(buffer)))


def masked_crc32c(data: bytes) -> int:
    """The masked crc32c of TFRecord files.

    See https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details.
    """
    return mask_crc32c(google_crc32c.value(data))


def mask_crc32c(crc: int) -> int:
    """Mask a crc32c as TensorFlow does in its files."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def checksum_file(path: Path) -> FileStat:
    """Size and crc32c of a local file, read in blocks."""
    with path.open("rb") as file:
        return copy_blocks(blocks_of(file, 0), None, None, source=path)


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


class _ByteCount:
    """A count that only grows. Threads may add at the same time; only whether it has grown matters.

    Attributes:
        bytes: so far.
    """

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, size: int) -> None:
        """Add `size` bytes."""
        self.bytes += size


# A module global on purpose: whatever a process waits for, it is alive while bytes arrive.
DOWNLOADED = _ByteCount()


def parallel_map(work: Callable[[_T], _R], items: Sequence[_T], *, workers: int) -> list[_R]:
    """Run `work` on each item in up to `workers` threads.

    After the first failure, it skips items not yet started, waits for running ones, and raises the first error in item
    order. If the caller itself is interrupted, it does not wait.

    Args:
        work: called once for each item.
        items: the inputs.
        workers: the maximum number of threads, at least 1.

    Returns:
        The results, in the order of the items.
    """
    if workers == 1 or len(items) < 2:  # noqa: PLR2004 - no need for threads
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


@contextmanager
def beside(work: Callable[[], _R]) -> Iterator[Future[_R]]:
    """Run `work` in another thread while the body runs.

    Yields:
        Its result, or its error, for after the body. If the body fails, nobody waits for it.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="baton-beside")
    try:
        yield pool.submit(work)
    finally:
        pool.shutdown(wait=False)


def difference(
    storage: Storage, path: str, expected: FileStat, read: Callable[[], FileStat], *, part_end: int | None = None
) -> str | None:
    """Read a file once, and say how it differs from what its manifest has.

    On a local disk the size is compared before anything is read, so a file that is too large costs nothing.

    Args:
        storage: the store.
        expected: of the bytes that `read` reads.
        read: returns size and checksum of what it read.
        part_end: the offset at which the bytes end, if they are only a part of the file; None: they are all of it.

    Returns:
        The difference; None if there is none.
    """
    where = f"{storage.uri}/{path}"
    try:
        size = _size_on_disk(storage, path)
        if size is not None and (size != expected.size if part_end is None else size < part_end):
            return f"{where} has {size} bytes, its manifest says {part_end or expected.size}"
        found = read()
    except FileMissing:
        return f"{where} is missing"
    except FileTooShort as fault:
        return str(fault)
    if found == expected:
        return None
    return (
        f"{where} has {found.size} bytes and crc32c {found.crc32c}, "
        f"its manifest says {expected.size} and {expected.crc32c}"
    )


def damage_of(
    storage: Storage, path: str, expected: FileStat, read: Callable[[], FileStat], *, part_end: int | None = None
) -> str | None:
    """Say how a file is damaged in the store: a read that differs is read again before it is believed.

    After two such reads the store's own size and checksum decide. It has none of a part of a file: valid bytes, and
    damaged ones too, arrive the same each time.

    Args:
        storage: see `difference`, also for the others.
        expected: of the bytes that `read` reads.
        read: called at most twice.
        part_end: the offset at which the bytes end.

    Returns:
        The damage; None if the bytes are good.

    Raises:
        StorageError: the bytes are damaged in transit, or the store refused or failed; the file may be intact.
    """
    first = difference(storage, path, expected, read, part_end=part_end)
    second = first and difference(storage, path, expected, read, part_end=part_end)
    if second is None:
        return None
    where = f"{storage.uri}/{path}"
    if part_end is not None:
        if first != second:
            raise StorageError(
                f"{where}: two reads returned different bytes, so the data is damaged in transit; {REMEDY}"
            )
        return second
    with suppress(FileMissing):  # which is damage
        if _size_on_disk(storage, path) in {None, expected.size} and storage.stat(path) == expected:
            raise StorageError(
                f"{where}: damaged in transit, in two reads; the store has the right bytes "
                f"(crc32c {expected.crc32c}), so the file is intact; {REMEDY}"
            )
    return second


def _size_on_disk(storage: Storage, path: str) -> int | None:
    """The bytes of a file on a local disk, without reading it; None in a remote store, which says them anyway."""
    local = storage.local_path(path)
    return None if local is None else local.stat().st_size
