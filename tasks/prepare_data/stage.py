"""Prepares a dataset: source -> shards -> manifest, in a folder named by content and settings.

Own validation and test sets of a run file are datasets of their own, of which nothing is held out. So a changed test
set leaves the training data and the run as they are, and runs that name the same set share it. Records that stay in
their original files are counted, indexed and checked, but not copied.
"""

import dataclasses
import hashlib
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path

from baton.tasks.foundation.contracts.data_spec import DataSpec, SetName, SetRef
from baton.tasks.foundation.contracts.dataset import (
    DatasetManifest,
    DatasetRef,
    Feature,
    HeldOut,
    Reading,
    ShardRecord,
    classes_of,
    content_digest,
    with_class_names,
)
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall
from baton.tasks.foundation.dataset.columns import range_bytes
from baton.tasks.foundation.dataset.manifest import (
    Part,
    dataset_folder,
    load_manifest,
    manifest_path,
    positions_of_part,
    read_manifest,
    require_same_labels,
)
from baton.tasks.foundation.errors import (
    DamagedDataset,
    DamagedInTransit,
    FileAlreadyThere,
    FileMissing,
    InvalidInput,
    RunFileError,
    SourceChanged,
    SourceError,
    StorageError,
)
from baton.tasks.foundation.keras_config import keep_keras_config
from baton.tasks.foundation.machine.processes import available_bytes
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.storage.interface import Storage, discard
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE, parallel_map
from baton.tasks.foundation.telemetry.events import DatasetUsed, Note, Preparing, Sink
from baton.tasks.foundation.text import counted, listed, message
from baton.tasks.prepare_data.example_checks import (
    Checker,
    FeatureCheck,
    FeaturesRefused,
    Kinds,
    features_of_first_example,
    kinds_of,
    words_of,
)
from baton.tasks.prepare_data.example_checks import check_features as check_first_example
from baton.tasks.prepare_data.mixture import dataset_digest, errors_at, prepare_training_data, with_classes
from baton.tasks.prepare_data.shard_writers import (
    BlockWriter,
    PartWriter,
    ScatterWriter,
    ShardUploads,
    require_scratch_space,
    require_space,
    scratch_bytes,
    scratch_file,
)
from baton.tasks.prepare_data.sources.registry import open_source
from baton.tasks.prepare_data.sources.source import NOT_SEEN, InPlace, Source, changed_since
from baton.tasks.prepare_data.sources.source_files import names_file
from baton.tasks.prepare_data.split import held_out_rule, part_sizes, split_records

_REPORT_EVERY_EXAMPLES = 10_000
Prepare = Callable[[RunSpec, Place], DatasetRef]
# Keras takes examples with and without weights, so a set need not have those of the training examples.
_OPTIONAL = "sample_weight"
_PARTS = ("train", "validation")
_SHARD_BYTES = 32 << 20


def index_in_place(
    spec: RunSpec, source: Source, in_place: InPlace, *, digest: str, checker: Checker, telemetry: Sink
) -> DatasetManifest:
    """Return the manifest of a dataset whose shards are ranges of the source's files; reads all of them.

    A range may hold training and validation examples. It is listed for each part that it has examples of; the
    manifest's held-out rule decides which these are.

    Args:
        source: the source, whose records stay in place.
        in_place: its features and ranges.
        digest: the dataset's name.
        checker: checks every example, and has seen none.
        telemetry: receives progress events.

    Raises:
        SourceError: the source has no example, an invalid one, or a single one that cannot be split.
    """
    shards: list[ShardRecord] = []
    largest: list[int] = []
    first = reported = 0
    for found in in_place.ranges(checker, spec.data.shard_examples):
        shards.append(found.as_shard(first))
        if found.layout is not None:
            _require_memory(spec.data, in_place.features, shards[-1], largest)
        first += found.records
        if first >= reported + _REPORT_EVERY_EXAMPLES:
            telemetry.emit(Preparing(examples=first))
            reported = first
    telemetry.emit(Preparing(examples=first))
    held_out = held_out_rule(first, fraction=spec.data.validation_fraction, seed=spec.train.seed)
    train = _of_part("train", held_out, shards)
    validation = _of_part("validation", held_out, shards)
    return DatasetManifest(
        digest=digest,
        content_digest=content_digest(in_place.features, train, validation, held_out),
        source=spec.data.source,
        origin=dict(source.origin),
        features=in_place.features,
        train=train,
        validation=validation,
        held_out=held_out,
        extremes=checker.extremes,
    )


