"""Prepare a dataset: source -> shards -> manifest, under a name made from content and settings."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path

from tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, Feature
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.dataset.manifest import (
    content_digest,
    dataset_folder,
    manifest_path,
    read_manifest,
)
from tasks.foundation.errors import (
    BatonError,
    DamagedInTransit,
    FileAlreadyThere,
    InvalidInput,
    SourceChanged,
    SourceError,
    StorageError,
)
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.best_effort_delete import discard
from tasks.foundation.storage.deadline import LEAVING
from tasks.foundation.storage.download import side_by_side
from tasks.foundation.telemetry.events import Note, Preparing, Sink
from tasks.prepare_data.disk_space import require_scratch_space, require_space, scratch_file
from tasks.prepare_data.example_checks import Checker
from tasks.prepare_data.in_place import indexed
from tasks.prepare_data.scatter import ScatterWriter, scratch_bytes
from tasks.prepare_data.shard_upload import ShardUploads
from tasks.prepare_data.shard_writing import BlockWriter, PartWriter
from tasks.prepare_data.sources.base import Source
from tasks.prepare_data.sources.opening import open_source
from tasks.prepare_data.split import part_sizes, split

# Goes up when the same source and settings come to be written as other bytes.
_FORMAT = 2
_PARTS = ("train", "validation")
_SHARD_BYTES = 32 << 20
_TOLD_EVERY_EXAMPLES = 10_000


# What may refuse the run once it is known what its examples hold.
Look = Callable[[tuple[Feature, ...]], None]


class _RefusedByLook(Exception):
    """Not the data's fault: what was prepared before stays for the corrected model."""

    def __init__(self, fault: BatonError) -> None:
        super().__init__(str(fault))
        self.fault = fault


def prepare_data(
    spec: RunSpec, *, code_folder: Path, storage: Storage, telemetry: Sink, look: Look | None = None
) -> DatasetRef:
    """Make the dataset that a run file asks for, unless it is there.

    Shards are written first and the manifest last, create-only: its existence means completeness. Two processes may
    prepare the same dataset at once; they write the same bytes. After a kill or a failure of the store, finished shards
    stay, and the next try uploads the others only; after an error in the input, nothing is left.

    Args:
        spec: the run file.
        code_folder: its folder, which relative paths start from.
        storage: the root that datasets and runs are kept below.
        telemetry: is told of the progress.
        look: called with what the first example holds, unless the dataset is there; before any is written. What it
            raises is raised.

    Raises:
        RunFileError: `data.source` or one of `data.options` cannot be used.
        SourceError: the source is missing or empty, or holds an unusable record; or its bytes were damaged on their way
            here, twice.
        StorageError: the store failed, or has too little room.
        DamagedDataset: the manifest that is there cannot be read.
    """
    try:
        return _prepare_once(spec, code_folder=code_folder, storage=storage, telemetry=telemetry, look=look)
    except _RefusedByLook as refused:
        raise refused.fault from refused.fault.__cause__
    except DamagedInTransit as fault:
        # It may happen once. The bad examples are scattered over the shards by now, so all of them are made again.
        telemetry.emit(Note(text=f"{fault}. Reading the source once more", warning=True))
    return _prepare_once(spec, code_folder=code_folder, storage=storage, telemetry=telemetry)


def _prepare_once(
    spec: RunSpec, *, code_folder: Path, storage: Storage, telemetry: Sink, look: Look | None = None
) -> DatasetRef:
    source = open_source(spec.data, code_folder, spec.train.seed)
    digest = dataset_digest(spec, source)
    folder = dataset_folder(digest)
    if (prepared := _prepared(storage, folder)) is not None:
        return prepared
    if ":" in spec.data.source and RunLog(storage.at(spec.run)).head() is not None:
        # What was taken for single examples when the run began is so now.
        source = open_source(spec.data.model_copy(update={"batched": False}), code_folder, spec.train.seed)
    try:
        written = _confirmed(spec, source, digest=digest, storage=storage.at(folder), telemetry=telemetry, look=look)
        return _commit(written, storage=storage, folder=folder)
    except InvalidInput:
        # Another input gets another folder, so nobody would ever come back to this one.
        _clear(storage, folder)
        raise


def _confirmed(
    spec: RunSpec, source: Source, *, digest: str, storage: Storage, telemetry: Sink, look: Look | None
) -> DatasetManifest:
    """As `_write`, but input is refused only if its bytes were not damaged on the way."""
    try:
        return _write(spec, source, digest=digest, storage=storage, telemetry=telemetry, look=look)
    except (DamagedInTransit, SourceChanged):
        raise
    except InvalidInput:
        source.confirm()
        raise


def dataset_digest(spec: RunSpec, source: Source) -> str:
    """The dataset's name: sha256 over source content and all that decides its bytes or was checked, 24 hex digits."""
    decides = {
        "format": _FORMAT,
        "source": spec.data.source,
        "content": source.content,
        "settings": dict(source.settings),
        "version": spec.data.version,
        "validation_fraction": spec.data.validation_fraction,
        # These change no byte, but what a run demands of the examples must have been looked for.
        "classes": spec.data.classes,
        "allow_nan": spec.data.allow_nan,
        "shard_examples": spec.data.shard_examples,
        "seed": spec.train.seed,
    }
    # YAML's dates are no JSON, but their text tells them apart.
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _ref(folder: str, manifest: DatasetManifest, *, already_prepared: bool) -> DatasetRef:
    return DatasetRef(
        folder=folder,
        content_digest=manifest.content_digest,
        train_examples=manifest.train_examples,
        validation_examples=manifest.validation_examples,
        already_prepared=already_prepared,
    )


