"""Memory that is used again and again for large copies."""

import mmap
import threading
from contextlib import suppress
from typing import Final

# 2 MiB, the size of a huge page.
_PAGE_BYTES: Final = 2 << 20
# Linux 5.14 and later: fill pages in, and leave their content alone. Python has no name for it.
_MADV_POPULATE_WRITE: Final = 23
# Filled in at a time: a few milliseconds, in which no other Python thread runs.
_PART_BYTES: Final = 8 << 20


class PageBuffer:
    """One area of memory that begins at a page. Its size is that of the largest copy so far.

    New memory costs more than the copy itself, because the system fills it with zeros page by page. So it is kept.
    """

    def __init__(self) -> None:
        self._area: mmap.mmap | None = None
        self._lent: memoryview | None = None

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return 0 if self._area is None else len(self._area)

    def reserve(self, size: int) -> threading.Thread | None:
        """Get memory for a copy of `size` bytes ready beside other work, if there is none yet.

        Returns:
            The thread that does it; None if there is memory already.
        """
        if self._area is not None:
            return None
        self._area = _new_area(size)
        # Nothing depends on it: memory that is not ready in time is made ready by the copy.
        thread = threading.Thread(target=_populate, args=(self._area,), name="baton-page-buffer", daemon=True)
        thread.start()
        return thread

    def borrow(self, size: int) -> memoryview:
        """Memory of `size` bytes, with any content, until it is given back.

        While it is lent, another one gets memory of its own.
        """
        if self._area is None or self._lent is not None or len(self._area) < size:
            self._area = None  # freed first, unless it is lent
            self._area = _new_area(size)
        self._lent = memoryview(self._area)[:size]
        return self._lent

    def give_back(self, memory: memoryview) -> None:
        """Call it when the content is no longer needed; more than once does no harm."""
        if memory is self._lent:
            self._lent = None


def _new_area(size: int) -> mmap.mmap:
    # Private, because most systems give huge pages to no shared memory.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    area = mmap.mmap(-1, -(-max(size, 1) // _PAGE_BYTES) * _PAGE_BYTES, flags=flags)
    with suppress(AttributeError, OSError):  # huge pages are faster, and not everywhere
        area.madvise(mmap.MADV_HUGEPAGE)
    return area


def _populate(area: mmap.mmap) -> None:
    with suppress(OSError):  # an older kernel
        for begin in range(0, len(area), _PART_BYTES):
            area.madvise(_MADV_POPULATE_WRITE, begin, min(_PART_BYTES, len(area) - begin))
