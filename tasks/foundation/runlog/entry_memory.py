"""The entries of a log that a process remembers. They never change, so none is read twice."""

import threading
from collections import OrderedDict

from tasks.foundation.runlog.entry_codec import Decoded

_REMEMBERED = 512
_REMEMBERED_BYTES = 32 << 20  # of their files


class EntryMemory:
    """The entries that were used last, and the newest one that was found. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, Decoded] = OrderedDict()
        self._bytes = 0
        self.newest: Decoded | None = None

    def get(self, number: int) -> Decoded | None:
        """Return an entry; None if it is not remembered."""
        with self._lock:
            known = self._entries.get(number)
            if known is not None:
                self._entries.move_to_end(number)
            return known

    def keep(self, one: Decoded) -> Decoded:
        """Keep an entry; return the one that is kept."""
        number = one.entry.number
        with self._lock:
            if number not in self._entries:
                self._entries[number] = one
                self._bytes += one.size
            one = self._entries[number]
            self._entries.move_to_end(number)
            while len(self._entries) > _REMEMBERED or (self._bytes > _REMEMBERED_BYTES and len(self._entries) > 1):
                self._bytes -= self._entries.popitem(last=False)[1].size
            return one

    def see(self, newest: Decoded) -> Decoded:
        """Keep the newest entry that was found."""
        with self._lock:
            if self.newest is None or newest.entry.number > self.newest.entry.number:
                self.newest = newest
            return newest

    def forget(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0
            self.newest = None
