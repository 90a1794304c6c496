"""Reads and checks a dataset's manifest, and says which of its examples are held out for validation.

A seeded hash of an example's index in the source decides what is held out, or its place, or its group.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from tasks.foundation.contracts.data_spec import MixedSource
from tasks.foundation.contracts.dataset import (
    PREPARE_AGAIN,
    DatasetManifest,
    DatasetRef,
    Feature,
    HeldOut,
    ShardRecord,
    checked_manifest,
)
from tasks.foundation.dataset.features import Array, unflatten, zeros
from tasks.foundation.dataset.order import hashes, unit_interval
from tasks.foundation.errors import DamagedDataset, FileMissing, FileTooLarge
from tasks.foundation.storage.interface import Storage


def dataset_folder(digest: str) -> str:
    """Return the dataset's folder, relative to the storage root."""
    return f"datasets/{digest}"


def manifest_path(folder: str) -> str:
    """Return the manifest's path, relative to the storage root."""
    return f"{folder}/manifest.json"


# A run has one dataset, perhaps a mixture of several, and perhaps a validation and a test set of its own.
_KNOWN_AT_MOST = 32
_FILES_NAMED = 10


class KnownManifest:
    """The manifests that this process read last."""

    def __init__(self) -> None:
        self._manifests: dict[tuple[str, str], DatasetManifest] = {}

    def get(self, storage: Storage, ref: DatasetRef) -> DatasetManifest | None:
        """Return the manifest of a dataset; None if it is not known."""
        known = self._manifests.get((storage.uri, ref.folder))
        return known if known is not None and known.content_digest == ref.content_digest else None

    def remember(self, storage: Storage, folder: str, manifest: DatasetManifest) -> None:
        """Remember a manifest that was read and checked."""
        self._manifests.pop((storage.uri, folder), None)
        self._manifests[storage.uri, folder] = manifest
        while len(self._manifests) > _KNOWN_AT_MOST:
            self._manifests.pop(next(iter(self._manifests)))


_KNOWN = KnownManifest()


def load_manifest(storage: Storage, ref: DatasetRef) -> DatasetManifest:
    """Return the manifest that `ref` refers to. A process reads it once: the digest says what is in it.

    Args:
        storage: the storage root; `ref.folder` is relative to it.
        ref: a prepared dataset.

    Raises:
        DamagedDataset: the manifest is missing, unreadable or inconsistent, or belongs to another dataset.
    """
    known = _KNOWN.get(storage, ref)
    if known is not None:
        return known
    manifest = read_manifest(storage, ref.folder)
    if manifest.content_digest != ref.content_digest:
        raise DamagedDataset(
            f"{storage.uri}/{ref.folder}: holds the dataset {manifest.content_digest[:12]}, but the run started with "
            f"{ref.content_digest[:12]}; restore the dataset that the run started with, or start a new run"
        )
    return manifest


def read_manifest(storage: Storage, folder: str) -> DatasetManifest:
    """Read the manifest in a dataset's folder, whatever was read before, and check its content digest.

    Raises:
        DamagedDataset: the manifest is missing, unreadable or inconsistent.
        AnotherVersion: a newer Baton wrote it.
    """
    where = f"{storage.uri}/{manifest_path(folder)}"
    try:
        data = storage.read(manifest_path(folder))
    except FileMissing as fault:
        raise DamagedDataset(f"{where} is missing: the dataset was not prepared, or was deleted; run again") from fault
    except FileTooLarge as fault:
        raise DamagedDataset(f"{fault}; {PREPARE_AGAIN}") from fault
    manifest = checked_manifest(data, where=where)
    _KNOWN.remember(storage, folder, manifest)
    return manifest


def plain_datasets(storage: Storage, manifest: DatasetManifest, folder: str) -> tuple[tuple[str, DatasetManifest], ...]:
    """Return folder and manifest of each dataset with shards: those that a mixture names, or the dataset itself.

    Args:
        storage: the storage root.
        manifest: of the dataset.
        folder: of the dataset, relative to the root.

    Raises:
        DamagedDataset: as `load_manifest`.
    """
    if manifest.mixture is None:
        return ((folder, manifest),)
    return tuple((each.folder, load_manifest(storage, ref_of_source(each))) for each in manifest.mixture.sources)


def changed_files(storage: Storage, recorded: object, dataset: DatasetRef) -> list[str]:
    """Return lines that name the files read in place that differ between two datasets.

    Args:
        storage: the storage root.
        recorded: folder of the dataset that a run began with, as its identity has it.
        dataset: the one that its run file prepares now.
    """
    try:
        before, now = (_files_in_place(storage, folder) for folder in (str(recorded), dataset.folder))
    except DamagedDataset:  # deleted since
        return []
    changed = [path for path in before if path in now and before[path] != now[path]]
    lines = [f"{path}: changed since" for path in changed]
    lines += [f"{path}: no longer read" for path in before if path not in now]
    lines += [f"{path}: not read before" for path in now if path not in before]
    return lines[:_FILES_NAMED]


def _files_in_place(storage: Storage, folder: str) -> dict[str, set[str]]:
    """Return the checksums of the ranges of each file outside the storage."""
    found: dict[str, set[str]] = {}
    for _, manifest in plain_datasets(storage, read_manifest(storage, folder), folder):
        for shard in (*manifest.train, *manifest.validation):
            if shard.is_external:
                found.setdefault(shard.path, set()).add(f"{shard.begin} {shard.crc32c}")
    return found


def ref_of_source(source: MixedSource) -> DatasetRef:
    """Return the dataset that is a source of a mixture."""
    return DatasetRef(
        folder=source.folder,
        content_digest=source.content_digest,
        train_examples=source.train_examples,
        validation_examples=source.validation_examples,
        already_prepared=True,
    )


def zero_examples(features: Sequence[Feature], size: int) -> tuple[Array | dict[str, Array], ...]:
    """Return a batch of zeros as `train_step` takes it. Building a model with it creates all variables.

    Args:
        features: of the examples.
        size: examples in the batch.

    Returns:
        (x,), (x, y) or (x, y, sample_weight) of NumPy arrays [size, *feature.shape], or flat dicts or tuples of them.
    """
    return unflatten({feature.name: zeros((size, *feature.shape), feature.dtype) for feature in features})


Part = Literal["train", "validation"]

_PURPOSE = "validation"


def held_out_values(seed: int, begin: int, end: int) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) per example of [begin, end); an example is held out if it is below the fraction."""
    return unit_interval(hashes(_PURPOSE, seed, begin, end))


def held_out_mask(rule: HeldOut, begin: int, end: int) -> npt.NDArray[np.bool_]:
    """Return, for each example of [begin, end), whether it is held out for validation."""
    held_out = held_out_values(rule.seed, begin, end) < rule.fraction
    if rule.exception is not None and begin <= rule.exception < end:
        held_out[rule.exception - begin] ^= True
    return held_out


def positions_of_part(part: Part, rule: HeldOut, shards: Sequence[ShardRecord]) -> npt.NDArray[np.int64]:
    """Return the positions of a part's examples among all records of some shards, read in order.

    Args:
        part: train or validation.
        rule: the dataset's rule.
        shards: in reading order.

    Returns:
        Ascending positions from 0, one for each example of the part.
    """
    masks = [held_out_mask(rule, shard.first, shard.first + shard.records_held) for shard in shards]
    return np.flatnonzero(np.concatenate(masks) == (part == "validation")).astype(np.int64)
