"""A long list whose older part is read when it is needed: the checkpoints that a run keeps for good."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast, overload

from pydantic import PlainSerializer, WrapValidator

from tasks.foundation.contracts.checkpoint import CheckpointRef, base_in_folder_name

_T = TypeVar("_T", bound=CheckpointRef | str)


class Older(Protocol):
    """The older items of a list."""

    @property
    def count(self) -> int:
        """Their number."""

    @property
    def newest_base(self) -> int:
        """The highest base among them. A checkpoint on a later base is not one of them."""

    def items(self) -> tuple[Any, ...]:
        """Return the items; reads them at the first call."""


class LongList(Sequence[_T]):
    """An immutable sequence of checkpoints, or of their paths; equal to a tuple of the same items.

    The newest items are in memory, the older ones are read at the first use that needs them. Adding an item, looking at
    the newest ones and taking newest ones away read nothing.
    """

    def __init__(self, older: Older, recent: tuple[_T, ...]) -> None:
        self.older = older
        self.recent = recent

    def with_recent(self, recent: tuple[_T, ...]) -> "LongList[_T]":
        """Return the list with the same older items, followed by `recent`."""
        return LongList(self.older, recent)

    def may_be_older(self, path: str) -> bool:
        """Return whether the item of a checkpoint may be one of the older ones; reads nothing."""
        base = base_in_folder_name(path)
        return self.older.count > 0 and (base is None or base <= self.older.newest_base)

    def __len__(self) -> int:
        return self.older.count + len(self.recent)

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | Sequence[_T]:
        before = self.older.count
        if isinstance(index, int):
            at = index + len(self) if index < 0 else index
            return self.recent[at - before] if at >= before else self._all()[index]
        start, stop, step = index.indices(len(self))
        if step == 1 and start >= before:
            return self.recent[start - before : max(stop - before, 0)]
        if step == 1 and start == 0 and stop >= before:
            return self.with_recent(self.recent[: stop - before])
        return self._all()[index]

    def __iter__(self) -> Iterator[_T]:
        yield from self.older.items()
        yield from self.recent

    def __reversed__(self) -> Iterator[_T]:
        yield from reversed(self.recent)
        yield from reversed(self.older.items())

    def __contains__(self, item: object) -> bool:
        if item in self.recent:
            return True
        return isinstance(item, CheckpointRef | str) and self.may_be_older(_path(item)) and item in self.older.items()

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the index of an item, as `tuple.index` does."""
        if start == 0 and stop is None and value in self.recent:
            return self.older.count + self.recent.index(value)
        return self._all().index(value, start, len(self) if stop is None else stop)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LongList) and other.older == self.older:
            return self.recent == cast(tuple[_T, ...], other.recent)
        if not isinstance(other, LongList | tuple):
            return NotImplemented
        return len(self) == len(other) and self._all() == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> tuple[_T, ...]:
        return (*self.older.items(), *self.recent)


def appended(items: Sequence[_T], *more: _T) -> Sequence[_T]:
    """Return `items` followed by more; reads nothing."""
    if isinstance(items, LongList):
        return items.with_recent((*items.recent, *more))
    return (*items, *more)


def without(items: Sequence[_T], paths: Collection[str]) -> Sequence[_T]:
    """Return `items` without those at certain paths; reads older items only if one of them may go."""
    if isinstance(items, LongList) and not any(map(items.may_be_older, paths)):
        return items.with_recent(tuple(item for item in items.recent if _path(item) not in paths))
    return tuple(item for item in items if _path(item) not in paths)


def _path(item: CheckpointRef | str) -> str:
    return item.path if isinstance(item, CheckpointRef) else item


def _validated(value: Any, handler: Callable[[Any], Any]) -> Any:
    return value if isinstance(value, LongList) else tuple(handler(value))


# For fields of contracts: JSON has the whole list.
AS_LONG_LIST = (WrapValidator(_validated), PlainSerializer(tuple))
