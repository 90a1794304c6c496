"""Batches of examples from the records of planned shards, with `tf.data`: what training and evaluation share."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks.foundation.contracts.dataset import DatasetManifest, ShardRecord
from tasks.foundation.dataset import order
from tasks.foundation.dataset.features import unflatten
from tasks.foundation.dataset.held_out import Part, positions_of_part
from tasks.foundation.dataset.shards import parse

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
