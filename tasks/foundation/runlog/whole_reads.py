"""The checkpoints that a process has read whole after their commit; its next entry in the log says so.

Retention keeps the newest of them (`checkpoint/retention.py`). Reading back what is being written does not count: the
bytes that come back then may be those of a cache, and they say nothing about whether the store keeps them.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from tasks.foundation.contracts.checkpoint import CheckpointRef, WholeRead, step_in_folder_name
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.long_list import LongList

# Entries stay small. What is left waits for the next entry.
_READS_PER_ENTRY: Final = 4
# Of a run that keeps thousands of checkpoints, the log names the newest; it needs no older ones.
_WAITING: Final = 64


class WholeReads:
    """What this process has read whole in one home. Safe to use from several threads."""

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Begin without any.

        Args:
            now: the time, UTC.
        """
        self._now = now
        self._lock = threading.Lock()
        self._paths: set[str] = set()
        self._waiting: dict[str, WholeRead] = {}

    def add(self, ref: CheckpointRef) -> None:
        """Note that a committed checkpoint was read whole, and that every byte is as it was written."""
        read = WholeRead(path=ref.path, time=self._now().isoformat(timespec="seconds"))
        with self._lock:
            self._paths.add(ref.path)
            self._waiting[ref.path] = read
            if len(self._waiting) > _WAITING:
                del self._waiting[min(self._waiting.values(), key=_step).path]

    def __contains__(self, path: str) -> bool:
        """Whether this process has read the checkpoint at a path."""
        with self._lock:
            return path in self._paths

    def waiting(self) -> tuple[WholeRead, ...]:
        """Those that no entry of this process has named, the newest reads last."""
        with self._lock:
            return tuple(self._waiting.values())

    def due(self, head: Head, also: Iterable[WholeRead] = ()) -> tuple[WholeRead, ...]:
        """Return what the entry after `head` says: of `also` and `waiting`, the newest that are still retained.

        Args:
            head: the state that the entry follows, as new as any that this process has seen.
            also: what another process has read.
        """
        reads = {read.path: read for read in (*also, *self.waiting())}
        due: list[WholeRead] = []
        # Old ones are looked up in pages of the log, so no more of them than an entry can say.
        for read in sorted(reads.values(), key=_step, reverse=True):
            if len(due) == _READS_PER_ENTRY:
                break
            if read not in head.read_whole and _retains(head, read.path):
                due.append(read)
            else:
                self.logged([read])  # it is known, or retired by now
        return tuple(reversed(due))

    def logged(self, reads: Sequence[WholeRead]) -> None:
        """Forget what an entry names."""
        with self._lock:
            for read in reads:
                if self._waiting.get(read.path) == read:
                    del self._waiting[read.path]


def _step(read: WholeRead) -> int:
    return step_in_folder_name(read.path)


def _retains(head: Head, path: str) -> bool:
    """Whether a checkpoint is retained; reads pages of the log only for an old one."""
    refs = head.retained
    if not isinstance(refs, LongList):
        return any(ref.path == path for ref in refs)
    return any(ref.path == path for ref in refs.recent) or (
        refs.may_be_older(path) and any(ref.path == path for ref in refs.older.items())
    )
