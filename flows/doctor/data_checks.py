"""A small sample of the run's data: batches for one training step, and for the speed of the input pipeline."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.flows.doctor.run_file_checks import Finding, Target, examples_per_replica
from baton.tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, ShardRecord, content_digest
from baton.tasks.foundation.contracts.run_file import RunFile
from baton.tasks.foundation.dataset.manifest import dataset_folder, manifest_path, plain_datasets, read_manifest
from baton.tasks.foundation.dataset.order import oversized_batch_warning
from baton.tasks.foundation.errors import SourceError
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Note
from baton.tasks.foundation.text import counted
from baton.tasks.prepare_data.example_checks import Checker
from baton.tasks.prepare_data.mixture import all_classes, dataset_digest, errors_at, mixture_manifest, spec_of_source
from baton.tasks.prepare_data.shard_writers import BlockWriter, ShardUploads
from baton.tasks.prepare_data.sources.registry import open_source
from baton.tasks.prepare_data.sources.source import InPlace, Source, changed_since
from baton.tasks.prepare_data.split import part_sizes
from baton.tasks.prepare_data.stage import first_features, require_features_of_training

if TYPE_CHECKING:
    import tensorflow as tf

    from baton.tasks.foundation.dataset.read import WorkerFiles


# The sample ends at the first of these limits.
_MAX_EXAMPLES = 4096
_MAX_BYTES = 64 << 20
_MAX_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSample:
    """The prepared dataset of the run, or a few of its examples in a temporary folder.

    Attributes:
        storage: the storage root that `ref.folder` is relative to.
        ref: reference to the dataset.
        manifest: manifest of the dataset.
        is_whole: whether this is the run's prepared dataset.
        train_examples: number of training examples in the whole dataset; None if unknown.
        validation_examples: number of validation examples in the whole dataset; None if unknown.
    """

    storage: Storage
    ref: DatasetRef
    manifest: DatasetManifest
    is_whole: bool
    train_examples: int | None = None
    validation_examples: int | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is read once though the source does it anew in each pass."""
        found = [self.manifest, *(plain for _, plain in plain_datasets(self.storage, self.manifest, self.ref.folder))]
        return tuple(dict.fromkeys(text for manifest in found for text in manifest.warnings))


def check_data(
    run: RunFile, storage: Storage | None, folder: Path, set_up: Callable[[], object] = lambda: None
) -> Finding:
    """Check the prepared dataset, or the first examples of the source.

    Args:
        storage: where the prepared dataset would be; None if the storage is not usable.
        folder: temporary folder for the sample.
        set_up: called before the user's code or TensorFlow may read examples, and after what options and footers say
            was checked.

    Returns:
        A finding whose value is a `DataSample`.

    Raises:
        RunFileError: `data.source` or an option in `data.options` is invalid.
        SourceError: the source is missing or empty, or one of its first records is invalid; or the first example of an
            own validation or test set does not fit.
        DamagedDataset: the dataset is prepared, but its manifest cannot be read.
    """
    if any(":" in source for source in run.spec.data.all_sources):
        set_up()
    sampled = _sample_mixture if run.spec.data.sources else _sample
    sample = sampled(run, storage, folder, set_up=set_up)
    manifest = sample.manifest
    for name in run.spec.data.own_sets:
        training = manifest.named_features
        require_features_of_training(name, first_features(run.spec, name, run.folder, training), training)
    features = ", ".join(f"{each.name} {each.dtype}{list(each.shape)}" for each in manifest.features)
    if sample.is_whole:
        text = f"prepared: {counted(manifest.train_examples + manifest.validation_examples, 'example')} of {features}"
    else:
        sources = f"the {len(run.spec.data.sources)} sources" if run.spec.data.sources else "the source"
        text = f"the first {manifest.train_examples} examples of {sources} are valid: {features}"
    warnings = list(sample.warnings)
    if sample.train_examples is not None:
        repeats = oversized_batch_warning(sample.train_examples, run.spec.train.global_batch_size)
        warnings += [] if repeats is None else [repeats]
    return Finding(verdict="warn" if warnings else "pass", text="; ".join([text, *warnings]), value=sample)


def _sample(
    run: RunFile, storage: Storage | None, folder: Path, name: str = "sample", *, set_up: Callable[[], object]
) -> DataSample:
    """Return the prepared dataset of a run with a single source, or a sample of it."""
    said: list[Note] = []
    source = open_source(run.spec.data, run.folder, run.spec.train.seed, note=said.append)
    prepared = None if storage is None else _prepared(storage, dataset_folder(dataset_digest(run.spec, source)))
    if prepared is not None and changed_since(prepared.manifest.opened or (), run.folder):
        prepared = None  # it will be prepared anew
    set_up()  # images and records are decoded by TensorFlow, whose first use fixes the devices
    return prepared or _sample_source(run, source, LocalStorage(folder), name, said)


