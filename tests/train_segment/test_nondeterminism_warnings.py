"""Operations in a traced step that may give other results in another run."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from baton.tasks.train_segment.fingerprint import nondeterminism_warnings

PLACES, WEIGHTS = [0, 1, 1], [0.1, 0.2, 0.3]


def traced(work: Callable[[], Any]) -> Any:
    """Trace `work` as the loop does, so that its operations are in a function of the graph."""
    inner = tf.function(work)
    return tf.function(lambda: tf.identity(inner())).get_concrete_function()


@pytest.mark.parametrize("axis", [None, -1])
def test_weighted_bincount_is_reported(axis: int | None) -> None:
    function = traced(lambda: tf.math.bincount(PLACES, weights=WEIGHTS, minlength=2, axis=axis))
    (words,) = nondeterminism_warnings(function, intra_op_threads=2)
    assert "incount: a weighted bincount adds floats in the order in which its 2 threads finish" in words
    assert words.endswith("or set accelerator.intra_op_threads: 1")
    assert nondeterminism_warnings(function, intra_op_threads=1) == ()


def test_unweighted_bincount_is_not_reported() -> None:
    assert nondeterminism_warnings(traced(lambda: tf.math.bincount(PLACES, minlength=2)), intra_op_threads=2) == ()


def test_random_state_is_reported_too() -> None:
    def work() -> Any:
        return tf.random.uniform([], seed=1) + tf.reduce_sum(tf.math.bincount(PLACES, weights=WEIGHTS, minlength=2))

    unsaved, unordered = nondeterminism_warnings(traced(work), intra_op_threads=2)
    assert "RandomUniform draw from TensorFlow's own random state" in unsaved
    assert "bincount" in unordered
