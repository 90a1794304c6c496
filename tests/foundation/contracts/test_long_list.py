"""A long list behaves as the tuple of its items, and reads the older ones only if it must."""

from dataclasses import dataclass, field

import pytest

from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.long_list import LongList, appended, without
from tests.support.small_logs import ref

REFS = tuple(ref(10 * number, number) for number in range(8))
PATHS = tuple(one.path for one in REFS)


@dataclass
class Counted:
    """Older items that count how often they are read."""

    held: tuple[CheckpointRef | str, ...]
    newest_base: int
    reads: int = field(default=0, compare=False)

    @property
    def count(self) -> int:
        return len(self.held)

    def items(self) -> tuple[CheckpointRef | str, ...]:
        self.reads += 1
        return self.held


def split(items: tuple[CheckpointRef | str, ...], at: int) -> tuple[LongList[CheckpointRef | str], Counted]:
    older = Counted(items[:at], newest_base=at - 1)
    return LongList(older, items[at:]), older


@pytest.mark.parametrize("items", [REFS, PATHS], ids=["references", "paths"])
@pytest.mark.parametrize("at", [0, 1, 5, 8])
def test_it_is_like_a_tuple(items: tuple[CheckpointRef | str, ...], at: int) -> None:
    long, _older = split(items, at)
    assert (len(long), list(long), list(reversed(long))) == (8, list(items), list(reversed(items)))
    assert long == items
    assert items == long
    assert long != items[1:]
    assert long != [*items]
    assert repr(long) == repr(items)
    bounds = [None, *range(-9, 10)]
    for start in bounds:
        if isinstance(start, int) and -8 <= start < 8:
            assert long[start] == items[start]
            assert long.index(items[start]) == start % 8
        for stop in bounds:
            for step in (None, 2, -1):
                assert tuple(long[start:stop:step]) == items[start:stop:step]
    with pytest.raises(IndexError):
        long[8]
    with pytest.raises(ValueError, match="not in"):
        long.index(ref(99, 99))
    for one in items:
        assert one in long
        path = one if isinstance(one, str) else one.path
        assert without(long, {path}) == without(items, {path})
    assert ref(99, 3) not in long
    assert appended(long, items[0]) == (*items, items[0])


@pytest.mark.parametrize("items", [REFS, PATHS], ids=["references", "paths"])
def test_the_newest_items_need_no_reading(items: tuple[CheckpointRef | str, ...]) -> None:
    long, older = split(items, 5)
    grown = appended(long, ref(80, 8) if items is REFS else ref(80, 8).path)
    assert (len(grown), len(grown[:7]), grown[-3:][0], grown[6]) == (9, 7, items[6], items[6])
    assert items[7] in grown
    assert grown[:7] == long[:7]
    assert ref(90, 9).path not in grown
    assert len(without(grown, {PATHS[6]})) == 8
    assert older.reads == 0
    assert items[0] in grown
    assert older.reads == 1