def _sample_mixture(run: RunFile, storage: Storage | None, folder: Path, *, set_up: Callable[[], object]) -> DataSample:
    """Return the prepared mixture of a run, or a mixture of samples of all its sources."""
    alone: list[RunFile] = []
    found: list[DataSample] = []
    for index in range(len(run.spec.data.sources)):
        classes = all_classes([each.manifest for each in found])
        alone.append(replace(run, spec=spec_of_source(run.spec, index, classes)))
        with errors_at(f"data.sources[{index}]"):
            found.append(_sample(alone[-1], storage, folder, f"sample-{index}", set_up=set_up))
    if storage is not None and all(each.is_whole for each in found):
        mixed = mixture_manifest(run.spec, [each.ref for each in found], [each.manifest for each in found])
        if (prepared := _prepared(storage, dataset_folder(mixed.digest))) is not None:
            return prepared
    # A mixture has all its datasets in one store.
    sampled = [
        one if not one.is_whole else _sample(each, None, folder, f"sample-{index}", set_up=set_up)
        for index, (each, one) in enumerate(zip(alone, found, strict=True))
    ]
    mixed = mixture_manifest(run.spec, [each.ref for each in sampled], [each.manifest for each in sampled])
    store = LocalStorage(folder)
    store.create(manifest_path(dataset_folder(mixed.digest)), mixed.to_json())
    train = [each.train_examples for each in found if each.train_examples is not None]
    validation = [each.validation_examples for each in found if each.validation_examples is not None]
    return DataSample(
        storage=store,
        ref=_ref(dataset_folder(mixed.digest), mixed),
        manifest=mixed,
        is_whole=False,
        train_examples=sum(train) if len(train) == len(found) else None,
        validation_examples=sum(validation) if len(validation) == len(found) else None,
    )


def _prepared(storage: Storage, folder: str) -> DataSample | None:
    if not storage.exists(manifest_path(folder)):
        return None
    manifest = read_manifest(storage, folder)
    return DataSample(
        storage=storage,
        ref=_ref(folder, manifest),
        manifest=manifest,
        is_whole=True,
        train_examples=manifest.train_examples,
        validation_examples=manifest.validation_examples,
    )


def _sample_source(run: RunFile, source: Source, storage: LocalStorage, name: str, said: Sequence[Note]) -> DataSample:
    checker = Checker(run.spec.data)
    folder = dataset_folder(name)
    length = source.length
    if source.in_place is not None:
        features, shards = source.in_place.features, _first_shard(source.in_place, checker)
    else:
        first = _FirstRecords()
        shards = _write_shards(run, source, storage.at(folder), checker, first)
        features = checker.features
        length = first.length if length is None else length
    if not shards:
        raise SourceError(f"data.source: {run.spec.data.source} yields no examples; check data.options")
    manifest = DatasetManifest(
        digest=name,
        content_digest=content_digest(features, shards, ()),
        source=run.spec.data.source,
        origin=dict(source.origin),
        features=features,
        reading=checker.reading,
        train=shards,
        validation=(),
        extremes=checker.extremes,
        warnings=tuple(dict.fromkeys(each.text for each in said if each.warning)),
    )
    storage.create(manifest_path(folder), manifest.to_json())
    train, validation = part_sizes(run.spec.data, length, seed=run.spec.train.seed) or (None, None)
    return DataSample(
        storage=storage,
        ref=_ref(folder, manifest),
        manifest=manifest,
        is_whole=False,
        train_examples=train,
        validation_examples=validation,
    )


def _write_shards(
    run: RunFile, source: Source, storage: Storage, checker: Checker, first: "_FirstRecords"
) -> tuple[ShardRecord, ...]:
    from baton.tasks.foundation.dataset.shards import encode

    with source.surroundings(), ShardUploads(storage) as uploads:
        shard_examples = run.spec.data.shard_examples or _MAX_EXAMPLES
        seed = run.spec.train.seed if run.spec.data.shuffle else None
        writer = BlockWriter(uploads, part="train", seed=seed, shard_examples=shard_examples)
        records = first.take(encode(checker.check(where, example)) for where, example in source.read())
        if checker.packing is not None:
            records = (row for _, row in checker.packing.pack((False, record) for record in records))
        for record in records:
            writer.add(record)
        return writer.finish()


