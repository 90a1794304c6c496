"""What goes into which page: the layout of retained checkpoints in an entry and its pages (`kept_pages.py`).

When eight pages of one size follow each other, they become one, as the levels of a log-structured merge tree do
(O'Neil et al., 1996). So the number of pages grows with the logarithm of the number of checkpoints, and each checkpoint
is written a few times.
"""

import json
from collections.abc import Sequence
from itertools import takewhile

from tasks.foundation.contracts.checkpoint import CheckpointRef, base_in_folder_name
from tasks.foundation.contracts.lean_entry import KeptPage, KeptRef, LeanRetained, PageRef, left_out
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.long_list import LongList
from tasks.foundation.runlog.kept_pages import Items, Kept, PagedItems, Pages, PageStore, page_digest

_PAGE = 3
_MERGED = 8
# Pages of this many checkpoints, of about 3 MB, are not merged: a file of the log has a limit.
_LARGE = 10_000
# An entry has at most this many checkpoints in full.
_IN_ENTRY = _PAGE + 1
# A page of which more is gone is written again.
_GONE = 8


def lay_out(head: Head, before: Head | None, store: PageStore) -> tuple[LeanRetained, dict[str, bytes]]:
    """Return how an entry stores the retained checkpoints of its head, and the pages to write before it.

    Args:
        head: the folded state of the entry.
        before: that of the entry before it, whose pages are used again.
        store: the pages of the log.
    """
    builder = _Builder(store)
    same = _unchanged_pages(head)
    if same is not None:
        builder.pages = list(same.pages)
        evaluated, borders, newest_base = same.evaluated, same.borders, same.newest_base
        recent = _flagged(head.retained[same.count :], head.evaluated[same.evaluated :], head.borders[same.borders :])
        paged = builder.move_into_pages(recent)
        evaluated += sum(one.evaluated for one in recent[:paged])
        borders += sum(one.border for one in recent[:paged])
        newest_base = max(newest_base, _newest_base(recent[:paged]))
        rest = recent[paged:]
    else:
        kept = _flagged(head.retained, head.evaluated, head.borders)
        old = _pages_of(before)
        at = builder.use_again(kept, () if old is None else old.pages)
        at += builder.move_into_pages(kept[at:])
        evaluated, borders = sum(one.evaluated for one in kept[:at]), sum(one.border for one in kept[:at])
        newest_base, rest = _newest_base(kept[:at]), kept[at:]
    builder.merge()
    lean = LeanRetained(
        pages=tuple(builder.pages),
        evaluated=evaluated,
        borders=borders,
        newest_base=newest_base,
        recent=tuple(_lean(one) for one in rest),
    )
    return lean, {page.digest: builder.new[page.digest] for page in builder.pages if page.digest in builder.new}


class _Builder:
    """Collects the pages of one entry."""

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self.pages: list[PageRef] = []
        self.new: dict[str, bytes] = {}
        self._contents: dict[str, tuple[Kept, ...]] = {}

    def use_again(self, kept: tuple[Kept, ...], old: Sequence[PageRef]) -> int:
        """Use old pages as far as they hold the first of `kept`, in order; return how many of these they hold."""
        at = 0
        for page in old:
            begin, gone = at, []
            for position, one in enumerate(self._store.page(page)):
                if at < len(kept) and kept[at] == one:
                    at += 1
                else:
                    gone.append(position)
            if at > begin and len(gone) <= _GONE:
                self.pages.append(page.model_copy(update={"gone": tuple(gone)}))
            elif at > begin:
                self._add(kept[begin:at])
        return at

    def move_into_pages(self, recent: tuple[Kept, ...]) -> int:
        """Make pages of the oldest, if there are too many for the entry; return how many went into pages."""
        at = 0
        while len(recent) - at > _IN_ENTRY:
            size = _PAGE
            while size < _LARGE and size * _MERGED < len(recent) - at:
                size *= _MERGED
            self._add(recent[at : at + size])
            at += size
        return at

    def merge(self) -> None:
        """Make one page of the newest pages, while many of them have one size."""
        while self.pages:
            run = list(takewhile(lambda page: _level(page) == _level(self.pages[-1]), reversed(self.pages)))[::-1]
            if len(run) < _MERGED or self.pages[-1].count >= _LARGE:
                return
            merged = [one for page in run for one in self._alive(page)]
            del self.pages[-len(run) :]
            self._add(tuple(merged))

    def _alive(self, page: PageRef) -> list[Kept]:
        found = self._contents.get(page.digest) or self._store.page(page)
        return [one for position, one in enumerate(found) if position not in page.gone]

    def _add(self, kept: tuple[Kept, ...]) -> None:
        data = _page_bytes(kept)
        digest = page_digest(data)
        self.new[digest], self._contents[digest] = data, kept
        self.pages.append(PageRef(digest=digest, count=len(kept)))


def _level(page: PageRef) -> int:
    level, size = 0, _PAGE
    while size < page.count:
        level, size = level + 1, size * _MERGED
    return level


def _pages_of(head: Head | None) -> Pages | None:
    """The pages of a head's retained checkpoints."""
    if head is None or not isinstance(head.retained, LongList) or not isinstance(head.retained.older, PagedItems):
        return None
    return head.retained.older.pages


def _unchanged_pages(head: Head) -> Pages | None:
    """The pages of a head whose lists differ from them only in what follows."""
    pages = _pages_of(head)
    if pages is None or not isinstance(head.retained, LongList):
        return None
    recent = {ref.path for ref in head.retained.recent}

    def follows(paths: Sequence[str], of: Items) -> bool:
        if not isinstance(paths, LongList) or paths.older != PagedItems(pages, of):
            return False
        return recent.issuperset(paths.recent)

    return pages if follows(head.evaluated, "evaluated") and follows(head.borders, "borders") else None


def _flagged(refs: Sequence[CheckpointRef], evaluated: Sequence[str], borders: Sequence[str]) -> tuple[Kept, ...]:
    are_evaluated, are_borders = set(evaluated), set(borders)
    return tuple(Kept(ref, ref.path in are_evaluated, ref.path in are_borders) for ref in refs)


def _newest_base(kept: Sequence[Kept]) -> int:
    return max((base for one in kept if (base := base_in_folder_name(one.ref.path)) is not None), default=-1)


def _lean(one: Kept) -> KeptRef:
    return KeptRef.model_validate({**left_out(one.ref), "evaluated": one.evaluated, "border": one.border})


def _page_bytes(kept: Sequence[Kept]) -> bytes:
    page = KeptPage(checkpoints=tuple(map(_lean, kept))).model_dump(mode="json", exclude_defaults=True)
    return json.dumps({"format": 1, **page}, separators=(",", ":")).encode()
