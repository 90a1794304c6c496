"""Reads the set that a model is evaluated on: held-out examples, or an own set, each example once."""

from typing import Any

from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.evaluation_sets import SetName, SetRef
from tasks.foundation.dataset.held_out import Part
from tasks.foundation.dataset.transformed_batches import SeededFunction
from tasks.foundation.dataset.validation_reader import validation_dataset, validation_remainder
from tasks.foundation.storage.base import Storage


def set_batches(
    storage: Storage,
    ref: DatasetRef,
    *,
    on: SetName,
    batch_size: int,
    function: SeededFunction | None = None,
    seed: int = 0,
) -> Any:
    """Return full batches of a set, see `validation_dataset`.

    Args:
        storage: the storage root; folders of datasets are relative to it.
        ref: the prepared dataset.
        on: the set.
        batch_size: examples per batch.
        function: transforms each example, see `validation_dataset`.
        seed: the run's seed.
    """
    where, part = place_of_set(ref, on)
    return validation_dataset(storage, where, batch_size=batch_size, part=part, function=function, seed=seed)


def set_remainder(
    storage: Storage,
    ref: DatasetRef,
    *,
    on: SetName,
    batch_size: int,
    function: SeededFunction | None = None,
    seed: int = 0,
) -> Any | None:
    """Return one batch of the examples that `set_batches` leaves, or None. For arguments see there."""
    where, part = place_of_set(ref, on)
    return validation_remainder(storage, where, batch_size=batch_size, part=part, function=function, seed=seed)


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
