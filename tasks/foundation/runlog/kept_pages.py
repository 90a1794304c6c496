"""Retained checkpoints in pages: an entry names a few pages, however many checkpoints a run keeps for good.

A page is a file `log/retained/<digest>.json` that never changes. Its name is the digest of its bytes, so writing it
twice is harmless, and an entry that names it says what is in it. `page_layout.py` decides what goes into which page.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.lean_entry import KeptPage, KeptRef, LeanRetained, PageRef
from tasks.foundation.contracts.long_list import LongList
from tasks.foundation.errors import FileAlreadyThere, FileMissing, FileTooLarge, RunLogError
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.transfers import parallel_map

_REMEMBERED = 64

Items = Literal["retained", "evaluated", "borders"]


class Kept(NamedTuple):
    """A retained checkpoint, and what the folded state says of it."""

    ref: CheckpointRef
    evaluated: bool
    border: bool


class PageStore:
    """The pages of one log. Remembers the pages that it has read or written. Safe to use from several threads."""

    def __init__(self, home: Storage) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._remembered: OrderedDict[str, tuple[Kept, ...]] = OrderedDict()

    def kept(self, pages: Sequence[PageRef]) -> tuple[Kept, ...]:
        """Return what the pages hold and is still retained, oldest first.

        Raises:
            RunLogError: a page is missing or damaged.
            AnotherVersion: a newer version of Baton wrote it.
        """
        read = parallel_map(lambda page: self._page(page.digest), pages, workers=self._home.transfers)
        return tuple(
            one
            for page, found in zip(pages, read, strict=True)
            for position, one in enumerate(found)
            if position not in page.gone
        )

    def page(self, page: PageRef) -> tuple[Kept, ...]:
        """Return all that a page holds; see `kept`."""
        return self._page(page.digest)

    def write(self, digest: str, data: bytes) -> None:
        """Write a page, unless it is there. It is durable on return."""
        with self._lock:
            if digest in self._remembered:
                return
        try:
            self._home.create(_path(digest), data)
        except FileAlreadyThere:
            if page_digest(self._home.read(_path(digest))) != digest:
                raise self._damaged(digest) from None
        self._remember(digest, _parsed(data, where=_path(digest)))

    def _page(self, digest: str) -> tuple[Kept, ...]:
        with self._lock:
            found = self._remembered.get(digest)
        if found is not None:
            return found
        path = _path(digest)
        try:
            data = self._home.read(path)
        except FileMissing as fault:
            raise RunLogError(f"{self._home.uri}/{path} is missing; restore it from a backup") from fault
        except FileTooLarge as fault:
            raise RunLogError(str(fault)) from fault
        if page_digest(data) != digest:
            raise self._damaged(digest)
        return self._remember(digest, _parsed(data, where=f"{self._home.uri}/{path}"))

    def _remember(self, digest: str, kept: tuple[Kept, ...]) -> tuple[Kept, ...]:
        with self._lock:
            self._remembered[digest] = kept
            self._remembered.move_to_end(digest)
            if len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)
        return kept

    def _damaged(self, digest: str) -> RunLogError:
        return RunLogError(
            f"{self._home.uri}/{_path(digest)} is damaged: its digest is another one; restore it from a backup"
        )


@dataclass(frozen=True)
class Pages:
    """The pages that an entry names. Equal if they hold the same."""

    pages: tuple[PageRef, ...]
    evaluated: int
    borders: int
    newest_base: int
    store: PageStore = field(compare=False, repr=False)

    @property
    def count(self) -> int:
        """Number of retained checkpoints in the pages."""
        return sum(page.count - len(page.gone) for page in self.pages)

    def kept(self) -> tuple[Kept, ...]:
        """Return what they hold."""
        return self.store.kept(self.pages)


@dataclass(frozen=True)
class PagedItems:
    """One list of the folded state, as far as it is in pages."""

    pages: Pages
    of: Items

    @property
    def count(self) -> int:
        """See `Older`."""
        return {"retained": self.pages.count, "evaluated": self.pages.evaluated, "borders": self.pages.borders}[self.of]

    @property
    def newest_base(self) -> int:
        """See `Older`."""
        return self.pages.newest_base

    def items(self) -> tuple[CheckpointRef | str, ...]:
        """See `Older`."""
        kept = self.pages.kept()
        if self.of == "retained":
            return tuple(one.ref for one in kept)
        return tuple(one.ref.path for one in kept if (one.evaluated if self.of == "evaluated" else one.border))


def lists_of(lean: LeanRetained, store: PageStore) -> dict[Items, Sequence[Any]]:
    """Return the lists of a head: what an entry has in full, after what its pages hold. Reads nothing."""
    recent = tuple(_kept(one) for one in lean.recent)
    refs = tuple(one.ref for one in recent)
    evaluated = tuple(one.ref.path for one in recent if one.evaluated)
    borders = tuple(one.ref.path for one in recent if one.border)
    if not lean.pages:
        return {"retained": refs, "evaluated": evaluated, "borders": borders}
    pages = Pages(lean.pages, lean.evaluated, lean.borders, lean.newest_base, store)
    return {
        "retained": LongList(PagedItems(pages, "retained"), refs),
        "evaluated": LongList(PagedItems(pages, "evaluated"), evaluated),
        "borders": LongList(PagedItems(pages, "borders"), borders),
    }


def page_digest(data: bytes) -> str:
    """The digest in the name of a page with these bytes."""
    return hashlib.sha256(data).hexdigest()[:32]


def _kept(lean: KeptRef) -> Kept:
    return Kept(lean.ref(), lean.evaluated, lean.border)


def _parsed(data: bytes, *, where: str) -> tuple[Kept, ...]:
    page = KeptPage.from_json(data, where=where, error=RunLogError)
    try:
        return tuple(map(_kept, page.checkpoints))
    except ValueError as fault:  # a path does not say what is left out
        raise RunLogError(f"{where}: not a readable KeptPage: {fault}") from fault


def _path(digest: str) -> str:
    return f"log/retained/{digest}.json"
