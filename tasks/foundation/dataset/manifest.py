"""A dataset's manifest: where it is, what binds it to its shards, and how it is read."""

import hashlib
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np

from tasks.foundation.contracts.base import another_version
from tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, Feature, HeldOut, ShardRecord
from tasks.foundation.dataset.features import Array, unflatten
from tasks.foundation.errors import DamagedDataset, FileMissing
from tasks.foundation.messages import listed
from tasks.foundation.storage.base import Storage

REMEDY = "delete that folder and run again: it is prepared anew from the source"


def dataset_folder(digest: str) -> str:
    """The dataset's folder, relative to the storage root."""
    return f"datasets/{digest}"


def manifest_path(folder: str) -> str:
    """The manifest's path, relative to the storage root."""
    return f"{folder}/manifest.json"


def content_digest(
    features: Sequence[Feature],
    train: Sequence[ShardRecord],
    validation: Sequence[ShardRecord],
    held_out: HeldOut | None = None,
) -> str:
    """sha256 over what the examples look like and over every shard's name, count, size and checksum, in order.

    Of a file elsewhere only the name counts, not the folder: the same bytes in another place are the same dataset.
    """
    digest = hashlib.sha256()
    for part in (features, train, validation):
        for record in part:
            # Fields that came later count where they say something, so that older datasets keep their digest.
            digest.update(_without_place(record).model_dump_json(exclude_defaults=True).encode() + b"\n")
        digest.update(b"\n")
    if held_out is not None:
        digest.update(held_out.model_dump_json().encode() + b"\n")
    return digest.hexdigest()


def _without_place(record: Feature | ShardRecord) -> Feature | ShardRecord:
    if isinstance(record, ShardRecord) and record.is_elsewhere:
        return record.model_copy(update={"path": PurePosixPath(record.path).name})
    return record


def load_manifest(storage: Storage, ref: DatasetRef) -> DatasetManifest:
    """The manifest that `ref` points at.

    Args:
        storage: the root that `ref.folder` is relative to.
        ref: a prepared dataset.

    Raises:
        DamagedDataset: it is not there, not readable, disagrees with itself, or is another than the one referred to.
    """
    manifest = read_manifest(storage, ref.folder)
    if manifest.content_digest != ref.content_digest:
        raise DamagedDataset(
            f"{storage.uri}/{ref.folder}: holds the dataset {manifest.content_digest[:12]}, the run was begun on "
            f"{ref.content_digest[:12]}; put the one from before back, or begin a new run"
        )
    return manifest


def read_manifest(storage: Storage, folder: str) -> DatasetManifest:
    """The manifest in a dataset's folder, whatever dataset it is.

    Raises:
        DamagedDataset: it is not there, not readable or disagrees with itself.
        AnotherVersion: a newer Baton wrote it.
    """
    where = f"{storage.uri}/{manifest_path(folder)}"
    try:
        data = storage.read(manifest_path(folder))
    except FileMissing as fault:
        raise DamagedDataset(f"{where} is not there: no dataset was prepared, or it was deleted; run again") from fault
    manifest = DatasetManifest.from_json(data, where=where, error=DamagedDataset)
    found = content_digest(manifest.features, manifest.train, manifest.validation, manifest.held_out)
    if found != manifest.content_digest:
        unknown = DatasetManifest.unknown_keys(data)
        if unknown:  # which the digest may cover
            why = f"it has unknown keys ({listed(unknown)}), and without them its content_digest is another"
            raise another_version(where, DatasetManifest, why)
        raise DamagedDataset(f"{where}: its content_digest is not that of the shards it lists; {REMEDY}")
    return manifest


def zero_batch(manifest: DatasetManifest, size: int) -> tuple[Array | dict[str, Array], ...]:
    """A batch of zeros as `train_step` takes it, to make a model's variables exist.

    Args:
        manifest: of the dataset.
        size: examples in the batch.

    Returns:
        (x,), (x, y) or (x, y, sample_weight) of NumPy arrays [size, *feature.shape], or flat dicts of them.
    """
    return zeros_of(manifest.features, size)


def zeros_of(features: Sequence[Feature], size: int) -> tuple[Array | dict[str, Array], ...]:
    """As `zero_batch`, of examples that hold these features."""
    return unflatten({feature.name: np.zeros((size, *feature.shape), feature.dtype) for feature in features})
