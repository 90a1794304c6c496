"""Reads and checks a dataset's manifest, and says which of its examples are held out for validation.

A seeded hash of an example's index in the source decides what is held out, or its place, or its group.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from baton.tasks.foundation.contracts.data_spec import MixedSource
from baton.tasks.foundation.contracts.dataset import (
    PREPARE_AGAIN,
    DatasetManifest,
    DatasetRef,
    Feature,
    HeldOut,
    ShardRecord,
    checked_manifest,
)
from baton.tasks.foundation.dataset.features import Array, unflatten, zeros
from baton.tasks.foundation.dataset.order import hashes, unit_interval
from baton.tasks.foundation.errors import AnotherVersion, DamagedDataset, FileMissing, FileTooLarge, SourceError
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.text import listed, message


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
        folder: of the dataset, relative to the root.

    Raises:
        DamagedDataset: as `load_manifest`.
    """
    if manifest.mixture is None:
        return ((folder, manifest),)
    return tuple((each.folder, load_manifest(storage, ref_of_source(each))) for each in manifest.mixture.sources)


def changed_files(storage: Storage, recorded: Mapping[str, object], dataset: DatasetRef) -> list[str]:
    """Return lines that name the files that differ between two datasets and their validation sets.

    Args:
        recorded: the identity that a run began with, which has the folders of its sets.
        dataset: the one that its run file prepares now.
    """
    own = dataset.validation
    folders = [(recorded.get("data.folder"), dataset.folder)]
    folders += [] if own is None else [(recorded.get("data.validation_folder"), own.folder)]
    lines: list[str] = []
    for before, now in ((files_of(storage, str(one)), files_of(storage, other)) for one, other in folders):
        if before and now:
            lines += [f"{path}: changed since" for path in before if path in now and before[path] != now[path]]
            lines += [f"{path}: no longer read" for path in before if path not in now]
            lines += [f"{path}: not read before" for path in now if path not in before]
    return lines[:_FILES_NAMED]


def files_of(storage: Storage, folder: str) -> dict[str, set[str]]:
    """Return the checksums of each file that a dataset is known to be made from, and that is not in the storage.

    Files that are read in place have one for each range, those that a user's function opened one for all bytes; {} if
    the dataset cannot be read, perhaps because it was deleted.
    """
    found: dict[str, set[str]] = {}
    try:
        datasets = plain_datasets(storage, read_manifest(storage, folder), folder)
    except (DamagedDataset, AnotherVersion):
        return found
    for _, manifest in datasets:
        for shard in (*manifest.train, *manifest.validation):
            if shard.is_external:
                found.setdefault(shard.path, set()).add(f"{shard.begin} {shard.crc32c}")
        found |= {each.path: {each.sha256} for each in manifest.opened or ()}
    return found


def require_same_labels(
    features: Sequence[Feature], others: Sequence[Feature], *, where: str, elsewhere: str, within: bool = False
) -> None:
    """Refuse two sets of examples in which a number means two things: a text of a vocabulary, or a class.

    One may have more texts than the other, at the end. What has no names is not compared.

    Args:
        features: of some examples, see `with_class_names`.
        others: of the other ones.
        where: what the first are, for messages.
        elsewhere: what the others are.
        within: the first must have no more texts than the others.

    Raises:
        SourceError: a number means two things; names the first.
    """
    known = {each.name: each.vocabulary for each in others}
    for each in features:
        own, other = each.vocabulary, known.get(each.name, ())
        shared = min(len(own), len(other))
        differs = next((place for place in range(shared) if own[place] != other[place]), shared)
        if not shared or (differs == shared and not (within and len(own) > shared)):
            continue
        before = repr(other[differs]) if differs < shared else "nothing"
        remedy = "options.vocabulary, options.classes of images, or class_names of image_dataset_from_directory"
        raise SourceError(
            message(
                f"{where}: {each.name} = {differs} means {own[differs]!r}, and {before} in {elsewhere}",
                details=[f"{where}: {listed(own)}", f"{elsewhere}: {listed(other)}"],
                hints=[f"give both the same names in the same order: {remedy}"],
            )
        )


def require_labels_of_run(storage: Storage, recorded: object, dataset: DatasetRef) -> None:
    """Refuse training data whose labels mean other classes than those that a run, or what it was forked from, learned.

    Args:
        recorded: folder of the dataset that the run had before, as its identity has it.
        dataset: the one that its run file prepares now.

    Raises:
        SourceError: a number means two things.
    """
    if recorded == dataset.folder:
        return
    try:
        before = read_manifest(storage, str(recorded))
    except (DamagedDataset, AnotherVersion):  # deleted since
        return
    now = load_manifest(storage, dataset).named_features
    require_same_labels(now, before.named_features, where="data", elsewhere="the data that the run was trained on")


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
