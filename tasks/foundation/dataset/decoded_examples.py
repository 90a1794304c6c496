"""Training examples in host memory, decoded (`data.cache: memory`): reading becomes a lookup by row.

Rows are numbered by dataset, shard and record. So the order, a seek and the bits are those of reading the records.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, Feature, ShardRecord
from tasks.foundation.dataset.features import STRING, Array, zeros
from tasks.foundation.dataset.manifest import load_manifest, plain_datasets, positions_of_part
from tasks.foundation.dataset.shard_verification import VerifiedShards, original_read_errors
from tasks.foundation.dataset.shards import parse, records_in
from tasks.foundation.machine.processes import available_bytes
from tasks.foundation.storage.base import Storage

_DECODE_TOGETHER = 256
# Of the memory that is free now: the rest is for batches, snapshots and what is copied meanwhile.
_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class DecodedExamples:
    """All training examples of a dataset.

    Attributes:
        tensors: by feature, [rows, ...], in the memory of the host.
        first_rows: number of the first row of each dataset that a mixture names; (0,) for others.
    """

    tensors: dict[str, Any]
    first_rows: tuple[int, ...]

    def take(self, rows: Any) -> dict[str, Any]:
        """Return the features of some rows, int64 [n], as tensors [n, ...]."""
        return {name: tf.gather(values, rows) for name, values in self.tensors.items()}


class _Held:
    """The examples of the dataset that this process has decoded last; its segments use them again."""

    def __init__(self) -> None:
        self.of: tuple[str, str] | None = None
        self.examples: DecodedExamples | None = None


_HELD = _Held()


def decoded_bytes(storage: Storage, ref: DatasetRef) -> int:
    """Return how much memory the decoded training examples take, in bytes.

    Args:
        storage: the storage root.
        ref: the prepared dataset.
    """
    manifest = load_manifest(storage, ref)
    of_example = sum(math.prod(each.shape) * _item_bytes(each) for each in manifest.features)
    of_text = sum(shard.size for _, plain in plain_datasets(storage, manifest, ref.folder) for shard in plain.train)
    has_text = any(each.dtype == STRING for each in manifest.features)
    return of_example * _rows_of(storage, ref) + has_text * of_text


def fits_into_memory(storage: Storage, ref: DatasetRef) -> bool:
    """Whether the decoded training examples fit into the memory that is free now, with as much to spare."""
    if _HELD.of == _key(storage, ref):
        return True
    available = available_bytes()
    return available is None or decoded_bytes(storage, ref) <= _SHARE * available


def decode_examples(storage: Storage, ref: DatasetRef) -> DecodedExamples:
    """Read and decode all training examples, unless this process holds them already.

    Args:
        storage: the storage root.
        ref: the prepared dataset.

    Raises:
        DamagedDataset: the manifest belongs to another dataset, or a shard differs from its manifest.
        StorageError: the store failed.
    """
    if _HELD.of == _key(storage, ref) and _HELD.examples is not None:
        return _HELD.examples
    _HELD.of = _HELD.examples = None  # frees the memory of the dataset before
    manifest = load_manifest(storage, ref)
    rows = _rows_of(storage, ref)
    values = {each.name: zeros((rows, *each.shape), each.dtype) for each in manifest.features}
    first_rows, row = [], 0
    for folder, plain in plain_datasets(storage, manifest, ref.folder):
        first_rows.append(row)
        for decoded in _decoded(storage.at(folder), plain):
            count = len(next(iter(decoded.values())))
            for name, array in decoded.items():
                values[name][row : row + count] = array
            row += count
    with tf.device("/CPU:0"):
        tensors = {name: tf.constant(values.pop(name)) for name in list(values)}
    examples = DecodedExamples(tensors, tuple(first_rows))
    _HELD.of, _HELD.examples = _key(storage, ref), examples
    return examples


def row_numbers(manifest: DatasetManifest, first_row: int) -> list[npt.NDArray[np.int64]]:
    """Return the rows of the training examples of each shard, in order.

    Args:
        manifest: of a dataset with shards.
        first_row: number of its first row.
    """
    counts = [shard.examples for shard in manifest.train]
    ends = first_row + np.cumsum(counts, dtype=np.int64)
    return [np.arange(end - count, end, dtype=np.int64) for count, end in zip(counts, ends, strict=True)]


def _decoded(at: Storage, manifest: DatasetManifest) -> Iterator[dict[str, Array]]:
    """Yield the training examples of a dataset, some at a time, in the order of shards and records."""

    def batch(records: Any) -> dict[str, Any]:
        if any(feature.encoding == "image" for feature in manifest.features):
            # One record at a time in parallel calls, because decoding an image is slow.
            one = parse(tf.reshape(records, [1]), manifest.features)
            return {name: value[0] for name, value in one.items()}
        return parse(records, manifest.features)

    has_images = any(feature.encoding == "image" for feature in manifest.features)
    work = tf.autograph.experimental.do_not_convert(batch)
    plans = (([shard], shard) for shard in manifest.train)
    with VerifiedShards(at) as shards, original_read_errors():
        for paths, _, shard in shards.read_ahead(plans):
            records = _of_training(records_in(paths), manifest, shard)
            if has_images:
                decoded = records.map(work, num_parallel_calls=tf.data.AUTOTUNE).batch(_DECODE_TOGETHER)
            else:
                decoded = records.batch(_DECODE_TOGETHER).map(work, num_parallel_calls=tf.data.AUTOTUNE)
            yield from decoded.as_numpy_iterator()


def _of_training(records: Any, manifest: DatasetManifest, shard: ShardRecord) -> Any:
    if manifest.held_out is None:
        return records
    chosen = np.zeros(shard.records_held, np.bool_)
    chosen[positions_of_part("train", manifest.held_out, [shard])] = True
    pairs = tf.data.Dataset.zip(records, tf.data.Dataset.from_tensor_slices(chosen))
    return pairs.filter(lambda _, keep: keep).map(lambda record, _: record)


def _rows_of(storage: Storage, ref: DatasetRef) -> int:
    manifest = load_manifest(storage, ref)
    return sum(plain.train_examples for _, plain in plain_datasets(storage, manifest, ref.folder))


def _item_bytes(feature: Feature) -> int:
    return 8 if feature.dtype == STRING else np.dtype(feature.dtype).itemsize


def _key(storage: Storage, ref: DatasetRef) -> tuple[str, str]:
    return f"{storage.uri}/{ref.folder}", ref.content_digest
