"""The shard format: TFRecord files of `tf.train.Example`, each feature one bytes value.

The value holds the array's raw little-endian bytes, so every dtype of fixed width stays itself, and a whole vector
of records is parsed by three operations a feature. Records that others wrote may hold lists of values, or images.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.dataset.features import Array
from tasks.foundation.dataset.images import decode_image

# `tf.io.decode_raw` lacks these; the same bytes are read as their signed kin.
_READ_AS = {"uint32": "int32", "uint64": "int64"}


def encode(features: Mapping[str, Array]) -> bytes:
    """One record; the same arrays give the same bytes in every process.

    Args:
        features: named arrays as `features.flatten` returns them.
    """
    values = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[array.tobytes()]))
        for name, array in features.items()
    }
    example = tf.train.Example(features=tf.train.Features(feature=values))
    # The order of a map's keys is otherwise left to the library.
    return bytes(example.SerializeToString(deterministic=True))


def parse(records: Any, features: Sequence[Feature]) -> dict[str, Any]:
    """Batched tensors of a vector of records.

    Args:
        records: string tensor [n]; a static n makes the shapes static.
        features: what the records hold.

    Returns:
        Name -> tensor [n, *feature.shape] of the feature's dtype.
    """
    found = extract(records, features)
    return {feature.name: decode(found[feature.name], feature) for feature in features}


def extract(records: Any, features: Sequence[Feature]) -> dict[str, Any]:
    """What stands in a vector of records, not decoded yet.

    Args:
        records: string tensor [n].
        features: what the records hold.

    Returns:
        Name -> string tensor [n] for the encodings raw and image; int64 or float32 tensor [n, *feature.shape] for the
        others.

    Raises:
        tf.errors.InvalidArgumentError: a record lacks a feature, or holds another kind or number of values.
    """
    found = tf.io.parse_example(records, {feature.record_key: _wanted(feature) for feature in features})
    return {feature.name: found[feature.record_key] for feature in features}


def decode(found: Any, feature: Feature) -> Any:
    """A tensor of `extract` as [n, *feature.shape] of the feature's dtype."""
    if feature.encoding == "raw":
        return _numbers(found, feature)
    if feature.encoding != "image":
        return tf.cast(found, tf.as_dtype(feature.dtype))
    if found.shape[0] == 1:
        return decode_image(found[0], feature.shape, feature.dtype)[tf.newaxis]
    return tf.map_fn(
        lambda data: decode_image(data, feature.shape, feature.dtype),
        found,
        fn_output_signature=tf.TensorSpec(feature.shape, tf.as_dtype(feature.dtype)),
    )


def _wanted(feature: Feature) -> Any:
    if feature.encoding == "int64":
        return tf.io.FixedLenFeature(feature.shape, tf.int64)
    if feature.encoding == "float":
        return tf.io.FixedLenFeature(feature.shape, tf.float32)
    return tf.io.FixedLenFeature([], tf.string)


def _numbers(raw: Any, feature: Feature) -> Any:
    dtype = tf.as_dtype(feature.dtype)
    if 0 in feature.shape:
        return tf.zeros([tf.size(raw), *feature.shape], dtype)
    values = tf.io.decode_raw(raw, tf.as_dtype(_READ_AS.get(feature.dtype, feature.dtype)))
    if feature.dtype in _READ_AS:
        values = tf.bitcast(values, dtype)
    return tf.reshape(values, [-1 if raw.shape[0] is None else raw.shape[0], *feature.shape])