def _require_memory(data: DataSpec, features: Sequence[Feature], shard: ShardRecord, largest: list[int]) -> None:
    """Refuse windows that do not fit into memory: one is in use while the next is read.

    Args:
        shard: another range.
        largest: sizes of the largest ranges so far, as many as a window has, in bytes; is updated.

    Raises:
        RunFileError: the largest window takes more than half of the free memory.
    """
    found = range_bytes(features, records=shard.records_held, size=shard.size)
    insort(largest, found, key=lambda size: -size)
    del largest[data.window_shards :]
    available, window = available_bytes(), sum(largest)
    if available is None or 2 * window <= available:
        return
    fitting = next(count for count in range(len(largest) - 1, -1, -1) if 2 * sum(largest[:count]) <= available)
    remedy = f"set it to at most {fitting}" if fitting else "write the files with smaller row groups"
    raise RunFileError(
        f"data.window_shards: {data.window_shards}: a window takes {window / 2**20:,.1f} MiB, and the next is read "
        f"meanwhile, but {available / 2**20:,.1f} MiB of memory are free; {remedy}, or set data.options.copy: true"
    )


def _of_part(part: Part, held_out: HeldOut | None, shards: list[ShardRecord]) -> tuple[ShardRecord, ...]:
    if held_out is None:
        return tuple(shards) if part == "train" else ()
    counted = ((shard, len(positions_of_part(part, held_out, [shard]))) for shard in shards)
    return tuple(shard.model_copy(update={"examples": count}) for shard, count in counted if count)


def prepare_with_own_sets(spec: RunSpec, place: Place, prepare: Prepare) -> DatasetRef:
    """Prepare the dataset of a run file, and its own sets.

    Before a new dataset is written, the first example of each set is compared with the first training example.

    Args:
        place: where the data is prepared; `check_features` is called for the training examples.

    Returns:
        The dataset, with references to its own sets.

    Raises:
        SourceError: the examples of a set have other features than the training examples.
        BatonError: a dataset cannot be prepared, see `prepare`.
    """
    names = tuple(spec.data.own_sets)
    if not names:
        return prepare(spec, place)

    def check(features: tuple[Feature, ...], reading: Reading) -> None:
        if place.check_features is not None:
            place.check_features(features, reading)
        for name in names:
            require_features_of_training(name, first_features(spec, name, place.code_folder, features), features)

    dataset = prepare(spec, dataclasses.replace(place, check_features=check))
    features = load_manifest(place.root, dataset).named_features
    found: dict[SetName, SetRef] = {}
    for name in names:
        with errors_at(f"data.{name}"):
            own = prepare(spec_of_set(spec, name, features), dataclasses.replace(place, check_features=None))
        require_features_of_training(name, load_manifest(place.root, own).named_features, features)
        found[name] = SetRef(folder=own.folder, content_digest=own.content_digest, examples=own.train_examples)
    return _with_sets(dataset, found)


def spec_of_set(spec: RunSpec, name: SetName, training: Sequence[Feature]) -> RunSpec:
    """Return the run file of a dataset that consists of an own set alone; its classes are those of the training.

    Its seed is that of the set. With `train.seed`, runs with other seeds would be evaluated on other examples where the
    source draws random numbers; and a source that draws its training examples too would repeat them in the set.
    """
    train = spec.train.model_copy(update={"seed": _seed_of(name)})
    return spec.model_copy(update={"data": with_classes(spec.data.of_set(name), classes_of(training)), "train": train})


def _seed_of(name: SetName) -> int:
    return int.from_bytes(hashlib.sha256(f"{name} set".encode()).digest()[:4], "little") >> 1


def first_features(spec: RunSpec, name: SetName, code_folder: Path, training: Sequence[Feature]) -> tuple[Feature, ...]:
    """Return the features of the first example of a set, which is read and not written.

    Args:
        training: features of the training examples, with the names of their classes.

    Raises:
        SourceError: the set is missing or empty, or its first example is invalid.
        RunFileError: its source or an option cannot be used.
    """
    with errors_at(f"data.{name}"):
        return features_of_first_example(spec_of_set(spec, name, training), code_folder)


