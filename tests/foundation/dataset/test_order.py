"""The data order as a pure function, without files."""

from collections.abc import Iterator
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.tasks.foundation.dataset import order

COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def examples(
    counts: list[int],
    *,
    seed: int,
    window_shards: int,
    first: int,
    number: int,
    epoch_examples: int | None = None,
    shuffle: bool = True,
) -> list[tuple[int, int]]:
    """Return (shard, position in the shard) of the stream's examples, as a reader gets them."""

    def stream() -> Iterator[tuple[int, int]]:
        windows = order.windows(
            counts,
            seed=seed,
            window_shards=window_shards,
            first_example=first,
            epoch_examples=epoch_examples,
            shuffle=shuffle,
        )
        for window in windows:
            held = [(shard, position) for shard in window.shards for position in range(counts[shard])]
            assert len(held) == window.examples
            indices = order.permutation(len(held), window.seed) if shuffle else range(len(held))
            yield from [held[index] for index in indices][window.skip : window.end]

    return list(islice(stream(), number))


@settings(max_examples=40, derandomize=True)
@given(counts=COUNTS, window_shards=st.integers(1, 8), seed=st.integers(0, 2**31 - 1))
def test_epoch_is_a_permutation_of_all_examples(counts: list[int], window_shards: int, seed: int) -> None:
    total = sum(counts)
    everything = sorted((shard, position) for shard, count in enumerate(counts) for position in range(count))
    stream = examples(counts, seed=seed, window_shards=window_shards, first=0, number=3 * total)
    for epoch in range(3):
        assert sorted(stream[epoch * total : (epoch + 1) * total]) == everything


@settings(max_examples=40, derandomize=True)
@given(counts=COUNTS, window_shards=st.integers(1, 8), batch=st.integers(1, 12), first_batch=st.integers(0, 12))
def test_stream_from_a_batch_equals_the_full_stream_from_there(
    counts: list[int], window_shards: int, batch: int, first_batch: int
) -> None:
    straight = examples(counts, seed=3, window_shards=window_shards, first=0, number=(first_batch + 3) * batch)
    jumped = examples(counts, seed=3, window_shards=window_shards, first=first_batch * batch, number=3 * batch)
    assert jumped == straight[first_batch * batch :]


def test_every_first_example_within_three_epochs() -> None:
    counts = [4, 4, 4, 1]
    straight = examples(counts, seed=1, window_shards=2, first=0, number=45)
    for first in range(40):
        assert examples(counts, seed=1, window_shards=2, first=first, number=5) == straight[first : first + 5]


def test_distant_batch_costs_one_window() -> None:
    counts = [100] * 50
    window = next(order.windows(counts, seed=0, window_shards=4, first_example=1_000_000 * 128))
    assert window.epoch == 1_000_000 * 128 // 5000
    assert window.number == 1_000_000 * 128 % 5000 // 400
    assert window.skip == 1_000_000 * 128 % 400


def test_epochs_seeds_and_windows_have_different_orders() -> None:
    counts = [50] * 4

    def epoch(seed: int, number: int) -> list[tuple[int, int]]:
        return examples(counts, seed=seed, window_shards=2, first=200 * number, number=200)

    orders = [epoch(0, 0), epoch(0, 1), epoch(0, 2), epoch(1, 0)]
    assert all(one != other for index, one in enumerate(orders) for other in orders[index + 1 :])
    first, second = islice(order.windows(counts, seed=0, window_shards=2, first_example=0), 2)
    assert first.seed != second.seed


def test_data_order_is_pinned() -> None:
    # A run that is resumed with a newer Baton must read the same examples.
    stream = examples([3, 3, 2], seed=7, window_shards=2, first=0, number=10)
    assert order.seed_of(7, 0) == (1162543029, 822854404)
    assert stream == PINNED


PINNED = [(0, 0), (1, 2), (0, 2), (1, 1), (1, 0), (0, 1), (2, 1), (2, 0), (1, 0), (0, 2)]


def test_permutation_contains_every_index() -> None:
    for size in (1, 2, 3, 10, 1000, 4097):
        assert sorted(order.permutation(size, order.seed_of(5, size))) == list(range(size))


@settings(max_examples=40, derandomize=True)
@given(counts=COUNTS, window_shards=st.integers(1, 8), batch=st.integers(1, 12), first_batch=st.integers(0, 12))
def test_dropped_remainder_leaves_whole_batches(
    counts: list[int], window_shards: int, batch: int, first_batch: int
) -> None:
    length = sum(counts) // batch * batch
    if not length:
        return
    whole = {"seed": 3, "window_shards": window_shards}
    straight = examples(counts, **whole, first=0, number=(first_batch + 3) * batch, epoch_examples=length)
    jumped = examples(counts, **whole, first=first_batch * batch, number=3 * batch, epoch_examples=length)
    assert jumped == straight[first_batch * batch :]
    everything = examples(counts, **whole, first=0, number=3 * sum(counts))
    for epoch in range(min(3, len(straight) // length)):
        of_epoch = straight[epoch * length : (epoch + 1) * length]
        # The same order as without it: only the epoch's last examples are left out.
        assert of_epoch == everything[epoch * sum(counts) :][:length]


@settings(max_examples=40, derandomize=True)
@given(counts=COUNTS, window_shards=st.integers(1, 8), first=st.integers(0, 90), left_out=st.integers(0, 3))
def test_every_epoch_keeps_the_order_without_shuffling(
    counts: list[int], window_shards: int, first: int, left_out: int
) -> None:
    everything = [(shard, position) for shard, count in enumerate(counts) for position in range(count)]
    length = max(1, len(everything) - left_out)
    found = examples(
        counts,
        seed=3,
        window_shards=window_shards,
        first=first,
        number=3 * length,
        epoch_examples=length,
        shuffle=False,
    )
    assert found == [everything[(first + index) % length] for index in range(3 * length)]
