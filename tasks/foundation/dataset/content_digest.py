"""The digest of a dataset's content, over what its manifest lists; without NumPy, as `baton verify` starts fast."""

import hashlib
from collections.abc import Sequence
from pathlib import PurePosixPath

from tasks.foundation.contracts.dataset import DatasetManifest, Feature, HeldOut, ShardRecord
from tasks.foundation.contracts.mixture import Mixture


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


def content_digest_of(manifest: DatasetManifest) -> str:
    """Return the content digest that follows from what a manifest lists; another one in the manifest is damage."""
    return content_digest(manifest.features, manifest.train, manifest.validation, manifest.held_out, manifest.mixture)


def _without_place(record: Feature | ShardRecord) -> Feature | ShardRecord:
    if isinstance(record, ShardRecord) and record.is_external:
        return record.model_copy(update={"path": PurePosixPath(record.path).name})
    return record
