"""Streams of the records that training reads, without end: of one dataset, or of a mixture of several."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef
from tasks.foundation.dataset import order
from tasks.foundation.dataset.decoded_examples import DecodedExamples, row_numbers
from tasks.foundation.dataset.manifest import load_manifest, ref_of_source
from tasks.foundation.dataset.mixing import Mixing, source_seed
from tasks.foundation.dataset.record_batches import Plan, part_of, records_in, windows_of
from tasks.foundation.dataset.shard_verification import VerifiedShards
from tasks.foundation.dataset.worker_plans import PlannedRecords, labels_with, planned_windows, windows_with
from tasks.foundation.storage.base import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStart:
    """What the order of a stream follows from, and where it begins.

    Attributes:
        seed: the run's seed.
        window_shards: shards that are read and permuted together.
        first_example: position of the first record.
        epoch_examples: examples after which an epoch ends; None: all.
        shuffle: whether shards and examples are permuted; False: they stay in the order of the source.
    """

    seed: int
    window_shards: int
    first_example: int
    epoch_examples: int | None = None
    shuffle: bool = True

    def indices(self, size: Any, window_seed: Any) -> Any:
        """Return the order of the examples of a window, an int64 tensor [size]."""
        return order.shuffled_indices(size, window_seed) if self.shuffle else tf.range(tf.cast(size, tf.int64))


def training_records(
    storage: Storage,
    ref: DatasetRef,
    manifest: DatasetManifest,
    start: StreamStart,
    *,
    chunk: int,
    decoded: DecodedExamples | None = None,
    planned: PlannedRecords | None = None,
) -> Any:
    """Return a dataset of vectors [chunk]: the records of the training examples, strings, in order.

    Args:
        storage: the storage root.
        ref: the prepared dataset.
        manifest: its manifest.
        start: where the stream begins.
        chunk: records in a vector.
        decoded: the examples in memory; then the vectors hold their rows, int64, in place of records.
        planned: what another host reads without Python; None: this process reads, without end.
    """
    if manifest.mixture is not None:
        return _mixed_records(storage, manifest, start, decoded, planned).batch(chunk, drop_remainder=True)
    if decoded is not None:
        return windows_of_rows(manifest, start, decoded.first_rows[0]).rebatch(chunk, drop_remainder=True)
    return _windows_of_records(storage, ref.folder, manifest, start, planned).rebatch(chunk, drop_remainder=True)


def windows_of_rows(manifest: DatasetManifest, start: StreamStart, first_row: int) -> Any:
    """Return a dataset of int64 vectors, one for each window, as `windows_of_records` of rows in memory.

    Args:
        manifest: of a dataset with shards.
        start: where the stream begins.
        first_row: number of the dataset's first row.
    """
    rows = row_numbers(manifest, first_row)

    def plans() -> Iterator[Any]:
        for window in _windows(manifest, start):
            yield np.concatenate([rows[shard] for shard in window.shards]), window.seed, (window.skip, window.end)

    def read(of_window: Any, window_seed: Any, taken: Any) -> Any:
        return tf.gather(of_window, start.indices(tf.size(of_window), window_seed)[taken[0] : taken[1]])

    signature = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([2], tf.int64), tf.TensorSpec([2], tf.int64))
    return tf.data.Dataset.from_generator(plans, output_signature=signature).map(read)


def _windows_of_records(
    storage: Storage, folder: str, manifest: DatasetManifest, start: StreamStart, planned: PlannedRecords | None
) -> Any:
    """Return a dataset of string vectors, one for each window of a dataset with shards."""
    if planned is None:
        plans = _verified_windows(storage.at(folder), manifest, start)
    else:
        found = windows_with(_windows(manifest, start), planned.records)
        plans = planned_windows(f"{planned.root}/{folder}", manifest, found)

    def read(paths: Any, count: Any, part_positions: Any, window_seed: Any, taken: Any) -> Any:
        if manifest.held_out is None:
            chosen = start.indices(count, window_seed)[taken[0] : taken[1]]
        else:
            indices = start.indices(tf.size(part_positions), window_seed)
            chosen = tf.gather(part_positions, indices[taken[0] : taken[1]])
        return records_in(paths).batch(count).map(lambda records: tf.gather(records, chosen))

    return plans.flat_map(read).prefetch(1)


def _verified_windows(at: Storage, manifest: DatasetManifest, start: StreamStart) -> Any:
    """Return a dataset of plans without end, whose shards are verified and on this machine."""

    def plans() -> Iterator[Plan]:
        planned = (([manifest.train[shard] for shard in window.shards], window) for window in _windows(manifest, start))
        with VerifiedShards(at) as shards:
            for paths, chosen, window in shards.read_ahead(planned):
                yield paths, *part_of(manifest, chosen, "train"), window.seed, (window.skip, window.end)

    return windows_of(plans)


def _windows(manifest: DatasetManifest, start: StreamStart) -> Iterator[order.Window]:
    return order.windows(
        [shard.examples for shard in manifest.train],
        seed=start.seed,
        window_shards=start.window_shards,
        first_example=start.first_example,
        epoch_examples=start.epoch_examples,
        shuffle=start.shuffle,
    )


def _mixed_records(
    storage: Storage,
    manifest: DatasetManifest,
    start: StreamStart,
    decoded: DecodedExamples | None,
    planned: PlannedRecords | None,
) -> Any:
    """Return a dataset of single records, or of rows in memory: each source's stream, in the order of the mixture."""
    mixture = manifest.mixture
    if mixture is None or start.epoch_examples is None:
        raise ValueError("not a mixture, or its epoch is not known")
    mixing = Mixing.of(mixture, seed=start.seed, epoch_examples=start.epoch_examples)
    of_sources: list[PlannedRecords | None] = [None] * len(mixture.sources)
    if planned is None:
        chosen = _items(lambda: (found for found, _ in mixing.labels_from(start.first_example)), np.int64)
        kept = _items(lambda: (found for _, found in mixing.labels_from(start.first_example)), np.bool_)
    else:
        labels, are_kept = labels_with(mixing.labels_from(start.first_example), planned.records)
        chosen, kept = (tf.data.Dataset.from_tensor_slices(found) for found in (labels, are_kept))
        counts = np.bincount(labels, minlength=len(mixture.sources)).tolist()
        of_sources = [PlannedRecords(root=planned.root, records=count) for count in counts]
    streams = []
    for number, (source, first) in enumerate(
        zip(mixture.sources, mixing.taken_before(start.first_example), strict=True)
    ):
        own = StreamStart(
            seed=source_seed(start.seed, number),
            window_shards=start.window_shards,
            first_example=first,
            shuffle=start.shuffle,
        )
        plain = load_manifest(storage, ref_of_source(source))
        if decoded is None:
            streams.append(_windows_of_records(storage, source.folder, plain, own, of_sources[number]).unbatch())
        else:
            streams.append(windows_of_rows(plain, own, decoded.first_rows[number]).unbatch())
    records = tf.data.Dataset.choose_from_datasets(streams, chosen, stop_on_empty_dataset=False)
    if not mixing.leaves_out:
        return records
    return tf.data.Dataset.zip(records, kept).filter(lambda _, keep: keep).map(lambda record, _: record)


def _items(vectors: Callable[[], Iterator[Any]], dtype: Any) -> Any:
    """Return a dataset of the items of the vectors that a function yields."""
    return tf.data.Dataset.from_generator(vectors, output_signature=tf.TensorSpec([None], dtype)).unbatch()
