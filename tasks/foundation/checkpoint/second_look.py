"""Reads retained checkpoints again while the training goes on, so that damage is found while an older one is there.

One thread reads one checkpoint after the other, the newest first, each once per process. It has the lowest priority,
and waits while a checkpoint is being saved. The next commit says what was read (`runlog/whole_reads.py`).

On Cloud Storage a checkpoint takes one request for the head of the log, one for its manifest, and one for every 4 MiB:
about 240 for 1 GB, which cost 0.0001 USD (0.0004 USD for 1,000 reads). Within a region, bytes cost nothing.
"""

import contextvars
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from tasks.foundation.checkpoint.verify import find_damage, read_manifest
from tasks.foundation.contracts.checkpoint import CheckpointRef, FileRecord
from tasks.foundation.contracts.log_entry import Body, Head, Retire
from tasks.foundation.errors import BatonError, DamagedCheckpoint, FileMissing
from tasks.foundation.runlog.commits import quarantine_older
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local_files import blocks_from_disk
from tasks.foundation.storage.transfers import BLOCK_BYTES, extend_crc32c
from tasks.foundation.telemetry.events import Committed, Event, Note, Sink, Training

_REQUEST_BYTES: Final = 4 << 20
_BYTES_PER_SECOND: Final = 32 << 20
_POLL_SECONDS: Final = 0.2
_LOWEST_PRIORITY: Final = 19


