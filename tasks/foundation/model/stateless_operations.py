"""Stateless operations with the results of TensorFlow's random operations: same shapes, dtypes and distributions.

Each takes the arguments of the generated function of the same name, and an int32 seed [2] in place of the two numbers
that TensorFlow calls seeds. Philox is named, because the default algorithm depends on the device.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import stateless_random_ops  # one of its functions is not public

_ALGORITHM = "philox"


def _random_uniform(seed: Any, shape: Any, dtype: Any) -> Any:
    return tf.random.stateless_uniform(shape, seed, dtype=dtype, alg=_ALGORITHM)


def _random_uniform_int(seed: Any, shape: Any, minval: Any, maxval: Any) -> Any:
    low = tf.convert_to_tensor(minval)
    high = tf.convert_to_tensor(maxval, low.dtype)
    return tf.random.stateless_uniform(shape, seed, minval=low, maxval=high, dtype=low.dtype, alg=_ALGORITHM)


def _random_standard_normal(seed: Any, shape: Any, dtype: Any) -> Any:
    return tf.random.stateless_normal(shape, seed, dtype=dtype, alg=_ALGORITHM)


def _truncated_normal(seed: Any, shape: Any, dtype: Any) -> Any:
    return tf.random.stateless_truncated_normal(shape, seed, dtype=dtype, alg=_ALGORITHM)


def _parameterized_truncated_normal(seed: Any, shape: Any, *parameters: Any) -> Any:
    return stateless_random_ops.stateless_parameterized_truncated_normal(shape, seed, *parameters)


def _random_shuffle(seed: Any, value: Any) -> Any:
    # XLA has no kernel of StatelessShuffle.
    value = tf.convert_to_tensor(value)
    keys = tf.random.stateless_uniform(
        tf.shape(value)[:1], seed, minval=None, maxval=None, dtype=tf.int32, alg=_ALGORITHM
    )
    return tf.ensure_shape(tf.gather(value, tf.argsort(keys, stable=True)), value.shape)


def _multinomial(seed: Any, logits: Any, num_samples: Any, output_dtype: Any = tf.int64) -> Any:
    return tf.random.stateless_categorical(logits, num_samples, seed, dtype=output_dtype)


def _random_gamma(seed: Any, shape: Any, alpha: Any) -> Any:
    alpha = tf.convert_to_tensor(alpha)
    return tf.random.stateless_gamma(_with_rates(shape, alpha), seed, alpha, dtype=alpha.dtype)


def _random_poisson_v2(seed: Any, shape: Any, rate: Any, dtype: Any = tf.int64) -> Any:
    rate = tf.convert_to_tensor(rate)
    return tf.random.stateless_poisson(_with_rates(shape, rate), seed, rate, dtype=dtype)


def _with_rates(shape: Any, rates: Any) -> Any:
    """The shape of a result with one sample of `shape` for each rate."""
    return tf.concat([tf.convert_to_tensor(shape, tf.int32), tf.shape(rates)], axis=0)


# By the name of the function in TensorFlow's `gen_random_ops`.
STATELESS: Mapping[str, Callable[..., Any]] = {
    "multinomial": _multinomial,
    "parameterized_truncated_normal": _parameterized_truncated_normal,
    "random_gamma": _random_gamma,
    "random_poisson_v2": _random_poisson_v2,
    "random_shuffle": _random_shuffle,
    "random_standard_normal": _random_standard_normal,
    "random_uniform": _random_uniform,
    "random_uniform_int": _random_uniform_int,
    "truncated_normal": _truncated_normal,
}
