"""The order of a mixture as a pure function, without files."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.tasks.foundation.contracts.data_spec import Exhausted, integer_weights
from baton.tasks.foundation.dataset.mixing import Mixing, source_seed, window_size

FEW = settings(max_examples=40, derandomize=True)
# The sums of the first weights divide a window; those of the others are larger than one.
WEIGHTS = (st.integers(1, 30), st.integers(40_000, 900_000))
SOURCES = st.one_of(st.lists(st.tuples(st.integers(1, 2000), weight), min_size=2, max_size=4) for weight in WEIGHTS)


def mixing_of(sources: list[tuple[int, int]], exhausted: Exhausted, *, seed: int = 3, left_out: int = 0) -> Mixing:
    counts, weights = zip(*sources, strict=True)
    total = sum(counts)
    return Mixing(
        counts=counts,
        weights=integer_weights(weights),
        exhausted=exhausted,
        seed=seed,
        epoch_examples=max(1, total - left_out),
    )


def stream(mixing: Mixing, first: int, number: int) -> list[tuple[int, int]]:
    """Return (source, position in its own stream) of the examples that are kept, as a reader gets them."""
    at = list(mixing.taken_before(first))
    found = []
    for labels, kept in mixing.labels_from(first):
        for source, keep in zip(labels.tolist(), kept.tolist(), strict=True):
            if keep:
                found.append((source, at[source]))
            at[source] += 1
        if len(found) >= number:
            return found[:number]
    raise AssertionError("the stream has an end")


@FEW
@given(sources=SOURCES, first=st.integers(0, 10**12), windows=st.integers(1, 3))
def test_repeated_sources_keep_their_share(sources: list[tuple[int, int]], first: int, windows: int) -> None:
    mixing = mixing_of(sources, "repeat")
    size, total = window_size(mixing.weights), sum(mixing.weights)
    begin = first // size * size
    for labels, _ in islice(mixing.labels_from(begin), windows):
        counts = np.bincount(labels, minlength=len(sources))
        exact = [size * weight / total for weight in mixing.weights]
        assert len(labels) == size
        if size % total == 0:
            assert counts.tolist() == exact
        else:
            assert all(abs(count - share) < 2 and count > 0 for count, share in zip(counts, exact, strict=True))
    # From the begin of the stream on, no source is off by one example.
    taken = mixing.taken_before(begin)
    assert all(abs(one * total - begin * weight) < total for one, weight in zip(taken, mixing.weights, strict=True))


@FEW
@given(sources=SOURCES, exhausted=st.sampled_from(["repeat", "drop"]), seed=st.integers(0, 9), data=st.data())
def test_stream_from_a_position_equals_the_full_stream(
    sources: list[tuple[int, int]], exhausted: Exhausted, seed: int, data: st.DataObject
) -> None:
    left_out = data.draw(st.integers(0, 40))
    mixing = mixing_of(sources, exhausted, seed=seed, left_out=left_out)
    epoch = mixing.epoch_examples
    straight = stream(mixing, 0, 2 * epoch + 200)
    for first in data.draw(st.lists(st.integers(0, 2 * epoch), min_size=1, max_size=4)):
        assert stream(mixing, first, 200) == straight[first : first + 200]
    # No source skips or repeats an example of its own stream, except those that are left out.
    if exhausted == "repeat" or not mixing.leaves_out:
        for source in range(len(sources)):
            own = [position for each, position in straight if each == source]
            assert own == list(range(len(own)))


@FEW
@given(sources=SOURCES, left_out=st.integers(0, 40))
def test_dropped_sources_give_each_example_once_an_epoch(sources: list[tuple[int, int]], left_out: int) -> None:
    mixing = mixing_of(sources, "drop", left_out=left_out)
    epoch = mixing.epoch_examples
    everything = {(source, number) for source, (count, _) in enumerate(sources) for number in range(count)}
    found = stream(mixing, 0, 3 * epoch)
    for number in range(3):
        of_epoch = found[number * epoch : (number + 1) * epoch]
        own = {(source, position - number * sources[source][0]) for source, position in of_epoch}
        assert len(own) == epoch
        assert own <= everything


def test_remaining_sources_go_on_with_their_weights() -> None:
    mixing = mixing_of([(1000, 5), (100_000, 3), (100_000, 1)], "drop")
    first, second = mixing.phases[:2]
    assert first.weights == (5, 3, 1)
    assert second.weights == (0, 3, 1)
    assert second.taken[0] == 1000
    labels, _ = next(mixing.labels_from(second.begin + 4 * second.window))
    assert np.bincount(labels).tolist() == [0, 768, 256]


def test_far_position_costs_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    from baton.tasks.foundation.dataset import mixing as module

    original = module.hashes

    def counted(*arguments: object) -> object:
        planned.append(arguments)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "hashes", counted)
    for exhausted in ("repeat", "drop"):
        planned.clear()
        next(mixing_of([(5000, 7), (300, 3)], exhausted).labels_from(10**15 + 77))
        assert len(planned) <= 2  # where to begin, and the window itself


def test_windows_and_epochs_are_mixed_in_other_orders() -> None:
    windows = [labels.tolist() for labels, _ in islice(mixing_of([(9, 1), (9, 1)], "repeat").labels_from(0), 3)]
    assert len({tuple(each) for each in windows}) == 3
    small = mixing_of([(9, 1), (9, 1)], "drop")
    epochs = [labels.tolist() for labels, _ in islice(small.labels_from(0), 3)]
    assert len({tuple(each) for each in epochs}) == 3
    assert len({source_seed(seed, source) for seed in range(3) for source in range(3)}) == 9
