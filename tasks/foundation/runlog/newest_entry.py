"""Finds the newest entry of a log: from a hint, by probing forward."""

import logging

from tasks.foundation.errors import StorageError
from tasks.foundation.runlog.entry_paths import entry_path
from tasks.foundation.storage.base import Storage

_LOGGER = logging.getLogger(__name__)
_PATH = "log/HINT"
_SECONDS = 2.0
_MOST_DIGITS = 12


class Hint:
    """`log/HINT`: a number near the newest entry's. Best effort: a missing or wrong one costs time, never truth."""

    def __init__(self, home: Storage) -> None:
        """Read nothing yet."""
        self._home = home
        self._written = -1

    def read(self) -> int:
        """Return the number in the file; 0 if there is none."""
        try:
            text = self._home.with_deadline(_SECONDS).read(_PATH).decode("ascii", errors="replace")
        except StorageError:
            return 0  # without a hint, finding the newest entry only takes longer
        return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else 0

    def write(self, number: int) -> None:
        """Write the number of the newest entry, unless this hint has written it or a later one."""
        if number <= self._written:
            return
        try:
            self._home.with_deadline(_SECONDS).write(_PATH, str(number).encode())
        except StorageError as error:
            # The entries are committed; without a hint, finding them only takes longer.
            _LOGGER.warning("could not write %s: %s", _PATH, error)
        else:
            self._written = number


def last_from(home: Storage, low: int) -> int:
    """Return the number of the last entry, probing forward from `low`, which need not exist.

    Entries have no gaps, so an existing entry proves that all before it exist. The number of probes is logarithmic in
    the distance.
    """
    stride = reach = 1
    while home.exists(entry_path(low + stride)):
        low += stride
        # 1, 1, 2, 4, ...: a hint is often right, and often one entry behind.
        stride, reach = reach, reach * 2
    high = low + stride
    while high - low > 1:
        middle = (low + high) // 2
        if home.exists(entry_path(middle)):
            low = middle
        else:
            high = middle
    return low
