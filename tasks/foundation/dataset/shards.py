"""The shard format, and batches of examples from the records of planned shards: what training and evaluation share.

Shards are TFRecord files of `tf.train.Example`, one bytes value per feature; text has one per string. The value holds
the array's raw little-endian bytes. So every fixed-width dtype is preserved, and three operations per feature parse a
whole vector of records. Records that other tools wrote may hold lists of values, or JPEG and PNG images; preparation
and training decode them with the same function.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks.foundation.contracts.dataset import DatasetManifest, Feature, ShardRecord
from tasks.foundation.dataset import order
from tasks.foundation.dataset.features import Array, unflatten
from tasks.foundation.dataset.manifest import Part, positions_of_part

DTYPES = ("uint8", "float32")


def decode_image(data: Any, shape: Sequence[int], dtype: str) -> Any:
    """Decode one image to the given shape, on the CPU, with the same result in every process.

    An image of another size is resized (bilinear, with antialiasing); its aspect ratio is not kept. A grey image gets
    equal channels, a color image becomes grey, transparency is dropped, and the EXIF orientation is ignored. JPEG uses
    the accurate integer method, because TensorFlow's default method depends on the machine.

    Args:
        data: string tensor [], a JPEG or PNG file.
        shape: (height, width, channels), channels 1 or 3.
        dtype: uint8, in [0, 255]; or float32, in [0, 1].

    Returns:
        Tensor of that dtype, with a static shape.

    Raises:
        tf.errors.InvalidArgumentError: the image cannot be decoded.
    """
    height, width, channels = shape
    with tf.device("/CPU:0"):
        # decode_jpeg decodes PNG as well.
        image = tf.io.decode_jpeg(data, channels=channels, dct_method="INTEGER_ACCURATE")
        # An image that already has this size keeps every bit.
        image = tf.image.resize(image, (height, width), method="bilinear", antialias=True)
        image = tf.saturate_cast(tf.round(image), tf.uint8) if dtype == "uint8" else image / 255.0
        return tf.ensure_shape(image, (height, width, channels))


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


_READ_BYTES = 8 << 20

# One plan: local paths of its shards; the number of records in them; positions of the part's records among them (empty
# if all records belong to the part); the seed of the permutation; the permuted records to take, from
# the first number up to the second.
Plan = tuple[list[str], int, npt.NDArray[np.int64], order.Seed, tuple[int, int]]


def part_of(manifest: DatasetManifest, shards: Sequence[ShardRecord], part: Part) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the number of records in shards, and the positions of the part's records; empty if all belong to it."""
    records = sum(shard.records_held for shard in shards)
    if manifest.held_out is None:
        return records, np.empty(0, np.int64)
    return records, positions_of_part(part, manifest.held_out, shards)


def windows_of(plans: Callable[[], Iterator[Plan]]) -> Any:
    """Return a dataset of plans, made one by one."""
    signature = (
        tf.TensorSpec([None], tf.string),
        tf.TensorSpec([], tf.int64),
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([2], tf.int64),
        tf.TensorSpec([2], tf.int64),
    )
    return tf.data.Dataset.from_generator(plans, output_signature=signature)


def records_in(paths: Any) -> Any:
    """Return a dataset of the serialized examples in local files."""
    return tf.data.TFRecordDataset(paths, buffer_size=_READ_BYTES)


def parsed(dataset: Any, manifest: DatasetManifest, batch_size: int) -> Any:
    """Convert vectors of records to batches of examples, both of length `batch_size`."""
    together = 1 if has_images(manifest) else batch_size

    def batch(records: Any) -> tuple[Any, ...]:
        return unflatten(parse(tf.ensure_shape(records, [together]), manifest.features))

    def squeezed(record: Any) -> tuple[Any, ...]:
        return tuple(tf.nest.map_structure(lambda values: values[0], batch(record[tf.newaxis])))

    # The functions are plain Python; AutoGraph cannot convert them correctly.
    if together == batch_size:
        work = tf.autograph.experimental.do_not_convert(batch)
        return dataset.map(work, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    # Decoding an image is slow, so each example is decoded in its own parallel call; the order stays.
    work = tf.autograph.experimental.do_not_convert(squeezed)
    decoded = dataset.unbatch().map(work, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return decoded.batch(batch_size, drop_remainder=True)


def has_images(manifest: DatasetManifest) -> bool:
    """Whether examples have encoded images, which are decoded when they are read."""
    return any(feature.encoding == "image" for feature in manifest.features)


def finished(dataset: Any) -> Any:
    """Return the dataset with a buffer of batches, in its order, and never sliced by a strategy."""
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.deterministic = True
    # The dataset is already sliced by host; a strategy must not slice it again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)
