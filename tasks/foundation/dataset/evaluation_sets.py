"""Reads the set that a model is evaluated on, held-out examples or an own set, each example exactly once.

Training reads without end, see `read.py`; both read the same shards and decode them with the same functions.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from baton.tasks.foundation.contracts.data_spec import SetName, SetRef
from baton.tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef
from baton.tasks.foundation.dataset.column_streams import (
    RangeReader,
    Rows,
    has_columns,
    plans_in_order,
    rows_dataset,
    together,
)
from baton.tasks.foundation.dataset.manifest import Part, load_manifest, plain_datasets
from baton.tasks.foundation.dataset.model_inputs import SeededFunction, transformed_validation
from baton.tasks.foundation.dataset.shards import (
    Plan,
    VerifiedShards,
    finished,
    parsed,
    part_of,
    records_in,
    windows_of,
)
from baton.tasks.foundation.dataset.slice_input import constant_plans, unreadable_elsewhere
from baton.tasks.foundation.storage.interface import Storage

_PARSED_AT_ONCE = 4  # batches; parsing one is fast, and a host with a hundred threads need not hold a hundred


def set_batches(
    storage: Storage,
    ref: DatasetRef,
    *,
    on: SetName,
    batch_size: int,
    function: SeededFunction | None = None,
    seed: int = 0,
    on_server: bool = False,
) -> Any:
    """Return full batches of the examples of a set, in the order of the manifest, each example once.

    The last `examples % batch_size` examples are left for `set_remainder`.

    Args:
        storage: the storage root; folders of datasets are relative to it.
        batch_size: examples per batch, at least 1.
        function: transforms each example; None: examples as they were prepared.
        seed: the run's seed; `function` gets seeds that follow from it and the example's index.
        on_server: whether a TensorFlow server without Python reads them, which finds the storage root where it is here.

    Returns:
        A finite tf.data.Dataset of tuples as in `training_dataset`, with static shapes.

    Raises:
        AcceleratorError: a server cannot read the dataset.
        DamagedDataset: as in `training_dataset`.
    """
    where, part = place_of_set(ref, on)
    dataset = _batches(storage, where, part, skip=0, batch_size=batch_size, on_server=on_server)
    return _transformed(dataset, function, seed=seed, skip=0, batch_size=batch_size)


def set_remainder(
    storage: Storage,
    ref: DatasetRef,
    *,
    on: SetName,
    batch_size: int,
    function: SeededFunction | None = None,
    seed: int = 0,
) -> Any | None:
    """Return one batch of the examples that `set_batches` leaves; None if there are none. For arguments see there."""
    where, part = place_of_set(ref, on)
    manifest = load_manifest(storage, where)
    examples = _examples_of(manifest, part)
    remainder = examples % batch_size
    if not remainder:
        return None
    skip = examples - remainder
    dataset = _batches(storage, where, part, skip=skip, batch_size=remainder)
    return _transformed(dataset, function, seed=seed, skip=skip, batch_size=remainder)


def all_batches(storage: Storage, ref: DatasetRef, *, batch_size: int) -> Iterator[Any]:
    """Yield all examples of a dataset as batches of NumPy arrays, in the order of the manifest; some may be smaller."""
    manifest = load_manifest(storage, ref)
    parts: tuple[Part, ...] = ("train", "validation")
    for part in parts:
        examples = _examples_of(manifest, part)
        rest = examples % batch_size
        for skip, size, count in ((0, batch_size, examples // batch_size), (examples - rest, rest, bool(rest))):
            if count:
                yield from finished(
                    _batches(storage, ref, part, skip=skip, batch_size=size), autotuned=False
                ).as_numpy_iterator()


def _batches(
    storage: Storage, ref: DatasetRef, part: Part, *, skip: int, batch_size: int, on_server: bool = False
) -> Any:
    """Return batches of the examples of a dataset; of a mixture, those of one dataset after the other.

    Args:
        skip: examples to leave out at the begin.
        batch_size: examples per batch.
        on_server: see `set_batches`.
    """
    whole = load_manifest(storage, ref)
    datasets = plain_datasets(storage, whole, ref.folder)
    if has_columns(manifest for _, manifest in datasets):
        if on_server:
            raise unreadable_elsewhere(whole)
        readers = [
            RangeReader(storage=storage.at(folder), manifest=manifest, part=part, features=whole.features)
            for folder, manifest in datasets
        ]
        rows = partial(_rows, readers, skip, batch_size)
        return parsed(rows_dataset(rows, whole.features, batch_size), whole, batch_size, at_once=_PARSED_AT_ONCE)
    records, before = None, 0
    for folder, manifest in datasets:
        examples = _examples_of(manifest, part)
        skip_here = max(skip - before, 0)
        before += examples
        if skip_here < examples:
            own = _records(storage.at(folder), manifest, part, skip=skip_here, on_server=on_server)
            records = own if records is None else records.concatenate(own)
    folder, manifest = datasets[0]
    if records is None:
        records = _records(storage.at(folder), manifest, part, skip=skip)
    return parsed(records.rebatch(batch_size, drop_remainder=True), manifest, batch_size, at_once=_PARSED_AT_ONCE)


def _rows(readers: Sequence[RangeReader], skip: int, batch_size: int) -> Iterator[Rows]:
    """Yield the same examples where they are read by columns."""

    def pieces() -> Iterator[Rows]:
        before = 0
        for reader in readers:
            yield from reader.pieces(plans_in_order(reader.shards, max(skip - before, 0)), batch_size)
            before += sum(shard.examples for shard in reader.shards)

    return together(pieces(), batch_size)


def _transformed(batches: Any, function: SeededFunction | None, *, seed: int, skip: int, batch_size: int) -> Any:
    if function is not None:
        batches = transformed_validation(batches, function, seed=seed, skip=skip, batch_size=batch_size)
    return finished(batches, autotuned=False)  # each evaluation deletes its iterator


def _examples_of(manifest: DatasetManifest, part: Part) -> int:
    return manifest.validation_examples if part == "validation" else manifest.train_examples


def _records(storage: Storage, manifest: DatasetManifest, part: Part, *, skip: int, on_server: bool = False) -> Any:
    """Return a dataset of vectors of the records of a part, in the order of the manifest."""
    begin = 0
    planned = []
    for shard in manifest.validation if part == "validation" else manifest.train:
        skip_here = max(skip - begin, 0)
        begin += shard.examples
        if skip_here < shard.examples:
            planned.append(([shard], skip_here))

    def plans() -> Iterator[Plan]:
        with VerifiedShards(storage, plans_ahead=storage.transfers) as shards:
            for paths, chosen, skip_here in shards.read_ahead(planned):
                yield paths, *part_of(manifest, chosen, part), (0, 0), (skip_here, 0)

    def read(paths: Any, count: Any, part_positions: Any, _seed: Any, taken: Any) -> Any:
        if manifest.held_out is None:
            return records_in(paths).skip(taken[0]).batch(count)
        return records_in(paths).batch(count).map(lambda records: tf.gather(records, part_positions[taken[0] :]))

    if not on_server:
        return windows_of(plans).flat_map(read)
    found = [(shards, (0, 0), (skip_here, 0)) for shards, skip_here in planned]
    return constant_plans(storage, storage.uri, manifest, part, found).flat_map(read)


def place_of_set(ref: DatasetRef, on: SetName) -> tuple[DatasetRef, Part]:
    """Return the dataset that has the examples of a set, and the part of it that they are."""
    own = ref.own_set(on)
    if own is None:
        if on != "validation":
            raise ValueError(f"the dataset {ref.folder} has no {on} set")
        return ref, "validation"
    return dataset_of_set(own), "train"


def dataset_of_set(own: SetRef) -> DatasetRef:
    """Return the dataset that an own set is: all of its examples are in the part train."""
    return DatasetRef(
        folder=own.folder,
        content_digest=own.content_digest,
        train_examples=own.examples,
        validation_examples=0,
        already_prepared=True,
    )
