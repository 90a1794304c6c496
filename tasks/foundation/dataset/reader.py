"""Reads prepared datasets with `tf.data`: training data without end. `validation_reader.py` reads what is held out.

Python only makes the plan, one element per window: which shards, in which order, and how many examples to skip.
TensorFlow reads, permutes, batches and parses. Iterate inside `reading_errors.original_read_errors` to get Baton's
errors.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef
from tasks.foundation.contracts.epoch_length import EpochLength
from tasks.foundation.dataset import order
from tasks.foundation.dataset.features import unflatten
from tasks.foundation.dataset.manifest import load_manifest
from tasks.foundation.dataset.record_batches import Plan, finished, has_images, parsed, part_of, records_in, windows_of
from tasks.foundation.dataset.shard_verification import VerifiedShards
from tasks.foundation.dataset.shards import parse
from tasks.foundation.dataset.transformed_batches import (
    Decoding,
    Layout,
    TrainingFunctions,
    transformed_training,
)
from tasks.foundation.errors import AcceleratorError
from tasks.foundation.storage.base import Storage

_PARSE_EXAMPLES = 4096
_PARSE_BYTES = 8 << 20


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
    drop_remainder: bool = False,
    functions: TrainingFunctions | None = None,
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
        drop_remainder: whether an epoch ends with its last whole batch.
        functions: transforms of the examples and batches; None: examples as they were prepared.

    Returns:
        A deterministic tf.data.Dataset of (x,), (x, y) or (x, y, sample_weight), each tensor
        [global_batch_size / (hosts * local_replicas), *shape] with a static shape: that of the feature, or of what
        `functions` return.

    Raises:
        AcceleratorError: the batch is not divisible by the number of replicas, or there is no such host.
        DamagedDataset: the manifest belongs to another dataset. While iterating: a shard differs from the manifest.
    """
    _check_division(global_batch_size, host=host, hosts=hosts, local_replicas=local_replicas)
    manifest = load_manifest(storage, ref)
    at = storage.at(ref.folder)
    epoch = EpochLength(
        train_examples=manifest.train_examples, global_batch_size=global_batch_size, drop_remainder=drop_remainder
    )

    def plans() -> Iterator[Plan]:
        counts = [shard.examples for shard in manifest.train]
        first_example = first_batch * global_batch_size
        windows = order.windows(
            counts,
            seed=seed,
            window_shards=window_shards,
            first_example=first_example,
            epoch_examples=epoch.examples,
        )
        planned = (([manifest.train[shard] for shard in window.shards], window) for window in windows)
        with VerifiedShards(at) as shards:
            for paths, chosen, window in shards.read_ahead(planned):
                yield paths, *part_of(manifest, chosen, "train"), window.seed, (window.skip, window.end)

    def read(paths: Any, count: Any, part_positions: Any, window_seed: Any, taken: Any) -> Any:
        if manifest.held_out is None:
            chosen = order.shuffled_indices(count, window_seed)[taken[0] : taken[1]]
        else:
            shuffled = order.shuffled_indices(tf.size(part_positions), window_seed)
            chosen = tf.gather(part_positions, shuffled[taken[0] : taken[1]])
        return records_in(paths).batch(count).map(lambda records: tf.gather(records, chosen))

    per_host = global_batch_size // hosts
    # Parse several batches at once: for small ones, starting the operations would take most of the time.
    batches = max(1, _examples_to_parse(manifest, window_shards) // global_batch_size)

    def slices_of_host(records: Any) -> Any:
        return tf.reshape(
            tf.reshape(records, [batches, hosts, per_host])[:, host],
            [batches * per_host],
        )

    dataset = windows_of(plans).flat_map(read).prefetch(1).rebatch(batches * global_batch_size, drop_remainder=True)
    if functions is not None:
        layout = Layout(
            first_example=first_batch * global_batch_size,
            chunk_batches=batches,
            global_batch_size=global_batch_size,
            host=host,
            hosts=hosts,
            local_replicas=local_replicas,
        )
        decoding = Decoding(
            batch=lambda records: unflatten(parse(records, manifest.features)), one_by_one=has_images(manifest)
        )
        return finished(transformed_training(dataset, functions, decoding, layout, seed=seed))
    dataset = parsed(dataset.map(slices_of_host), manifest, batches * per_host)
    return finished(dataset.rebatch(per_host // local_replicas, drop_remainder=True))


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


def _examples_to_parse(manifest: DatasetManifest, window_shards: int) -> int:
    """Examples to parse at once: at most a window, so that the first batch waits for one or two windows only."""
    if has_images(manifest):
        return 1  # decoded images are much larger than their records
    first = manifest.train[0]
    in_window = min(first.examples * window_shards, manifest.train_examples)
    return min(_PARSE_EXAMPLES, _PARSE_BYTES * first.records_held // first.size, in_window)
