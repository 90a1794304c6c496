"""The validation split and the seeded permutation as pure functions."""

from itertools import combinations, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.foundation.dataset.manifest import held_out_mask
from baton.tasks.foundation.dataset.order import hashes
from baton.tasks.foundation.errors import SourceError
from baton.tasks.prepare_data.shard_writers import permuted_positions
from baton.tasks.prepare_data.split import held_out_rule, sizes_of_split, split


@given(length=st.integers(2, 300), fraction=st.floats(0, 0.999), seed=st.integers(0, 2**31 - 1))
def test_every_item_goes_to_one_part_of_the_expected_size(length: int, fraction: float, seed: int) -> None:
    dealt = list(split(range(length), fraction=fraction, seed=seed))
    assert sorted(item for _, item in dealt) == list(range(length))
    held_out = sum(held_out_mask for held_out_mask, _ in dealt)
    assert sizes_of_split(length, fraction=fraction, seed=seed) == (length - held_out, held_out)
    assert (held_out > 0) == (fraction > 0)
    assert held_out < length


@given(length=st.integers(2, 300), fraction=st.floats(0, 0.999), seed=st.integers(0, 2**31 - 1))
def test_held_out_rule_equals_the_split(length: int, fraction: float, seed: int) -> None:
    found = held_out_rule(length, fraction=fraction, seed=seed)
    dealt = {item for held_out, item in split(range(length), fraction=fraction, seed=seed) if held_out}
    assert dealt == (set() if found is None else set(np.flatnonzero(held_out_mask(found, 0, length)).tolist()))


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_held_out_rule_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch, chunk: int, fraction: float) -> None:
    monkeypatch.setattr("baton.tasks.prepare_data.split._CHUNK", chunk)
    found = held_out_rule(50, fraction=fraction, seed=3)
    assert found is not None
    dealt = [item for held_out, item in split(range(50), fraction=fraction, seed=3) if held_out]
    assert np.flatnonzero(held_out_mask(found, 0, 50)).tolist() == sorted(dealt)


def test_held_out_examples_stay_when_the_source_grows() -> None:
    small = {item for held_out, item in split(range(1000), fraction=0.1, seed=0) if held_out}
    large = {item for held_out, item in split(range(5000), fraction=0.1, seed=0) if held_out}
    assert small == {item for item in large if item < 1000}
    assert len(large) == pytest.approx(500, abs=80)


def test_single_item_cannot_be_split() -> None:
    with pytest.raises(SourceError, match="set it to 0"):
        list(split([1], fraction=0.1, seed=0))
    assert list(split([1], fraction=0, seed=0)) == [(False, 1)]
    assert list(split([], fraction=0.1, seed=0)) == []
    with pytest.raises(SourceError, match="set it to 0"):
        held_out_rule(1, fraction=0.1, seed=0)


def test_hashes_are_pinned() -> None:
    # Datasets that are already prepared are found by name, so the same bytes must be written today.
    assert hashes("validation", 0, 0, 3).tolist() == PINNED
    np.testing.assert_array_equal(hashes("a", 1, 5, 9), hashes("a", 1, 0, 20)[5:9])
    assert list(permuted_positions("train", 0, 10)) == PINNED_POSITIONS


@given(size=st.one_of(st.integers(0, 300), st.integers(4000, 20_000)), seed=st.integers(0, 2**31 - 1))
def test_positions_are_a_permutation(size: int, seed: int) -> None:
    assert sorted(permuted_positions("a", seed, size)) == list(range(size))


@pytest.mark.parametrize("size", [2**32 - 1, 2**32 + 1, 10**12, 2**62])
def test_positions_of_a_huge_part(size: int) -> None:
    first = list(islice(permuted_positions("a", 0, size), 10_000))
    assert len(set(first)) == 10_000
    assert 0 <= min(first) < size * 0.001
    assert size * 0.999 < max(first) < size
    assert np.mean(first) == pytest.approx(size / 2, rel=0.02)


def test_positions_are_uniform_and_differ_by_seed_and_purpose() -> None:
    size, groups = 100_000, 50
    tables = [
        np.array(list(permuted_positions(purpose, seed, size))) for purpose, seed in [("a", 0), ("a", 1), ("b", 0)]
    ]
    for table in tables:
        counts = np.zeros((groups, groups))
        np.add.at(counts, (np.arange(size) * groups // size, table * groups // size), 1)
        expected = size / groups**2
        # Chi-square with (groups - 1)^2 degrees of freedom, whose standard deviation is sqrt(2) (groups - 1).
        surprise = ((counts - expected) ** 2 / expected).sum() - (groups - 1) ** 2
        assert abs(surprise) < 4 * 2**0.5 * (groups - 1)
    for one, other in combinations(tables, 2):
        assert np.count_nonzero(one == other) < 10


PINNED = [15992859979497392819, 1285625190026723741, 10795053181321344237]
PINNED_POSITIONS = [6, 0, 3, 5, 7, 4, 8, 9, 1, 2]
