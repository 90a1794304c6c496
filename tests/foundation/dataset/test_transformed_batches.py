"""Transformed batches are a function of the seed and the batch index, whatever cuts, hosts and replicas there are."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.dataset import read
from baton.tasks.foundation.dataset.evaluation_sets import set_batches, set_remainder
from baton.tasks.foundation.dataset.model_inputs import Parts, TrainingFunctions, example_seeds
from baton.tasks.foundation.dataset.order import hashes

BATCH = 48


def shifted(parts: Parts, seed: Any) -> Parts:
    """The example, and a number that its seed draws."""
    return tf.concat([parts[0], tf.random.stateless_uniform([1], seed)], axis=0), parts[1]


def mixed(parts: Parts, seed: Any) -> Parts:
    """Mixup of the whole batch."""
    x, y = parts
    partner = tf.random.experimental.index_shuffle(tf.range(BATCH), tf.cast(seed, tf.int64), BATCH - 1)
    return 0.75 * x + 0.25 * tf.gather(x, partner), y


EXAMPLE = TrainingFunctions(example=shifted)
BOTH = TrainingFunctions(example=shifted, batch=mixed)


def global_batches(prepared: Any, first: int, count: int, *, hosts: int = 1, replicas: int = 1, **changed: Any) -> Any:
    """Batches as all hosts and replicas together have them: one array of x and labels per batch."""
    settings = {"seed": 3, "global_batch_size": BATCH, "window_shards": 2, "functions": BOTH, **changed}
    of_hosts = []
    for host in range(hosts):
        dataset = read.training_dataset(
            prepared.storage,
            prepared.ref,
            first_batch=first,
            host=host,
            hosts=hosts,
            local_replicas=replicas,
            **settings,
        )
        of_hosts.append(list(dataset.take(count * replicas).as_numpy_iterator()))

    def parts(batch: int) -> Iterator[Any]:
        for elements in of_hosts:
            yield from elements[batch * replicas : (batch + 1) * replicas]

    return [
        np.concatenate([np.concatenate([x, y[:, None]], axis=1) for x, y in parts(batch)]).astype(np.float32)
        for batch in range(count)
    ]


def test_seeds_are_the_hashes_of_the_positions() -> None:
    seeds = example_seeds("transform", 7, tf.constant(10**12, tf.int64), 50).numpy()
    words = hashes("transform", 7, 10**12, 10**12 + 50)
    expected = np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)], axis=1) >> np.uint64(1)
    assert seeds.dtype == np.int32
    assert np.array_equal(seeds, expected.astype(np.int32))


@pytest.mark.slow
def test_changes_of_the_count_change_no_batch(numbered: Callable[..., Any]) -> None:
    prepared = numbered([40, 31, 40, 17])
    straight = {functions: global_batches(prepared, 0, 20, functions=functions) for functions in (EXAMPLE, BOTH)}
    draw, batch = random.Random(11), 0
    for change in range(10):  # a hundred of them: test_mixed_batches.py
        length = draw.randint(1, 2)
        count = draw.choice([each for each in range(1, 17) if BATCH % each == 0])
        hosts = 2 if change % 8 == 0 and count % 2 == 0 else 1
        functions = draw.choice([EXAMPLE, BOTH])
        found = global_batches(prepared, batch, length, hosts=hosts, replicas=count // hosts, functions=functions)
        for number, one in enumerate(found, start=batch):
            assert np.array_equal(one, straight[functions][number]), (number, hosts, count)
        batch += length
    labels = [int(label) for one in straight[EXAMPLE] for label in one[:, -1]]
    for epoch in range(len(labels) // 128):  # no example is repeated or skipped
        assert sorted(labels[epoch * 128 : (epoch + 1) * 128]) == list(range(128))


def test_each_epoch_draws_other_numbers_for_an_example(numbered: Callable[..., Any]) -> None:
    prepared = numbered([48])
    epochs = global_batches(prepared, 0, 5, functions=EXAMPLE)
    drawn = {int(row[-1]): {float(epoch[epoch[:, -1] == row[-1]][0, 2]) for epoch in epochs} for row in epochs[0]}
    assert len(drawn) == 48
    assert all(len(values) == 5 for values in drawn.values())


def test_order_is_that_without_transforms(numbered: Callable[..., Any]) -> None:
    prepared = numbered([40, 31])
    plain = global_batches(prepared, 2, 6, functions=None)
    changed = global_batches(prepared, 2, 6, functions=EXAMPLE)
    assert all(np.array_equal(one[:, [0, 1, 3]], other) for one, other in zip(changed, plain, strict=True))


def test_far_batch_is_the_same_after_a_seek(numbered: Callable[..., Any]) -> None:
    prepared = numbered([40, 31])
    far = 1_000_000
    two = global_batches(prepared, far, 2)
    assert np.array_equal(two[1], global_batches(prepared, far + 1, 1, hosts=2, replicas=3)[0])


@pytest.mark.parametrize("batch", [1, 7, 16])
def test_validation_seeds_depend_on_the_index_alone(numbered: Callable[..., Any], batch: int) -> None:
    prepared = numbered([5], [9, 14])

    def values(size: int) -> dict[int, float]:
        full = set_batches(prepared.storage, prepared.ref, on="validation", batch_size=size, function=shifted, seed=1)
        rest = set_remainder(prepared.storage, prepared.ref, on="validation", batch_size=size, function=shifted, seed=1)
        elements = [*full.as_numpy_iterator(), *([] if rest is None else rest.as_numpy_iterator())]
        return {int(label): float(row[2]) for x, y in elements for row, label in zip(x, y, strict=True)}

    assert list(values(batch)) == list(range(1000, 1023))
    assert values(batch) == values(23)