def require_features_of_training(name: SetName, features: Sequence[Feature], training: Sequence[Feature]) -> None:
    """Refuse a set whose examples the model cannot take.

    Raises:
        SourceError: names, dtypes, shapes or what labels mean differ; sample weights may be missing on either side.
    """
    own, others = _kinds(features), _kinds(training)
    if own == others:
        require_same_labels(features, training, where=f"data.{name}", elsewhere="training", within=True)
        return
    raise SourceError(
        message(
            f"data.{name}: its examples differ from the training examples",
            details=[f"data.{name}: {words_of(own)}", f"training: {words_of(others)}"],
            hints=["give both the same names, dtypes and shapes; shapes are of one example, without a batch dimension"],
        )
    )


def _kinds(features: Sequence[Feature]) -> Kinds:
    return {name: kind for name, kind in kinds_of(features).items() if name != _OPTIONAL}


def _with_sets(dataset: DatasetRef, sets: Mapping[SetName, SetRef]) -> DatasetRef:
    validation = sets.get("validation")
    held_out = dataset.validation_examples if validation is None else validation.examples
    return dataset.model_copy(
        update={"validation": validation, "test": sets.get("test"), "validation_examples": held_out}
    )


def prepare_data(call: PrepareDataCall, place: Place) -> DatasetRef:
    """Prepare the dataset or mixture of a run file, and its own validation and test sets, unless they exist.

    Shards are written first and the manifest last, create-only: if it exists, the dataset is complete. Two processes
    may prepare the same dataset at once; they write the same bytes. After a kill or a storage error, finished shards
    stay, and the next attempt uploads the others only; after an input error, nothing is left.

    Args:
        place: the storage root and the run file's folder. Its `check_features` is called with the features of the
            first example before anything is written, unless the dataset exists; its errors are raised unchanged.

    Raises:
        RunFileError: `data.source` or an option of `data.options` cannot be used.
        SourceError: the source is missing or empty, or has an invalid record; or its bytes were damaged in transit
            twice.
        StorageError: the store failed, or has too little space.
        DamagedDataset: the existing manifest cannot be read.
    """
    if any(":" in source or source in {"huggingface", "npz", "table"} for source in call.spec.data.all_sources):
        # Arrays are cast to the run's floatx. A process that has acquired devices has it already.
        head = place.log.head_seen()
        keep_keras_config(None if head is None else head.environment.keras)
    return prepare_with_own_sets(call.spec, place, lambda spec, at: prepare_training_data(spec, at, _prepare))


def _prepare(spec: RunSpec, place: Place) -> DatasetRef:
    """Prepare the dataset of `spec.data.source` alone."""
    try:
        return _prepare_once(spec, place, check_features=place.check_features)
    except FeaturesRefused as refused:
        raise refused.fault from refused.fault.__cause__
    except DamagedInTransit as fault:
        # Damage in transit can happen once. The bad examples are spread over all shards, so all are written again.
        place.telemetry.emit(Note(text=f"{fault}. Reading the source again", warning=True))
    return _prepare_once(spec, place)


def _prepare_once(spec: RunSpec, place: Place, *, check_features: FeatureCheck | None = None) -> DatasetRef:
    storage, code_folder, telemetry = place.root, place.code_folder, place.telemetry

    warnings: list[str] = []

    def note(said: Note) -> None:
        telemetry.emit(said)
        if said.warning:
            warnings.append(said.text)

    source = open_source(spec.data, code_folder, spec.train.seed, note=note)
    digest, prepared = _find_prepared(spec, source, place)
    folder = dataset_folder(digest)
    if prepared is not None:
        if place.log.head_seen() is None:
            for text in prepared.warnings:
                telemetry.emit(Note(text=text, warning=True))
            if ":" in spec.data.source:
                words = _words_of_use(spec.data.source, prepared)
                telemetry.emit(DatasetUsed(text=f"{words}; {NOT_SEEN}", words=words))
        return _ref(folder, prepared, already_prepared=True)
    if storage.transfers == 1:  # only now is it known that this folder is written to; one probe tells all of a bucket
        storage.at(folder).probe()
    if ":" in spec.data.source and place.log.head() is not None:
        # The examples were accepted when the run started; do not check again whether they are batches.
        source = open_source(spec.data, code_folder, spec.train.seed, note=note, accepted=True)
    try:
        written = _write_confirmed(
            spec, source, digest=digest, storage=storage.at(folder), telemetry=telemetry, check_features=check_features
        )
        known = {"opened": source.opened(), "prepared": datetime.now(UTC).date().isoformat()}
        written = written.model_copy(update={"warnings": tuple(dict.fromkeys(warnings)), **known})
        return _commit(written, storage=storage, folder=folder)
    except InvalidInput:
        # The corrected input has another digest, so nothing would use or delete this folder.
        _delete_unfinished(storage, folder)
        raise


