"""Batch arithmetic: accepted batches divide exactly, and refusals suggest sizes that do."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.foundation.contracts.placement import micro_batch_size, per_replica_batch_size
from baton.tasks.foundation.errors import AcceleratorError

SIZES = st.integers(1, 2**24)
REPLICAS = st.integers(1, 300)
CUTS = st.integers(1, 64)


@given(SIZES, REPLICAS, CUTS)
def test_batch_divides_exactly_or_is_refused(batch: int, replicas: int, accumulate: int) -> None:
    try:
        each = per_replica_batch_size(batch, replicas, accumulate)
    except AcceleratorError:
        assert batch % (replicas * accumulate)
        return
    micro = micro_batch_size(batch, replicas, accumulate)
    assert each * replicas == batch
    assert micro * accumulate == each


@given(SIZES, REPLICAS, CUTS)
def test_suggested_values_are_valid_and_nearest(batch: int, replicas: int, accumulate: int) -> None:
    parts = replicas * accumulate
    try:
        per_replica_batch_size(batch, replicas, accumulate)
    except AcceleratorError as refused:
        text = str(refused)
    else:
        return
    sizes, _, cuts = text.partition("; try ")[2].partition("; or train.accumulate = ")
    named = [int(size) for size in sizes.split(" or ")]
    assert named == [size for size in (batch - batch % parts, batch - batch % parts + parts) if size]
    for size in named:
        per_replica_batch_size(size, replicas, accumulate)
    others = [int(cut) for cut in cuts.split(" or ")] if cuts else []
    # Another number of micro-batches helps exactly where the replicas' shares are whole.
    assert bool(others) == (batch % replicas == 0)
    for cut in others:
        per_replica_batch_size(batch, replicas, cut)
        between = range(min(cut, accumulate) + 1, max(cut, accumulate))
        assert not [other for other in between if (batch // replicas) % other == 0]


@pytest.mark.parametrize(
    ("batch", "replicas", "accumulate", "words"),
    [
        (96, 4, 5, "by 4 replicas of 5 micro-batches; try 80 or 100; or train.accumulate = 4 or 6"),
        (96, 4, 64, "try 256; or train.accumulate = 24"),
        (97, 4, 2, "try 96 or 104"),
        (7, 2, 1, "by 2 replicas; try 6 or 8"),
    ],
)
def test_refusal_names_value_and_remedy(batch: int, replicas: int, accumulate: int, words: str) -> None:
    with pytest.raises(AcceleratorError, match=re.escape(words) + "$"):
        per_replica_batch_size(batch, replicas, accumulate)
