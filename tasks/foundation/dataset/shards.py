"""The shard format: TFRecord files of `tf.train.Example`, one bytes value per feature; text has one per string.

The value holds the array's raw little-endian bytes. So every fixed-width dtype is preserved, and three operations per
feature parse a whole vector of records. Records that other tools wrote may hold lists of values, or images.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.dataset.features import Array
from tasks.foundation.dataset.images import decode_image

# `tf.io.decode_raw` does not support these; their bytes are read as the signed type.
_READ_AS = {"uint32": "int32", "uint64": "int64"}


def encode(features: Mapping[str, Array]) -> bytes:
    """Encode one example; the same arrays give the same bytes in every process.

    Args:
        features: named arrays as `features.flatten` returns them.
    """
    values = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=_stored(array))) for name, array in features.items()
    }
    example = tf.train.Example(features=tf.train.Features(feature=values))
    # Without this the library chooses the order of map keys.
    return bytes(example.SerializeToString(deterministic=True))


def _stored(array: Array) -> list[bytes]:
    """Return raw numbers as one value, and texts as a value each."""
    return array.ravel().tolist() if array.dtype == object else [array.tobytes()]


def parse(records: Any, features: Sequence[Feature]) -> dict[str, Any]:
    """Parse a vector of records into batched tensors.

    Args:
        records: string tensor [n]; a static n gives static shapes.
        features: the features of the records.

    Returns:
        Name -> tensor [n, *feature.shape] of the feature's dtype.
    """
    found = extract(records, features)
    return {feature.name: decode(found[feature.name], feature) for feature in features}


def extract(records: Any, features: Sequence[Feature]) -> dict[str, Any]:
    """Extract the values from a vector of records, without decoding them.

    Args:
        records: string tensor [n].
        features: the features of the records.

    Returns:
        Name -> string tensor [n] for the encodings raw and image; string, int64 or float32 tensor [n, *feature.shape]
        for all others.

    Raises:
        tf.errors.InvalidArgumentError: a record lacks a feature, or has values of another type or number.
    """
    found = tf.io.parse_example(records, {feature.record_key: _wanted(feature) for feature in features})
    return {feature.name: found[feature.record_key] for feature in features}


def decode(found: Any, feature: Feature) -> Any:
    """Decode a tensor that `extract` returned to [n, *feature.shape] of the feature's dtype."""
    if feature.encoding == "raw":
        return _numbers(found, feature)
    if feature.encoding == "text":
        return found
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
    return tf.io.FixedLenFeature(feature.shape if feature.encoding == "text" else [], tf.string)


def _numbers(raw: Any, feature: Feature) -> Any:
    dtype = tf.as_dtype(feature.dtype)
    if 0 in feature.shape:
        return tf.zeros([tf.size(raw), *feature.shape], dtype)
    values = tf.io.decode_raw(raw, tf.as_dtype(_READ_AS.get(feature.dtype, feature.dtype)))
    if feature.dtype in _READ_AS:
        values = tf.bitcast(values, dtype)
    return tf.reshape(values, [-1 if raw.shape[0] is None else raw.shape[0], *feature.shape])
