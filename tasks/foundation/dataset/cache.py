"""Pieces of files that lie elsewhere, kept in a folder of this machine, bounded in bytes.

What is in use is pinned, and so is what is read ahead. All else stays as long as there is room, and goes least recently
used first: a small dataset is fetched once, and of one larger than the disk only the windows in use are here.
"""

import errno
import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tasks.foundation.errors import StorageError

# However many transfers the stores together would bear.
_MOST_THREADS = 32
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes that lie elsewhere, as a manifest names them.

    Attributes:
        address: of the file.
        begin: the first of them.
        size: how many.
        crc32c: of them.
        fetch: writes them to a local file, and raises unless they are these; called in a thread of the cache.
        transfers: how many fetches their store bears side by side.
    """

    address: str
    begin: int
    size: int
    crc32c: str
    fetch: Callable[[Path], None] = field(compare=False, repr=False)
    transfers: int = field(default=1, compare=False)


@dataclass(slots=True, eq=False)
class _Entry:
    """A piece that is here or on its way; its bytes count from the beginning."""

    piece: Piece
    file: Path
    pins: int = 0
    waits: bool = True
    ready: tuple[int, int] | None = None  # size and time of the last change, once it is here
    fault: BaseException | None = None

    @property
    def idle(self) -> bool:
        return self.ready is not None and not self.pins

    @property
    def unwanted(self) -> bool:
        """Nobody holds it any more, and it is still being fetched."""
        return not (self.waits or self.ready or self.fault or self.pins)


class Hold:
    """Pieces that stay on this machine until they are released."""

    def __init__(self, cache: "ShardCache", entries: Sequence[_Entry]) -> None:
        self._cache = cache
        self._entries = entries

    def files(self) -> list[Path]:
        """Wait until all of them are here; those that are only read ahead come after them.

        Raises:
            BatonError: what the fetching of one raised.
        """
        return self._cache._files_of(self._entries)

    def release(self) -> None:
        """Let them go: what still waits to be fetched will not be."""
        entries, self._entries = self._entries, ()
        self._cache._release(entries)


class ShardCache:
    """Files in one folder; for any number of threads."""

    def __init__(self, folder: Path, bound: int) -> None:
        """Nothing is written yet.

        Args:
            folder: an empty folder of this machine.
            bound: bytes that may be here. Windows in use may exceed it together, one alone may not.
        """
        self._folder = folder
        self._bound = bound
        self._changed = threading.Condition()
        self._entries: dict[Piece, _Entry] = {}  # least recently used first
        self._waiting: deque[_Entry] = deque()
        self._threads = 0
        self._most_threads = 1
        self._names = itertools.count()
        self._closed = False

    def hold(self, pieces: Sequence[Piece]) -> Hold:
        """Pin pieces that are needed now; what is not here yet is fetched in the background.

        Raises:
            StorageError: they are more than the bound, or the cache is closed.
        """
        size = _size(set(pieces))
        if size > self._bound:
            raise StorageError(
                f"data.window_shards: the shards of one window have {_mib(size)}, and the cache in {self._folder} has "
                f"room for {_mib(self._bound)}; choose a smaller data.window_shards, set the environment variable "
                "TMPDIR to a larger disk, or raise BATON_CACHE_BYTES"
            )
        with self._changed:
            self._forget_changed(pieces)
            while self._over(pieces) > 0:
                self._make_room(pieces)
                if not any(entry.unwanted for entry in self._entries.values()):
                    break
                self._changed.wait()  # it can be let go once it is here
            return self._pin(pieces)

    def hold_ahead(self, pieces: Sequence[Piece]) -> Hold | None:
        """The same for what will be needed later, if there is room beside all that is pinned; None if there is not."""
        with self._changed:
            self._forget_changed(pieces)
            if self._over(pieces) > _size(entry.piece for entry in self._idle(pieces)):
                return None
            self._make_room(pieces)
            return self._pin(pieces)

    def close(self) -> None:
        """Fetch nothing any more; what is just being fetched comes to nothing."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            for entry in self._entries.values():
                if entry.ready is None:
                    entry.fault = self._ending()
            self._entries.clear()
            self._changed.notify_all()

    def _over(self, coming: Collection[Piece] = ()) -> int:
        return _size({*self._entries, *coming}) - self._bound

    def _idle(self, but: Collection[Piece] = ()) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.idle and entry.piece not in but]

    def _make_room(self, coming: Collection[Piece] = ()) -> None:
        """Let go what nobody holds, no more than is needed for those to come."""
        over = self._over(coming)
        for entry in self._idle(but=coming):
            if over <= 0:
                break
            self._drop(entry)
            over -= entry.piece.size

    def _forget_changed(self, pieces: Collection[Piece]) -> None:
        """Temporary folders get tidied up, by hand and by the system: what was lost is fetched again."""
        for piece in pieces:
            entry = self._entries.get(piece)
            if entry is not None and entry.ready is not None and entry.ready != _stamp(entry.file):
                self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        if self._entries.get(entry.piece) is entry:
            del self._entries[entry.piece]
        with suppress(OSError):
            entry.file.unlink()

    def _pin(self, pieces: Sequence[Piece]) -> Hold:
        if self._closed:
            raise self._ending()
        entries = []
        for piece in pieces:
            entry = self._entries.pop(piece, None)
            if entry is None:
                entry = _Entry(piece, self._folder / f"{next(self._names):06d}-{Path(piece.address).name}")
                self._waiting.append(entry)
                self._most_threads = min(max(self._most_threads, piece.transfers), _MOST_THREADS)
            self._entries[piece] = entry  # now the most recently used
            entry.pins += 1
            entries.append(entry)
        for _ in range(min(self._most_threads - self._threads, len(self._waiting))):
            # No process waits for a daemon: it may end in the middle of a download.
            threading.Thread(target=self._work, name="baton-fetch", daemon=True).start()
            self._threads += 1
        return Hold(self, entries)

    def _files_of(self, entries: Sequence[_Entry]) -> list[Path]:
        with self._changed:
            for entry in reversed(entries):
                if entry.waits and entry in self._waiting:
                    self._waiting.remove(entry)
                    self._waiting.appendleft(entry)
            while not all(entry.ready for entry in entries):
                for entry in entries:
                    if entry.fault is not None:
                        raise entry.fault
                self._changed.wait()
            return [entry.file for entry in entries]

    def _release(self, entries: Sequence[_Entry]) -> None:
        with self._changed:
            for entry in entries:
                entry.pins -= 1
                if not entry.pins and entry.waits and entry in self._waiting:
                    self._waiting.remove(entry)
                    self._drop(entry)
            self._make_room()
            self._changed.notify_all()

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            try:
                self._fetch(entry)
                outcome: tuple[int, int] | BaseException | None = _stamp(entry.file)
            except BaseException as fault:  # noqa: BLE001 - raised where the piece is asked for
                outcome = fault
            with self._changed:
                if isinstance(outcome, tuple) and not self._closed:
                    entry.ready = outcome
                    self._make_room()
                else:
                    entry.fault = outcome if isinstance(outcome, BaseException) else self._ending()
                    self._drop(entry)
                self._changed.notify_all()

    def _next(self) -> _Entry | None:
        with self._changed:
            if not self._waiting:
                self._threads -= 1
                return None
            entry = self._waiting.popleft()
            entry.waits = False
            return entry

    def _fetch(self, entry: _Entry) -> None:
        try:
            entry.piece.fetch(entry.file)
        except StorageError as fault:
            if not (disk_is_full(fault) and self._drop_idle()):
                raise
            entry.piece.fetch(entry.file)

    def _drop_idle(self) -> bool:
        """Let go all that nobody holds; whether there was anything."""
        with self._changed:
            idle = self._idle()
            for entry in idle:
                self._drop(entry)
            return bool(idle)

    def _ending(self) -> StorageError:
        return StorageError(f"{self._folder}: the cache of shards is closed, since the process is ending; run again")


def disk_is_full(fault: BaseException | None) -> bool:
    """Whether this machine's disk had no room, as far as the error and those behind it tell."""
    while fault is not None:
        if isinstance(fault, OSError) and fault.errno in _FULL:
            return True
        fault = fault.__cause__
    return False


def _size(pieces: Iterable[Piece]) -> int:
    return sum(piece.size for piece in pieces)


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
