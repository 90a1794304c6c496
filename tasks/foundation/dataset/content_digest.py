"""The digest of a dataset's content, the check of a manifest by it, and where its shards lie.

Without NumPy, because `baton verify` starts fast. A shard lies in the dataset's folder, or is a range of a file that
existed before.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from tasks.foundation.contracts.base import another_version
from tasks.foundation.contracts.data_spec import Mixture
from tasks.foundation.contracts.dataset import DatasetManifest, Feature, HeldOut, ShardRecord
from tasks.foundation.errors import DamagedDataset
from tasks.foundation.messages import listed
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.opening import open_storage

REMEDY = "delete that folder and run again; Baton then prepares the dataset again from the source"


def content_digest(
    features: Sequence[Feature],
    train: Sequence[ShardRecord],
    validation: Sequence[ShardRecord],
    held_out: HeldOut | None = None,
    mixture: Mixture | None = None,
) -> str:
    """Return the sha256 of the features and of every shard's name, count, size and checksum, in order.

    Of a mixture: of the features and of its datasets' digests. Weights are not examples, so they do not count here.

    For a file outside the dataset's folder only its name is hashed, not its folder: a moved file is the same dataset.
    """
    digest = hashlib.sha256()
    for part in (features, train, validation):
        for record in part:
            # Defaults are left out, so that datasets from before a field was added keep their digest.
            digest.update(_without_place(record).model_dump_json(exclude_defaults=True).encode() + b"\n")
        digest.update(b"\n")
    if held_out is not None:
        digest.update(held_out.model_dump_json().encode() + b"\n")
    for source in mixture.sources if mixture is not None else ():
        digest.update(source.content_digest.encode() + b"\n")
    return digest.hexdigest()


def checked_manifest(data: bytes, *, where: str) -> DatasetManifest:
    """Parse a manifest, and compare its digests with what it lists.

    Raises:
        DamagedDataset: it is unreadable or inconsistent; says how the dataset is prepared again.
        AnotherVersion: a newer Baton wrote it.
    """
    try:
        manifest = DatasetManifest.from_json(data, where=where, error=DamagedDataset)
    except DamagedDataset as fault:
        raise DamagedDataset(f"{fault}; {REMEDY}") from fault
    found = content_digest(manifest.features, manifest.train, manifest.validation, manifest.held_out, manifest.mixture)
    if found != manifest.content_digest:
        unknown = DatasetManifest.unknown_keys(data)
        if unknown:  # the digest may cover these keys
            why = f"it has unknown keys ({listed(unknown)}), and its content_digest does not match without them"
            raise another_version(where, DatasetManifest, why)
        raise DamagedDataset(f"{where}: its content_digest does not match the shards it lists; {REMEDY}")
    if manifest.mixture is not None and manifest.mixture.digest != manifest.digest:
        raise DamagedDataset(f"{where}: its digest does not match the weights that it lists; {REMEDY}")
    return manifest


def _without_place(record: Feature | ShardRecord) -> Feature | ShardRecord:
    if isinstance(record, ShardRecord) and record.is_external:
        return record.model_copy(update={"path": PurePosixPath(record.path).name})
    return record


def locate_shard(storage: Storage, record: ShardRecord) -> tuple[Storage, str]:
    """Return the store of a shard, and its path there.

    Args:
        storage: store rooted at the dataset's folder.
        record: one shard of the dataset.
    """
    if not record.is_external:
        return storage, record.path
    folder, _, name = record.path.rpartition("/")
    return open_storage(folder or "/", relative_to=Path("/"), guarded=False), name
