"""The last records are held out, whether their number is known before or not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.foundation.errors import SourceError
from baton.tasks.prepare_data import split
from baton.tasks.prepare_data.split import last_of, split_last


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number * (number % 5) for number in range(count)]


@given(length=st.integers(2, 200), fraction=st.floats(0.001, 0.999))
def test_last_records_are_held_out_in_source_order(length: int, fraction: float) -> None:
    found = list(split_last(numbered(length), fraction=fraction))
    held_out = last_of(length, fraction=fraction)
    assert [record for _, record in found] == numbered(length)
    assert [is_out for is_out, _ in found] == [False] * (length - held_out) + [True] * held_out
    assert 0 < held_out < length
    assert abs(held_out - length * fraction) <= 1


@given(length=st.integers(2, 60), fraction=st.floats(0.01, 0.99), memory=st.integers(0, 20))
def test_records_in_the_temporary_file_keep_their_order(length: int, fraction: float, memory: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "_MEMORY_BYTES", memory)
        through_file = list(split_last(numbered(length), fraction=fraction))
    assert through_file == list(split_last(numbered(length), fraction=fraction))


def test_single_record_is_refused() -> None:
    with pytest.raises(SourceError, match=r"data.split: last: the source has a single example"):
        list(split_last([b"1"], fraction=0.5))
    assert list(split_last([], fraction=0.5)) == []