class SecondLook:
    """A `Sink` that begins to read when the training has begun, and looks for more after each commit.

    Use it as a context manager around the training. At its end it waits for nothing.
    """

    def __init__(
        self,
        log: RunLog,
        *,
        telemetry: Sink,
        paused: Callable[[], bool] = lambda: False,
        own_entries: bool = False,
        bytes_per_second: float = _BYTES_PER_SECOND,
    ) -> None:
        """Read nothing yet.

        Args:
            log: the run's.
            telemetry: receives warnings about damage.
            paused: whether something more urgent needs the disk or the network.
            own_entries: whether to say in entries of its own what was read, because no entry of this process would.
            bytes_per_second: the highest rate.
        """
        self._log = log
        self._telemetry = telemetry
        self._paused = paused
        self._own_entries = own_entries
        self._bytes_per_second = bytes_per_second
        self._attempt = uuid.uuid4().hex
        self._has_begun = False
        self._woken, self._ended = threading.Event(), threading.Event()
        self._damaged: set[str] = set()
        self._unreadable: set[str] = set()
        # Sinks may read context variables (Prefect's logger does), and a new thread has none.
        self._context = contextvars.copy_context()

    def __enter__(self) -> Self:
        threading.Thread(target=lambda: self._context.run(self._serve), name="baton-second-look", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, where: TracebackType | None
    ) -> None:
        # A request that is under way is not waited for; its thread ends with it, and appends nothing.
        self._ended.set()
        self._woken.set()

    def emit(self, event: Event) -> None:
        """Take notice of one event."""
        if isinstance(event, Committed) or (isinstance(event, Training) and not self._has_begun):
            self._has_begun = True
            self._woken.set()

    def look(self) -> bool:
        """Read the newest retained checkpoint that this process has not read, and that the log does not say was read.

        Returns:
            Whether there was one.
        """
        ref: CheckpointRef | None = None
        try:
            head = self._log.head()
            ref = None if head is None else self._next(head)
            if ref is not None:
                self._look_at(ref)
        except _Ended:
            return False
        except BatonError as fault:
            if self._ended.is_set():
                return False
            # It says nothing about the bytes. Tried again after the next commit.
            if ref is not None:
                self._unreadable.add(ref.path)
            what = self._log.home.uri if ref is None else f"checkpoint {ref.path}"
            self._telemetry.emit(Note(text=f"{what} could not be read a second time: {fault}", warning=True))
        return ref is not None

    def _serve(self) -> None:
        with suppress(OSError):  # a system may refuse, and then reading takes its share of the processor
            # On Linux this is the priority of the thread alone, and the disk's queue goes by it too.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while not self._ended.is_set():
            self._woken.wait()
            self._woken.clear()
            self._unreadable.clear()
            while not self._ended.is_set() and self.look():
                pass

    def _next(self, head: Head) -> CheckpointRef | None:
        known = {read.path for read in head.read_whole} | self._unreadable
        for ref in reversed(head.retained):
            if ref.path in known or ref.path in self._log.whole_reads:
                continue
            if ref == head.tip and ref.path in self._damaged:
                continue
            return ref
        return None

    def _look_at(self, ref: CheckpointRef) -> None:
        self._wait(0)
        # Nothing is called damaged by one read alone.
        reason = None if self._reads_as_written(ref) else find_damage(self._log.home, ref, read_bytes=True)
        if self._ended.is_set():
            raise _Ended
        if reason is not None:
            self._take_out_of_use(ref, reason)
            return
        self._log.whole_reads.add(ref)
        if self._own_entries:
            self._append_reads()

    def _take_out_of_use(self, ref: CheckpointRef, reason: str) -> None:
        """Quarantine a damaged checkpoint, unless it is the tip, from whose state in memory the training goes on.

        Without its tip the training could not commit. The next commit makes another tip; if there is none, the next
        start quarantines this one.
        """
        head = self._log.require_head()
        self._damaged.add(ref.path)
        if ref == head.tip:
            text = (
                f"checkpoint {ref.path}, the newest, is damaged: {reason}. The training goes on from memory, and the "
                "next commit replaces it"
            )
        elif quarantine_older(self._log, ref, reason, attempt=self._attempt):
            text = f"checkpoint {ref.path} is damaged and quarantined: {reason}"
        else:
            return  # retired, and its files are being deleted
        self._telemetry.emit(Note(text=text, warning=True))

    def _append_reads(self) -> None:
        def decide(head: Head | None) -> Body | None:
            reads = () if head is None else self._log.whole_reads.due(head)
            return Retire(paths=(), deleted=(), read_whole=reads) if reads else None

        entry = self._log.append(decide, attempt=self._attempt)
        if entry is not None and isinstance(entry.body, Retire):
            self._log.whole_reads.logged(entry.body.read_whole)

    def _reads_as_written(self, ref: CheckpointRef) -> bool:
        try:
            manifest = read_manifest(self._log.home, ref)
            return all(self._file_reads_as_written(ref, file) for file in manifest.files)
        except (DamagedCheckpoint, FileMissing, OSError):
            return False

    def _file_reads_as_written(self, ref: CheckpointRef, file: FileRecord) -> bool:
        size, crc = 0, 0
        for block in _blocks(self._log.home, f"{ref.path}/{file.name}", file.size):
            size += block.nbytes
            for begin in range(0, block.nbytes, BLOCK_BYTES):
                crc = extend_crc32c(crc, block[begin : begin + BLOCK_BYTES])
            self._wait(block.nbytes / self._bytes_per_second)
        return (size, f"{crc:08x}") == (file.size, file.crc32c)

    def _wait(self, seconds: float) -> None:
        """Wait, and as long as something is more urgent.

        Raises:
            _Ended: the training has ended, or was asked to.
        """
        while not self._ended.wait(seconds):
            if not self._paused():
                return
            seconds = _POLL_SECONDS
        raise _Ended


class _Ended(Exception):
    """Nothing more is to be read."""


def _blocks(home: Storage, path: str, size: int) -> Iterator[memoryview]:
    """The bytes of a file, and one more if it is longer than `size`. Of a local file, those on its disk.

    Raises:
        FileMissing: it does not exist.
    """
    local = home.local_path(path)
    if local is not None:
        # The page cache may hold what was read before, whatever the disk holds now.
        yield from blocks_from_disk(local)
        return
    for begin in range(0, max(size, 1), _REQUEST_BYTES):
        wanted = min(_REQUEST_BYTES, size - begin)
        yield memoryview(home.read_range(path, begin, wanted + (begin + wanted == size)))