def _write(
    spec: RunSpec, source: Source, *, digest: str, storage: Storage, telemetry: Sink, look: Look | None
) -> DatasetManifest:
    """All shards; returns the manifest, which is not written yet."""
    checker = Checker(classes=spec.data.classes, allow_nan=spec.data.allow_nan)
    if source.in_place is not None:
        _looked(look, source.in_place.features)
        return indexed(spec, source, source.in_place, digest=digest, checker=checker, telemetry=telemetry)
    writers: list[PartWriter] = []
    records = _records(source, checker, telemetry)
    first = list(islice(records, 1))
    if first:
        _looked(look, checker.features)
    records = chain(first, records)
    with ExitStack() as scratch:
        uploads = scratch.enter_context(ShardUploads(storage))
        scratch.enter_context(LEAVING.bound_by_interruption(spec.stop.grace_seconds))  # uploads are waited for
        for held_out, record in split(records, fraction=spec.data.validation_fraction, seed=spec.train.seed):
            if not writers:
                writers = _writers(spec, source.length, len(record), uploads, scratch)
            writers[held_out].add(record)
        if not writers:
            raise SourceError(f"data.source: {spec.data.source}: it holds no example; see that data.options are right")
        train, validation = (writer.finish() for writer in writers)
        if uploads.kept:
            told = (
                f"{uploads.kept} of {len(train) + len(validation)} shards were there from an earlier try, and are kept"
            )
            telemetry.emit(Note(text=told))
    return DatasetManifest(
        digest=digest,
        content_digest=content_digest(checker.features, train, validation),
        source=spec.data.source,
        origin=dict(source.origin),
        features=checker.features,
        train=train,
        validation=validation,
    )


def _looked(look: Look | None, features: tuple[Feature, ...]) -> None:
    if look is None:
        return
    try:
        look(features)
    except BatonError as fault:
        raise _RefusedByLook(fault) from fault


def _records(source: Source, checker: Checker, telemetry: Sink) -> Iterator[bytes]:
    from tasks.foundation.dataset.shards import encode

    count = 0
    for count, (where, example) in enumerate(source.read(), start=1):
        if source.length is not None and count > source.length:
            raise _miscounted(source, "more")
        yield encode(checker.check(where, example))
        if count % _TOLD_EVERY_EXAMPLES == 0:
            telemetry.emit(Preparing(examples=count))
    if source.length not in {None, count}:
        raise _miscounted(source, f"{count}")
    telemetry.emit(Preparing(examples=count))


def _miscounted(source: Source, found: str) -> SourceError:
    return SourceError(
        f"the source held {source.length} examples and gave {found}: it changed while being read; run again"
    )


def _writers(
    spec: RunSpec, length: int | None, record_bytes: int, uploads: ShardUploads, scratch: ExitStack
) -> list[PartWriter]:
    """One for each part; `scratch` closes what they need while they write."""
    seed = spec.train.seed
    shard_examples = spec.data.shard_examples or max(1, _SHARD_BYTES // record_bytes)
    if length is None:
        return [BlockWriter(uploads, part=part, seed=seed, shard_examples=shard_examples) for part in _PARTS]
    sizes = part_sizes(length, fraction=spec.data.validation_fraction, seed=seed)
    require_space(uploads.storage, length * (record_bytes + 16), shards_there_count=True)
    require_scratch_space(sum(scratch_bytes(size, record_bytes) for size in sizes))
    return [
        ScatterWriter(
            uploads,
            scratch.enter_context(scratch_file()),
            part=part,
            seed=seed,
            shard_examples=shard_examples,
            examples=size,
            record_bytes=record_bytes,
        )
        for part, size in zip(_PARTS, sizes, strict=True)
    ]


def _commit(manifest: DatasetManifest, *, storage: Storage, folder: str) -> DatasetRef:
    at = storage.at(folder)
    # Another process that failed on this dataset may have cleared the folder meanwhile.
    paths = [shard.path for shard in (*manifest.train, *manifest.validation) if not shard.is_elsewhere]
    for path, there in zip(paths, side_by_side(at.exists, paths, workers=at.transfers), strict=True):
        if not there:
            raise StorageError(f"{at.uri}/{path} is gone: it was deleted while it was prepared; run again")
    try:
        storage.create(manifest_path(folder), manifest.to_json())
    except FileAlreadyThere:
        first = read_manifest(storage, folder)
        if first.content_digest != manifest.content_digest:
            raise SourceError(
                f"{at.uri}: another process prepared the same source and got other examples: {manifest.source} does "
                "not give the same examples each time; make it so (seed what is random), delete the folder, run again"
            ) from None
    return _ref(folder, manifest, already_prepared=False)


def _prepared(storage: Storage, folder: str) -> DatasetRef | None:
    """The dataset if it is there; one whose shards were lost is written again under its manifest."""
    if not storage.exists(manifest_path(folder)):
        return None
    manifest = read_manifest(storage, folder)
    there = set(storage.files(folder))
    shards = (shard for shard in (*manifest.train, *manifest.validation) if not shard.is_elsewhere)
    if any(f"{folder}/{shard.path}" not in there for shard in shards):
        return None
    return _ref(folder, manifest, already_prepared=True)


def _clear(storage: Storage, folder: str) -> None:
    """Drop unfinished shards; those that a manifest names stay, whoever wrote it."""
    if not storage.exists(manifest_path(folder)):
        discard(storage, folder)