def _find_prepared(spec: RunSpec, source: Source, place: Place) -> tuple[str, DatasetManifest | None]:
    """Return the name of the dataset, and its manifest if it is prepared.

    If files that a function read are others by now, the name follows from them: data that comes back finds its own.
    """
    digest, changes = dataset_digest(spec, source), ""
    while True:
        prepared = _existing(place.root, dataset_folder(digest), spec.data, place.code_folder)
        changed = () if prepared is None else changed_since(prepared.opened or (), place.code_folder)
        if prepared is None and changes:
            place.telemetry.emit(Note(text=f"{spec.data.source} is read anew: {changes}"))
        if prepared is None or not changed:
            return digest, prepared
        changes = f"{listed([each.path for each in changed])} changed since its dataset was prepared{_day_of(prepared)}"
        lines = [digest, *(f"{each.path} {each.sha256}" for each in changed)]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def _day_of(prepared: DatasetManifest) -> str:
    return f" on {prepared.prepared}" if prepared.prepared else ""


def _words_of_use(source: str, prepared: DatasetManifest) -> str:
    """Say what a function's dataset, which is used again, was made from."""
    files = "the files that it read are not known"
    if prepared.opened is not None:
        names = listed([each.path for each in prepared.opened])
        files = f"it read {names}, where no change is seen" if names else "no file was seen that it read"
    return f"{source}: the dataset that was prepared{_day_of(prepared)} is used again; {files}"


def _write_confirmed(
    spec: RunSpec,
    source: Source,
    *,
    digest: str,
    storage: Storage,
    telemetry: Sink,
    check_features: FeatureCheck | None,
) -> DatasetManifest:
    """Call `_write`. If it refuses the input, first check that the bytes were not damaged in transit."""
    try:
        with source.surroundings():
            return _write(
                spec, source, digest=digest, storage=storage, telemetry=telemetry, check_features=check_features
            )
    except (DamagedInTransit, SourceChanged):
        raise
    except InvalidInput:
        source.confirm()
        raise


def _ref(folder: str, manifest: DatasetManifest, *, already_prepared: bool) -> DatasetRef:
    return DatasetRef(
        folder=folder,
        content_digest=manifest.content_digest,
        train_examples=manifest.train_examples,
        validation_examples=manifest.validation_examples,
        already_prepared=already_prepared,
    )


def _write(
    spec: RunSpec,
    source: Source,
    *,
    digest: str,
    storage: Storage,
    telemetry: Sink,
    check_features: FeatureCheck | None,
) -> DatasetManifest:
    """Write all shards; return the manifest, which is not written yet."""
    checker = Checker(spec.data, source.vocabularies)
    if source.in_place is not None:
        check_first_example(check_features, with_class_names(source.in_place.features, source.origin), "examples")
        return index_in_place(spec, source, source.in_place, digest=digest, checker=checker, telemetry=telemetry)
    writers: list[PartWriter] = []
    records = _records(source, checker, telemetry)
    first = list(islice(records, 1))
    if first:
        check_first_example(check_features, with_class_names(checker.features, source.origin), checker.reading)
    records = chain(first, records)
    with ExitStack() as scratch:
        uploads = scratch.enter_context(ShardUploads(storage))
        scratch.enter_context(PROCESS_DEADLINE.start_on_interrupt(spec.stop.grace_seconds))  # closing waits for uploads
        parts = split_records(spec.data, records, seed=spec.train.seed)
        if checker.packing is not None:
            # After the split, so that no sequence is in both parts.
            parts = checker.packing.pack(parts)
        for held_out, record in parts:
            if not writers:
                # Text gives records of different lengths, which cannot be scattered.
                has_text = any(feature.encoding == "text" for feature in checker.features)
                length = None if has_text else source.length
                writers = _writers(spec, length, len(record), uploads, scratch)
            writers[held_out].add(record)
        if not writers:
            raise SourceError(f"data.source: {spec.data.source}: it has no examples; check data.options")
        train, validation = (writer.finish() for writer in writers)
        if uploads.kept:
            text = f"kept {uploads.kept} of {counted(len(train) + len(validation), 'shard')} from an earlier attempt"
            telemetry.emit(Note(text=text))
    origin = dict(source.origin)
    if checker.packing is not None:
        origin["data.pack"] = checker.packing.described()
        telemetry.emit(Note(text=f"packed {origin['data.pack']}"))
    return DatasetManifest(
        digest=digest,
        content_digest=content_digest(checker.features, train, validation),
        source=spec.data.source,
        origin=origin,
        features=checker.features,
        reading=checker.reading,
        train=train,
        validation=validation,
        extremes=checker.extremes,
    )


