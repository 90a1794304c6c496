"""Reads the examples that a model is evaluated on with `tf.data`, each exactly once; see `reader.py`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef
from tasks.foundation.dataset.held_out import Part
from tasks.foundation.dataset.manifest import load_manifest
from tasks.foundation.dataset.record_batches import Plan, finished, parsed, part_of, records_in, windows_of
from tasks.foundation.dataset.shard_verification import VerifiedShards
from tasks.foundation.dataset.transformed_batches import SeededFunction, transformed_validation
from tasks.foundation.storage.base import Storage


def validation_dataset(
    storage: Storage,
    ref: DatasetRef,
    *,
    batch_size: int,
    part: Part = "validation",
    function: SeededFunction | None = None,
    seed: int = 0,
) -> Any:
    """Return full batches of the validation examples, in the order of the manifest, each example once.

    The last `validation_examples % batch_size` examples are left for `validation_remainder`.

    Args:
        storage: the storage root; `ref.folder` is relative to it.
        ref: the prepared dataset.
        batch_size: examples per batch.
        part: train: the examples of a dataset that is an own set as a whole, see `evaluation_sets.py`.
        function: transforms each example; None: examples as they were prepared.
        seed: the run's seed; `function` gets seeds that follow from it and the example's index.

    Returns:
        A finite tf.data.Dataset of tuples as in `training_dataset`, with static shapes.

    Raises:
        ValueError: batch_size is below 1.
        DamagedDataset: as in `training_dataset`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    manifest = load_manifest(storage, ref)
    reading = _ValidationReading(part=part, function=function, seed=seed)
    return _validation(storage.at(ref.folder), manifest, reading, skip=0, batch_size=batch_size)


def validation_remainder(
    storage: Storage,
    ref: DatasetRef,
    *,
    batch_size: int,
    part: Part = "validation",
    function: SeededFunction | None = None,
    seed: int = 0,
) -> Any | None:
    """Return one batch of the last `validation_examples % batch_size` examples; None if there are none.

    Args and errors: as in `validation_dataset`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    manifest = load_manifest(storage, ref)
    examples = manifest.validation_examples if part == "validation" else manifest.train_examples
    remainder = examples % batch_size
    if not remainder:
        return None
    reading = _ValidationReading(part=part, function=function, seed=seed)
    at, skip = storage.at(ref.folder), examples - remainder
    return _validation(at, manifest, reading, skip=skip, batch_size=remainder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ValidationReading:
    """Which examples are read for an evaluation, and how they are transformed; see `validation_dataset`."""

    part: Part
    function: SeededFunction | None
    seed: int


def _validation(
    storage: Storage, manifest: DatasetManifest, reading: _ValidationReading, *, skip: int, batch_size: int
) -> Any:
    part, function = reading.part, reading.function

    def plans() -> Iterator[Plan]:
        begin = 0
        planned = []
        for shard in manifest.validation if part == "validation" else manifest.train:
            skip_here = max(skip - begin, 0)
            begin += shard.examples
            if skip_here < shard.examples:
                planned.append(([shard], skip_here))
        with VerifiedShards(storage, plans_ahead=storage.transfers) as shards:
            for paths, chosen, skip_here in shards.read_ahead(planned):
                yield paths, *part_of(manifest, chosen, part), (0, 0), (skip_here, 0)

    def read(paths: Any, count: Any, part_positions: Any, _seed: Any, taken: Any) -> Any:
        if manifest.held_out is None:
            return records_in(paths).skip(taken[0]).batch(count)
        return records_in(paths).batch(count).map(lambda records: tf.gather(records, part_positions[taken[0] :]))

    dataset = windows_of(plans).flat_map(read).rebatch(batch_size, drop_remainder=True)
    dataset = parsed(dataset, manifest, batch_size)
    if function is not None:
        dataset = transformed_validation(dataset, function, seed=reading.seed, skip=skip, batch_size=batch_size)
    return finished(dataset)
