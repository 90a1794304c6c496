"""Reads prepared datasets with `tf.data`: training data without end. `validation_reader.py` reads what is held out.

Python only makes the plan, one element per window: which shards, in which order, and how many examples to skip.
TensorFlow reads, permutes, batches and parses. Iterate inside `reading_errors.original_read_errors` to get Baton's
errors.
"""

from typing import Any

import tensorflow as tf

from tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef
from tasks.foundation.contracts.epoch_length import EpochLength
from tasks.foundation.dataset.decoded_examples import decode_examples
from tasks.foundation.dataset.features import unflatten
from tasks.foundation.dataset.manifest import load_manifest, plain_datasets
from tasks.foundation.dataset.record_batches import finished, has_images, parsed
from tasks.foundation.dataset.record_streams import StreamStart, training_records
from tasks.foundation.dataset.shards import parse
from tasks.foundation.dataset.transformed_batches import (
    Decoding,
    Layout,
    TrainingFunctions,
    transformed_training,
)
from tasks.foundation.dataset.worker_plans import PlannedRecords, WorkerFiles
from tasks.foundation.errors import AcceleratorError
from tasks.foundation.storage.base import Storage

_PARSE_EXAMPLES = 4096
_PARSE_BYTES = 8 << 20
# Looking a row up costs little, so that starting the operations matters for the smallest batches only.
_GATHER_EXAMPLES = 256


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
    shuffle: bool = True,
    functions: TrainingFunctions | None = None,
    in_memory: bool = False,
    worker: WorkerFiles | None = None,
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
        shuffle: whether each epoch has another order; False: that of the source.
        functions: transforms of the examples and batches; None: examples as they were prepared.
        in_memory: whether all examples are decoded into memory first. The batches are the same.
        worker: the dataset is for a host that runs no Python of Baton, and ends after its batches, which are the same;
            see `worker_plans.py`. Only this process reads manifests.

    Returns:
        A deterministic tf.data.Dataset of (x,), (x, y) or (x, y, sample_weight), each tensor
        [global_batch_size / (hosts * local_replicas), *shape] with a static shape: that of the feature, or of what
        `functions` return.

    Raises:
        AcceleratorError: the batch is not divisible by the number of replicas, there is no such host, or a host
            without Python cannot read the dataset.
        DamagedDataset: the manifest belongs to another dataset. While iterating: a shard differs from the manifest.
    """
    _check_division(global_batch_size, host=host, hosts=hosts, local_replicas=local_replicas)
    manifest = load_manifest(storage, ref)
    epoch = EpochLength(
        train_examples=manifest.train_examples, global_batch_size=global_batch_size, drop_remainder=drop_remainder
    )

    start = StreamStart(
        seed=seed,
        window_shards=window_shards,
        first_example=first_batch * global_batch_size,
        epoch_examples=epoch.examples,
        shuffle=shuffle,
    )
    per_host = global_batch_size // hosts
    # Parse several batches at once: for small ones, starting the operations would take most of the time.
    if in_memory and worker is not None:
        raise AcceleratorError("data.cache: memory: the memory of this process is not that of another host; remove it")
    decoded = decode_examples(storage, ref) if in_memory else None
    together = _GATHER_EXAMPLES if decoded else _examples_to_parse(storage, ref, manifest, window_shards)
    batches = max(1, together // global_batch_size)

    def slices_of_host(records: Any) -> Any:
        return tf.reshape(
            tf.reshape(records, [batches, hosts, per_host])[:, host],
            [batches * per_host],
        )

    chunk = batches * global_batch_size
    planned = None
    if worker is not None:  # whole chunks, so that the last planned batch is not lost with the remainder
        planned = PlannedRecords(root=worker.root, records=-(-worker.batches // batches) * chunk)
    dataset = training_records(storage, ref, manifest, start, chunk=chunk, decoded=decoded, planned=planned)
    if functions is not None:
        layout = Layout(
            first_example=first_batch * global_batch_size,
            chunk_batches=batches,
            global_batch_size=global_batch_size,
            host=host,
            hosts=hosts,
            local_replicas=local_replicas,
        )
        if decoded is None:
            decoding = Decoding(
                batch=lambda records: unflatten(parse(records, manifest.features)), one_by_one=has_images(manifest)
            )
        else:
            decoding = Decoding(batch=lambda rows: unflatten(decoded.take(rows)), one_by_one=False)
        return finished(transformed_training(dataset, functions, decoding, layout, seed=seed))
    if decoded is None:
        dataset = parsed(dataset.map(slices_of_host), manifest, batches * per_host)
    else:
        take = tf.autograph.experimental.do_not_convert(lambda rows: unflatten(decoded.take(slices_of_host(rows))))
        dataset = dataset.map(take, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
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


def _examples_to_parse(storage: Storage, ref: DatasetRef, manifest: DatasetManifest, window_shards: int) -> int:
    """Examples to parse at once: at most a window, so that the first batch waits for one or two windows only."""
    if has_images(manifest):
        return 1  # decoded images are much larger than their records
    found = [plain for _, plain in plain_datasets(storage, manifest, ref.folder)]
    in_window = sum(min(plain.train[0].examples * window_shards, plain.train_examples) for plain in found)
    of_size = min(_PARSE_BYTES * plain.train[0].records_held // plain.train[0].size for plain in found)
    return min(_PARSE_EXAMPLES, of_size, in_window)