def _records(source: Source, checker: Checker, telemetry: Sink) -> Iterator[bytes]:
    from baton.tasks.foundation.dataset.shards import encode

    count = 0
    for count, (where, example) in enumerate(source.read(), start=1):
        if source.length is not None and count > source.length:
            raise _count_error(source, "more")
        yield encode(checker.check(where, example))
        if count % _REPORT_EVERY_EXAMPLES == 0:
            telemetry.emit(Preparing(examples=count))
    if source.length not in {None, count}:
        raise _count_error(source, f"{count}")
    telemetry.emit(Preparing(examples=count))


def _count_error(source: Source, found: str) -> SourceError:
    return SourceError(
        f"the source has {counted(source.length or 0, 'example')} but gave {found}: "
        "it changed while it was being read; run again"
    )


def _writers(
    spec: RunSpec, length: int | None, record_bytes: int, uploads: ShardUploads, scratch: ExitStack
) -> list[PartWriter]:
    """Return a writer for each part; `scratch` closes their files."""
    seed = spec.train.seed
    shard_examples = spec.data.shard_examples or max(1, _SHARD_BYTES // record_bytes)
    sizes = part_sizes(spec.data, length, seed=seed)
    if length is not None and sizes is not None:
        require_space(uploads.storage, length * (record_bytes + 16), includes_written_shards=True)
    if sizes is None or not spec.data.shuffle:
        of_blocks = seed if spec.data.shuffle else None
        return [BlockWriter(uploads, part=part, seed=of_blocks, shard_examples=shard_examples) for part in _PARTS]
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
    # Another process may have failed on this dataset and deleted its shards meanwhile.
    paths = [shard.path for shard in (*manifest.train, *manifest.validation) if not shard.is_external]
    for path, existing in zip(paths, parallel_map(at.exists, paths, workers=at.transfers), strict=True):
        if not existing:
            raise StorageError(f"{at.uri}/{path} was deleted during preparation; run again")
    try:
        storage.create(manifest_path(folder), manifest.to_json())
    except FileAlreadyThere:
        first = read_manifest(storage, folder)
        if first.content_digest != manifest.content_digest:
            raise SourceError(
                f"{at.uri}: another process prepared the same source with other examples: {manifest.source} does not "
                "give the same examples each time; seed its random numbers, delete the folder, and run again"
            ) from None
    return _ref(folder, manifest, already_prepared=False)


def _existing(storage: Storage, folder: str, data: DataSpec, code_folder: Path) -> DatasetManifest | None:
    """Return the manifest of a complete dataset; if shards are missing, they are written again under it.

    Raises:
        DamagedDataset: the manifest cannot be read, or names files outside of the storage that the run file does not.
    """
    try:
        manifest = read_manifest(storage, folder)
    except DamagedDataset as fault:
        if isinstance(fault.__cause__, FileMissing):
            return None
        raise
    for path in {shard.path for shard in (*manifest.train, *manifest.validation) if shard.is_external}:
        if not any(names_file(named, code_folder, path) for named in data.paths_in_place):
            raise DamagedDataset(
                f"{storage.uri}/{manifest_path(folder)} lists {path}, which is outside of the storage and not named by "
                "data.options.path; delete that folder and run again, and ask who else writes to the storage"
            )
    existing = set(storage.files(folder))
    shards = (shard for shard in (*manifest.train, *manifest.validation) if not shard.is_external)
    if any(f"{folder}/{shard.path}" not in existing for shard in shards):
        return None
    return manifest


def _delete_unfinished(storage: Storage, folder: str) -> None:
    """Delete unfinished shards, unless a manifest names them."""
    if not storage.exists(manifest_path(folder)):
        discard(storage, folder)
