"""The entries of a log that a process remembers. They never change, so none is read twice."""

import threading
from collections import OrderedDict

from tasks.foundation.runlog.entry_codec import Decoded

_REMEMBERED = 512


class EntryMemory:
    """The entries that were used last, and the newest one that was found. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, Decoded] = OrderedDict()
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
            one = self._entries.setdefault(number, one)
            self._entries.move_to_end(number)
            if len(self._entries) > _REMEMBERED:
                self._entries.popitem(last=False)
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
            self.newest = None
