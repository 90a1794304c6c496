"""What a traced step holds that no two runs compute alike."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tasks.train_segment.loop import may_differ_words

PLACES, WEIGHTS = [0, 1, 1], [0.1, 0.2, 0.3]


def traced(work: Callable[[], Any]) -> Any:
    """As the loop has it: the work is in a function of the graph."""
    inner = tf.function(work)
    return tf.function(lambda: tf.identity(inner())).get_concrete_function()


@pytest.mark.parametrize("axis", [None, -1])
def test_a_weighted_bincount_is_named(axis: int | None) -> None:
    function = traced(lambda: tf.math.bincount(PLACES, weights=WEIGHTS, minlength=2, axis=axis))
    (words,) = may_differ_words(function, intra_op_threads=2)
    assert "incount: a weighted bincount adds up floats in the order in which its 2 threads end" in words
    assert words.endswith("or set accelerator.intra_op_threads: 1")
    assert may_differ_words(function, intra_op_threads=1) == ()


def test_counts_are_the_same_in_any_order() -> None:
    assert may_differ_words(traced(lambda: tf.math.bincount(PLACES, minlength=2)), intra_op_threads=2) == ()


def test_random_state_is_another_reason() -> None:
    def work() -> Any:
        return tf.random.uniform([], seed=1) + tf.reduce_sum(tf.math.bincount(PLACES, weights=WEIGHTS, minlength=2))

    unsaved, unordered = may_differ_words(traced(work), intra_op_threads=2)
    assert "RandomUniform draw from TensorFlow's own random state" in unsaved
    assert "bincount" in unordered