class _FirstRecords:
    """Takes the first records of a source.

    Attributes:
        length: number of records in the source; None if the source has more than were taken.
    """

    def __init__(self) -> None:
        self.length: int | None = None

    def take(self, records: Generator[bytes, None, None]) -> Iterator[bytes]:
        """Yield records up to the first limit of a sample."""
        began, size, count = time.monotonic(), 0, 0
        with closing(records):
            for record in records:
                yield record
                count, size = count + 1, size + len(record)
                if count == _MAX_EXAMPLES or size >= _MAX_BYTES or time.monotonic() - began >= _MAX_SECONDS:
                    return
        self.length = count


def _first_shard(in_place: InPlace, checker: Checker) -> tuple[ShardRecord, ...]:
    return tuple(found.as_shard() for found in islice(in_place.ranges(checker, _MAX_EXAMPLES), 1))


def _ref(folder: str, manifest: DatasetManifest) -> DatasetRef:
    return DatasetRef(
        folder=folder,
        content_digest=manifest.content_digest,
        train_examples=manifest.train_examples,
        validation_examples=manifest.validation_examples,
        already_prepared=True,
    )


# The measurement ends at the first of these limits.
_MEASURED_SECONDS = 2.0
_MEASURED_BATCHES = 2000


def check_input(run: RunFile, target: Target, sample: DataSample, step_seconds: float | None) -> Finding:
    """Measure the examples per second of the input pipeline on this machine, and compare them with the step time.

    Args:
        target: the accelerator to train on.
        sample: read repeatedly for about two seconds.
        step_seconds: assumed duration of one step; None if unknown.
    """
    from baton.tasks.foundation.dataset.read import WorkerFiles
    from baton.tasks.foundation.dataset.shards import original_read_errors
    from baton.tasks.foundation.dataset.slice_input import require_no_python

    if target.has_servers:
        worker = WorkerFiles(root=sample.storage.uri, batches=1)
        require_no_python(_batches(run, sample, per_replica=1, replicas=1, worker=worker))
    replicas = max(1, target.replicas // target.hosts)
    per_replica = examples_per_replica(run, target)
    with original_read_errors():
        batches = iter(_batches(run, sample, per_replica=per_replica, replicas=replicas))
        next(batches)  # opens the files
        count, began = 0, time.monotonic()
        while time.monotonic() - began < _MEASURED_SECONDS and count < _MEASURED_BATCHES:
            next(batches)
            count += 1
        rate = count * per_replica / max(time.monotonic() - began, 1e-9)
    per_host = per_replica * replicas
    data = "the prepared dataset" if sample.is_whole else "the sample on this machine's disk"
    text = f"{rate:,.0f} examples/s per host with this machine's CPUs, reading {data}"
    if step_seconds is None:
        text += f"; fast enough for steps of {1000 * per_host / rate:.3g} ms or longer"
        remedy = "give the expected step time to check it, such as --step-seconds 0.05"
        return Finding(verdict="pass", text=text, remedy=remedy)
    needed = per_host / step_seconds
    text += f"; steps of {1000 * step_seconds:.3g} ms need {needed:,.0f}"
    if rate >= needed:
        return Finding(verdict="pass", text=text)
    return Finding(
        verdict="warn",
        text=f"{text}: the accelerator would wait for input {1 - rate / needed:.0%} of the time",
        remedy="make examples smaller or cheaper to decode (store images as arrays at their final size), make the "
        "step larger, or use a host with more CPUs than this machine",
    )


def first_batch(run: RunFile, sample: DataSample, *, per_replica: int) -> tuple[Any, ...]:
    """Return the sample's first batch as tensors.

    Args:
        sample: the sample to read.
        per_replica: number of examples in the batch.
    """
    from baton.tasks.foundation.dataset.model_inputs import apply_class_weight
    from baton.tasks.foundation.dataset.shards import original_read_errors

    with original_read_errors():
        batch = next(iter(_batches(run, sample, per_replica=per_replica, replicas=1)))
        return apply_class_weight(batch, run.spec.train.class_weight)


def _batches(
    run: RunFile, sample: DataSample, *, per_replica: int, replicas: int, worker: "WorkerFiles | None" = None
) -> "tf.data.Dataset":
    from baton.tasks.foundation.dataset.model_inputs import model_inputs
    from baton.tasks.foundation.dataset.read import training_dataset

    inputs = model_inputs(run.spec, sample.manifest.features, run.folder)
    return training_dataset(
        sample.storage,
        sample.ref,
        seed=run.spec.train.seed,
        global_batch_size=per_replica * replicas,
        window_shards=run.spec.data.window_shards,
        first_batch=0,
        shuffle=run.spec.data.shuffle,
        local_replicas=replicas,
        functions=inputs.training_functions,
        worker=worker,
    )
