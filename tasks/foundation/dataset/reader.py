"""Reads prepared datasets with `tf.data`: training data without end, validation data exactly once.

Python only makes the plan, one element per window: which shards, in which order, and how many examples to skip.
TensorFlow reads, permutes, batches and parses. Iterate inside `reading_errors.original_read_errors` to get Baton's
errors.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, ShardRecord
from tasks.foundation.dataset import order
from tasks.foundation.dataset.features import unflatten
from tasks.foundation.dataset.held_out import Part, positions_of_part
from tasks.foundation.dataset.manifest import load_manifest, zero_batch
from tasks.foundation.dataset.shard_verification import VerifiedShards
from tasks.foundation.dataset.shards import parse
from tasks.foundation.errors import AcceleratorError
from tasks.foundation.storage.base import Storage

__all__ = ["load_manifest", "training_dataset", "validation_dataset", "validation_remainder", "zero_batch"]

_READ_BYTES = 8 << 20
_PARSE_EXAMPLES = 4096
_PARSE_BYTES = 8 << 20

# One plan: local paths of its shards; the number of records in them; positions of the part's records among them (empty
# if all records belong to the part); the seed of the permutation; permuted records to skip.
_Plan = tuple[list[str], int, npt.NDArray[np.int64], order.Seed, int]


def training_dataset(
    storage: Storage,
    ref: DatasetRef,
    *,
    seed: int,
    global_batch_size: int,
    window_shards: int,
    first_batch: int,
    host: int = 0,
    hosts: int = 1,
    local_replicas: int = 1,
) -> Any:
    """Return per-replica batches from global batch `first_batch` on, without end.

    Global batch first_batch + k consists of the elements [k * local_replicas, (k + 1) * local_replicas) of every host,
    ordered by host, then by replica. Its examples do not depend on the number of hosts or replicas.

    Args:
        storage: the storage root; `ref.folder` is relative to it.
        ref: the prepared dataset.
        seed: the run's seed.
        global_batch_size: examples per step, over all replicas.
        window_shards: shards that are read and permuted together, in memory; up to three windows are held.
        first_batch: index of the first global batch, from 0: step + skipped batches.
        host: index of this host, from 0.
        hosts: number of hosts that feed accelerators.
        local_replicas: replicas on each host.

    Returns:
        A deterministic tf.data.Dataset of (x,), (x, y) or (x, y, sample_weight), each tensor
        [global_batch_size / (hosts * local_replicas), *feature.shape] with a static shape.

    Raises:
        AcceleratorError: the batch is not divisible by the number of replicas, or there is no such host.
        DamagedDataset: the manifest belongs to another dataset. While iterating: a shard differs from the manifest.
    """
    _check_division(global_batch_size, host=host, hosts=hosts, local_replicas=local_replicas)
    manifest = load_manifest(storage, ref)
    at = storage.at(ref.folder)

    def plans() -> Iterator[_Plan]:
        counts = [shard.examples for shard in manifest.train]
        first_example = first_batch * global_batch_size
        windows = order.windows(counts, seed=seed, window_shards=window_shards, first_example=first_example)
        planned = (([manifest.train[shard] for shard in window.shards], window) for window in windows)
        with VerifiedShards(at) as shards:
            for paths, chosen, window in shards.read_ahead(planned):
                yield paths, *_part_of(manifest, chosen, "train"), window.seed, window.skip

    def read(paths: Any, count: Any, part_positions: Any, window_seed: Any, skip: Any) -> Any:
        if manifest.held_out is None:
            chosen = order.shuffled_indices(count, window_seed)[skip:]
        else:
            chosen = tf.gather(part_positions, order.shuffled_indices(tf.size(part_positions), window_seed)[skip:])
        return _records(paths).batch(count).map(lambda records: tf.gather(records, chosen))

    per_host = global_batch_size // hosts
    # Parse several batches at once: for small ones, starting the operations would take most of the time.
    batches = max(1, _examples_to_parse(manifest, window_shards) // global_batch_size)

    def slices_of_host(records: Any) -> Any:
        return tf.reshape(
            tf.reshape(records, [batches, hosts, per_host])[:, host],
            [batches * per_host],
        )

    dataset = _planned(plans).flat_map(read).prefetch(1).rebatch(batches * global_batch_size, drop_remainder=True)
    dataset = _parsed(dataset.map(slices_of_host), manifest, batches * per_host)
    return _finished(dataset.rebatch(per_host // local_replicas, drop_remainder=True))


def validation_dataset(storage: Storage, ref: DatasetRef, *, batch_size: int) -> Any:
    """Return full batches of the validation examples, in the order of the manifest, each example once.

    The last `validation_examples % batch_size` examples are left for `validation_remainder`.

    Args:
        storage: the storage root; `ref.folder` is relative to it.
        ref: the prepared dataset.
        batch_size: examples per batch.

    Returns:
        A finite tf.data.Dataset of tuples as in `training_dataset`, with static shapes.

    Raises:
        ValueError: batch_size is below 1.
        DamagedDataset: as in `training_dataset`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    manifest = load_manifest(storage, ref)
    return _validation(storage.at(ref.folder), manifest, skip=0, batch_size=batch_size)


