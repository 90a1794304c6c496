"""Some of the data, without preparing all of it: enough for a step, and to see how fast batches can be made."""

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from flows.doctor.finding import Finding
from tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, ShardRecord
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.dataset.manifest import (
    content_digest,
    dataset_folder,
    manifest_path,
    read_manifest,
    zero_batch,
)
from tasks.foundation.dataset.order import repeats_words
from tasks.foundation.errors import SourceError
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage
from tasks.prepare_data.example_checks import Checker
from tasks.prepare_data.shard_upload import ShardUploads
from tasks.prepare_data.shard_writing import BlockWriter
from tasks.prepare_data.sources.base import InPlace, Source
from tasks.prepare_data.sources.opening import open_source
from tasks.prepare_data.split import part_sizes
from tasks.prepare_data.stage import dataset_digest

# The sample ends with whichever comes first.
_MOST_EXAMPLES = 4096
_MOST_BYTES = 64 << 20
_MOST_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A dataset: the run's own, prepared before, or some of its examples in a temporary folder.

    Attributes:
        storage: the root that `ref.folder` is relative to.
        ref: the dataset.
        manifest: of it.
        is_whole: whether this is the run's own, all of it.
        train_examples: of the run's own; None where that is not known.
        validation_examples: the same.
    """

    storage: Storage
    ref: DatasetRef
    manifest: DatasetManifest
    is_whole: bool
    train_examples: int | None = None
    validation_examples: int | None = None

    def zeros(self, size: int) -> tuple[Any, ...]:
        """See `zero_batch`."""
        return zero_batch(self.manifest, size)


def sample_of(run: RunFile, storage: Storage | None, folder: Path) -> Finding:
    """Look at the first examples of the source, or at the dataset that is prepared already; its value is a `Sample`.

    Args:
        run: the run file.
        storage: where a prepared dataset would be; None if it cannot be asked.
        folder: a temporary one, for the sample.

    Raises:
        RunFileError: `data.source` or one of `data.options` cannot be used.
        SourceError: the source is missing or empty, or holds an unusable record among the first.
        DamagedDataset: it was prepared, and its manifest cannot be read.
    """
    source = open_source(run.spec.data, run.folder, run.spec.train.seed)
    prepared = None if storage is None else _prepared(storage, dataset_folder(dataset_digest(run.spec, source)))
    sample = prepared or _taken(run, source, LocalStorage(folder))
    manifest = sample.manifest
    features = ", ".join(f"{each.name} {each.dtype}{list(each.shape)}" for each in manifest.features)
    if sample.is_whole:
        text = f"prepared: {manifest.train_examples + manifest.validation_examples} examples of {features}"
    else:
        text = f"{manifest.train_examples} examples of the source are sound: {features}"
    if sample.train_examples is not None:
        repeats = repeats_words(sample.train_examples, run.spec.train.global_batch_size)
        if repeats is not None:
            return Finding(check="data", verdict="warn", text=f"{text}; {repeats}", value=sample)
    return Finding(check="data", verdict="pass", text=text, value=sample)


def _prepared(storage: Storage, folder: str) -> Sample | None:
    if not storage.exists(manifest_path(folder)):
        return None
    manifest = read_manifest(storage, folder)
    return Sample(
        storage=storage,
        ref=_ref(folder, manifest),
        manifest=manifest,
        is_whole=True,
        train_examples=manifest.train_examples,
        validation_examples=manifest.validation_examples,
    )


def _taken(run: RunFile, source: Source, storage: LocalStorage) -> Sample:
    checker = Checker(classes=run.spec.data.classes, allow_nan=run.spec.data.allow_nan)
    folder = dataset_folder("sample")
    length = source.length
    if source.in_place is not None:
        features, shards = source.in_place.features, _first_range(source.in_place, checker)
    else:
        first = _First()
        shards = _written(run, source, storage.at(folder), checker, first)
        features = checker.features
        length = first.length if length is None else length
    if not shards:
        raise SourceError(f"data.source: {run.spec.data.source}: it holds no example; see that data.options are right")
    manifest = DatasetManifest(
        digest="sample",
        content_digest=content_digest(features, shards, ()),
        source=run.spec.data.source,
        origin=dict(source.origin),
        features=features,
        train=shards,
        validation=(),
    )
    storage.create(manifest_path(folder), manifest.to_json())
    train, validation = None, None
    if length is not None:
        train, validation = part_sizes(length, fraction=run.spec.data.validation_fraction, seed=run.spec.train.seed)
    return Sample(
        storage=storage,
        ref=_ref(folder, manifest),
        manifest=manifest,
        is_whole=False,
        train_examples=train,
        validation_examples=validation,
    )


def _written(
    run: RunFile, source: Source, storage: Storage, checker: Checker, first: "_First"
) -> tuple[ShardRecord, ...]:
    from tasks.foundation.dataset.shards import encode

    with ShardUploads(storage) as uploads:
        shard_examples = run.spec.data.shard_examples or _MOST_EXAMPLES
        writer = BlockWriter(uploads, part="train", seed=run.spec.train.seed, shard_examples=shard_examples)
        for record in first.of(encode(checker.check(where, example)) for where, example in source.read()):
            writer.add(record)
        return writer.finish()


class _First:
    """The first records of a source.

    Attributes:
        length: how many there are, once they have come to their end; None where there are more.
    """

    def __init__(self) -> None:
        self.length: int | None = None

    def of(self, records: Generator[bytes, None, None]) -> Iterator[bytes]:
        """The first ones."""
        began, size, count = time.monotonic(), 0, 0
        with closing(records):
            for record in records:
                yield record
                count, size = count + 1, size + len(record)
                if count == _MOST_EXAMPLES or size >= _MOST_BYTES or time.monotonic() - began >= _MOST_SECONDS:
                    return
        self.length = count


def _first_range(in_place: InPlace, checker: Checker) -> tuple[ShardRecord, ...]:
    ranges = in_place.ranges(checker.check, _MOST_EXAMPLES)
    return tuple(
        ShardRecord(
            path=found.path,
            begin=found.begin,
            size=found.size,
            crc32c=found.crc32c,
            records=found.records,
            examples=found.records,
        )
        for found in islice(ranges, 1)
    )


def _ref(folder: str, manifest: DatasetManifest) -> DatasetRef:
    return DatasetRef(
        folder=folder,
        content_digest=manifest.content_digest,
        train_examples=manifest.train_examples,
        validation_examples=manifest.validation_examples,
        already_prepared=True,
    )
