"""Seeds of transforms: a pure function of (purpose, run's seed, position), computed inside the input pipeline.

The position of a training example is its place in the stream of all epochs (order.py). The epoch and the example's
index within it follow from the position, so each epoch gives an example another seed. No cut, host or replica count
enters.
"""

import hashlib
from typing import Any, Literal

import numpy as np
import tensorflow as tf

Purpose = Literal["transform", "batch_transform", "validation_transform"]

_STEP = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def example_seeds(purpose: Purpose, seed: int, begin: Any, count: int) -> Any:
    """Return the seeds of the positions [begin, begin + count).

    The words are those of `hashing.hashes`; here they are computed in a graph, for positions that only it knows.

    Args:
        purpose: seeds for different purposes are independent.
        seed: the run's seed.
        begin: int64 scalar tensor, at least 0.
        count: number of seeds.

    Returns:
        int32 tensor [count, 2] of numbers in [0, 2**31), as `tf.random.stateless_*` takes them.
    """
    start = int.from_bytes(hashlib.sha256(f"{purpose}/{seed}".encode()).digest()[:8], "little")
    index = tf.cast(begin + tf.range(1, count + 1, dtype=tf.int64), tf.uint64)
    words = _mix(index * _word(_STEP) + _word(start))
    # 31 bits each, so that signed and unsigned integers agree.
    halves = tf.bitwise.right_shift(tf.bitcast(words, tf.uint32), tf.constant(1, tf.uint32))
    return tf.cast(halves, tf.int32)


def _mix(words: Any) -> Any:
    """`hashing.mix`, on tensors."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        words = _folded(words, shift) * _word(multiplier)
    return _folded(words, 31)


def _folded(words: Any, shift: int) -> Any:
    return tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, _word(shift)))


def _word(value: int) -> Any:
    return tf.constant(np.uint64(value))