def validation_remainder(storage: Storage, ref: DatasetRef, *, batch_size: int) -> Any | None:
    """Return one batch of the last `validation_examples % batch_size` examples; None if there are none.

    Args and errors: as in `validation_dataset`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    manifest = load_manifest(storage, ref)
    examples = manifest.validation_examples
    remainder = examples % batch_size
    if not remainder:
        return None
    return _validation(storage.at(ref.folder), manifest, skip=examples - remainder, batch_size=remainder)


def _check_division(batch: int, *, host: int, hosts: int, local_replicas: int) -> None:
    if not 0 <= host < hosts:
        raise AcceleratorError(f"host={host} is not one of {hosts} hosts; hosts are numbered from 0")
    if batch < 1:
        raise AcceleratorError(f"global_batch_size={batch} must be at least 1")
    replicas = hosts * local_replicas
    if batch % replicas:
        below = batch // replicas * replicas
        near = f"{below} or {below + replicas}" if below else str(replicas)
        raise AcceleratorError(
            f"global_batch_size={batch} is not divisible by {replicas} replicas ({hosts} hosts of {local_replicas}); "
            f"try {near}"
        )


def _validation(storage: Storage, manifest: DatasetManifest, *, skip: int, batch_size: int) -> Any:
    def plans() -> Iterator[_Plan]:
        begin = 0
        planned = []
        for shard in manifest.validation:
            skip_here = max(skip - begin, 0)
            begin += shard.examples
            if skip_here < shard.examples:
                planned.append(([shard], skip_here))
        with VerifiedShards(storage, plans_ahead=storage.transfers) as shards:
            for paths, chosen, skip_here in shards.read_ahead(planned):
                yield paths, *_part_of(manifest, chosen, "validation"), (0, 0), skip_here

    def read(paths: Any, count: Any, part_positions: Any, _seed: Any, skip_here: Any) -> Any:
        if manifest.held_out is None:
            return _records(paths).skip(skip_here).batch(count)
        return _records(paths).batch(count).map(lambda records: tf.gather(records, part_positions[skip_here:]))

    dataset = _planned(plans).flat_map(read).rebatch(batch_size, drop_remainder=True)
    return _finished(_parsed(dataset, manifest, batch_size))


def _part_of(manifest: DatasetManifest, shards: Sequence[ShardRecord], part: Part) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the number of records in shards, and the positions of the part's records; empty if all belong to it."""
    records = sum(shard.records_held for shard in shards)
    if manifest.held_out is None:
        return records, np.empty(0, np.int64)
    return records, positions_of_part(part, manifest.held_out, shards)


def _planned(plans: Callable[[], Iterator[_Plan]]) -> Any:
    signature = (
        tf.TensorSpec([None], tf.string),
        tf.TensorSpec([], tf.int64),
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([2], tf.int64),
        tf.TensorSpec([], tf.int64),
    )
    return tf.data.Dataset.from_generator(plans, output_signature=signature)


def _records(paths: Any) -> Any:
    return tf.data.TFRecordDataset(paths, buffer_size=_READ_BYTES)


def _parsed(dataset: Any, manifest: DatasetManifest, batch_size: int) -> Any:
    """Convert vectors of records to batches of examples, both of length `batch_size`."""
    together = 1 if _has_images(manifest) else batch_size

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


def _examples_to_parse(manifest: DatasetManifest, window_shards: int) -> int:
    """Examples to parse at once: at most a window, so that the first batch waits for one or two windows only."""
    if _has_images(manifest):
        return 1  # decoded images are much larger than their records
    first = manifest.train[0]
    in_window = min(first.examples * window_shards, manifest.train_examples)
    return min(_PARSE_EXAMPLES, _PARSE_BYTES * first.records_held // first.size, in_window)


def _has_images(manifest: DatasetManifest) -> bool:
    return any(feature.encoding == "image" for feature in manifest.features)


def _finished(dataset: Any) -> Any:
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.deterministic = True
    # The dataset is already sliced by host; a strategy must not slice it again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)
