"""Reads prepared datasets with `tf.data`: training data without end, of one dataset or of a mixture of several.

Python only makes the plan, one element per window: which shards, in which order, and how many examples to skip.
TensorFlow reads, permutes, batches and parses. Iterate inside `original_read_errors` to get Baton's errors. What is
held out is read by `evaluation_sets.py`.

With `data.cache: memory` the decoded training examples are in host memory, and reading becomes a lookup by row. Rows
are numbered by dataset, shard and record, so the order, a seek and the bits are those of reading the records.

In a slice of several TPU hosts one process drives all of them, and each host has a TensorFlow server. A graph that runs
there can neither call Python nor read the client's disk. So for such a host (`WorkerFiles`) the plans are made
beforehand, for a range of batches, and are constants of the graph. The batches are the same. The client compares the
shards with the manifest when it plans, and TensorFlow each record with the checksum that TFRecord files have.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from baton.tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, Feature, ShardRecord
from baton.tasks.foundation.contracts.run_spec import EpochLength
from baton.tasks.foundation.dataset import order
from baton.tasks.foundation.dataset.column_streams import (
    ColumnPlan,
    RangeReader,
    Rows,
    has_columns,
    mixed,
    plans_in_order,
    rows_dataset,
    together,
)
from baton.tasks.foundation.dataset.columns import value_bytes
from baton.tasks.foundation.dataset.features import STRING, Array, unflatten, zeros
from baton.tasks.foundation.dataset.manifest import load_manifest, plain_datasets, positions_of_part, ref_of_source
from baton.tasks.foundation.dataset.mixing import Mixing, source_seed
from baton.tasks.foundation.dataset.model_inputs import Decoding, Layout, TrainingFunctions, transformed_training
from baton.tasks.foundation.dataset.order import Window
from baton.tasks.foundation.dataset.shards import (
    Plan,
    VerifiedShards,
    finished,
    has_images,
    original_read_errors,
    parse,
    parsed,
    part_of,
    records_in,
    windows_of,
)
from baton.tasks.foundation.dataset.slice_input import constant_plans, unreadable_elsewhere
from baton.tasks.foundation.errors import AcceleratorError
from baton.tasks.foundation.machine.processes import available_bytes
from baton.tasks.foundation.storage.interface import Storage

Labels = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]
_DECODE_TOGETHER = 256
# Of the memory that is free now: the rest is for batches, snapshots and what is copied meanwhile.
_SHARE = 0.5
_PARSE_EXAMPLES = 4096
_PARSE_BYTES = 8 << 20
_COLUMN_BYTES = 4 << 20
# Looking a row up costs little, so that starting the operations matters for the smallest batches only.
_GATHER_EXAMPLES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFiles:
    """What a host reads that runs no Python of Baton.

    Attributes:
        root: the storage root as that host finds it: a folder there, or gs://bucket/prefix.
        batches: how many global batches are planned, at least 1; the dataset ends at this number or a few later.
    """

    root: str
    batches: int

    def __post_init__(self) -> None:
        if self.batches < 1:
            raise AcceleratorError(f"batches={self.batches} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRecords:
    """How many records of a stream are planned, and where their host finds the storage root."""

    root: str
    records: int


def windows_with(windows: Iterable[Window], records: int) -> list[Window]:
    """Return the first windows, at least one, until they have `records` examples."""
    found: list[Window] = []
    for window in windows:
        found.append(window)
        records -= window.end - window.skip
        if records <= 0:
            break
    return found


def labels_with(labels: Iterator[Labels], records: int) -> Labels:
    """Return the labels of a mixture, until `records` examples are kept: indices of sources, and which are kept."""
    sources: list[npt.NDArray[np.int64]] = []
    kept: list[npt.NDArray[np.bool_]] = []
    for found, of_found in labels:
        sources.append(found)
        kept.append(of_found)
        records -= int(of_found.sum())
        if records <= 0:
            break
    return np.concatenate(sources), np.concatenate(kept)


@dataclass(frozen=True, slots=True)
class DecodedExamples:
    """All training examples of a dataset.

    Attributes:
        tensors: by feature, [rows, ...], in the memory of the host.
        first_rows: number of the first row of each dataset that a mixture names; (0,) for others.
    """

    tensors: dict[str, Any]
    first_rows: tuple[int, ...]

    def take(self, rows: Any) -> dict[str, Any]:
        """Return the features of some rows, int64 [n], as tensors [n, ...]."""
        return {name: tf.gather(values, rows) for name, values in self.tensors.items()}


class _LastExamples:
    """The examples of the dataset that this process has decoded last; its segments use them again."""

    def __init__(self) -> None:
        self.of: tuple[str, str] | None = None
        self.examples: DecodedExamples | None = None


_HELD = _LastExamples()


def decoded_bytes(storage: Storage, ref: DatasetRef) -> int:
    """Return how much memory the decoded training examples take, in bytes."""
    manifest = load_manifest(storage, ref)
    of_example = sum(math.prod(each.shape) * _item_bytes(each) for each in manifest.features)
    of_text = sum(shard.size for _, plain in plain_datasets(storage, manifest, ref.folder) for shard in plain.train)
    has_text = any(each.dtype == STRING for each in manifest.features)
    return of_example * _rows_of(storage, ref) + has_text * of_text


def fits_into_memory(storage: Storage, ref: DatasetRef) -> bool:
    """Whether the decoded training examples fit into the memory that is free now, with as much to spare."""
    if _HELD.of == _key(storage, ref):
        return True
    available = available_bytes()
    return available is None or decoded_bytes(storage, ref) <= _SHARE * available


def decode_examples(storage: Storage, ref: DatasetRef) -> DecodedExamples:
    """Read and decode all training examples, unless this process holds them already.

    Raises:
        DamagedDataset: the manifest belongs to another dataset, or a shard differs from its manifest.
        StorageError: the store failed.
    """
    if _HELD.of == _key(storage, ref) and _HELD.examples is not None:
        return _HELD.examples
    _HELD.of = _HELD.examples = None  # frees the memory of the dataset before
    manifest = load_manifest(storage, ref)
    rows = _rows_of(storage, ref)
    values = {each.name: zeros((rows, *each.shape), each.dtype) for each in manifest.features}
    first_rows, row = [], 0
    plains = plain_datasets(storage, manifest, ref.folder)
    by_columns = has_columns(plain for _, plain in plains)
    for folder, plain in plains:
        first_rows.append(row)
        for decoded in _decoded(storage.at(folder), plain, manifest.features if by_columns else None):
            count = len(next(iter(decoded.values())))
            for name, array in decoded.items():
                values[name][row : row + count] = array
            row += count
    with tf.device("/CPU:0"):
        tensors = {name: tf.constant(values.pop(name)) for name in list(values)}
    examples = DecodedExamples(tensors, tuple(first_rows))
    _HELD.of, _HELD.examples = _key(storage, ref), examples
    return examples


def row_numbers(manifest: DatasetManifest, first_row: int) -> list[npt.NDArray[np.int64]]:
    """Return the rows of the training examples of each shard, in order.

    Args:
        first_row: number of its first row.
    """
    counts = [shard.examples for shard in manifest.train]
    ends = first_row + np.cumsum(counts, dtype=np.int64)
    return [np.arange(end - count, end, dtype=np.int64) for count, end in zip(counts, ends, strict=True)]


def _decoded(
    at: Storage, manifest: DatasetManifest, by_columns: tuple[Feature, ...] | None
) -> Iterator[dict[str, Array]]:
    """Yield the training examples of a dataset, some at a time, in the order of shards and records.

    Args:
        at: store rooted at the dataset's folder.
        manifest: of the dataset, which has shards.
        by_columns: the features as rows of columns have them; None: the dataset has records.
    """
    features = by_columns or manifest.features
    of_images = any(each.encoding == "image" for each in features)

    def batch(records: Any) -> dict[str, Any]:
        if of_images:
            # One record at a time in parallel calls, because decoding an image is slow.
            one = parse(tf.nest.map_structure(lambda each: each[tf.newaxis], records), features)
            return {name: value[0] for name, value in one.items()}
        return parse(records, features)

    work = tf.autograph.experimental.do_not_convert(batch)
    if by_columns is not None:
        reader = RangeReader(storage=at, manifest=manifest, part="train", features=by_columns)
        rows = rows_dataset(lambda: reader.pieces(plans_in_order(manifest.train), _DECODE_TOGETHER), by_columns, None)
        if of_images:
            rows = rows.unbatch().map(work, num_parallel_calls=tf.data.AUTOTUNE).batch(_DECODE_TOGETHER)
        else:
            rows = rows.map(work, num_parallel_calls=tf.data.AUTOTUNE)
        with original_read_errors():
            yield from rows.as_numpy_iterator()
        return
    plans = (([shard], shard) for shard in manifest.train)
    with VerifiedShards(at) as shards, original_read_errors():
        for paths, _, shard in shards.read_ahead(plans):
            records = _of_training(records_in(paths), manifest, shard)
            if of_images:
                decoded = records.map(work, num_parallel_calls=tf.data.AUTOTUNE).batch(_DECODE_TOGETHER)
            else:
                decoded = records.batch(_DECODE_TOGETHER).map(work, num_parallel_calls=tf.data.AUTOTUNE)
            yield from decoded.as_numpy_iterator()


def _of_training(records: Any, manifest: DatasetManifest, shard: ShardRecord) -> Any:
    if manifest.held_out is None:
        return records
    chosen = np.zeros(shard.records_held, np.bool_)
    chosen[positions_of_part("train", manifest.held_out, [shard])] = True
    pairs = tf.data.Dataset.zip(records, tf.data.Dataset.from_tensor_slices(chosen))
    return pairs.filter(lambda _, keep: keep).map(lambda record, _: record)


def _rows_of(storage: Storage, ref: DatasetRef) -> int:
    manifest = load_manifest(storage, ref)
    return sum(plain.train_examples for _, plain in plain_datasets(storage, manifest, ref.folder))


def _item_bytes(feature: Feature) -> int:
    return 8 if feature.dtype == STRING else np.dtype(feature.dtype).itemsize


def _key(storage: Storage, ref: DatasetRef) -> tuple[str, str]:
    return f"{storage.uri}/{ref.folder}", ref.content_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStart:
    """What the order of a stream follows from, and where it begins.

    Attributes:
        seed: the run's seed.
        window_shards: shards that are read and permuted together.
        first_example: position of the first record.
        epoch_examples: examples after which an epoch ends; None: all.
        shuffle: whether shards and examples are permuted; False: they stay in the order of the source.
    """

    seed: int
    window_shards: int
    first_example: int
    epoch_examples: int | None = None
    shuffle: bool = True

    def indices(self, size: Any, window_seed: Any) -> Any:
        """Return the order of the examples of a window, an int64 tensor [size]."""
        return order.shuffled_indices(size, window_seed) if self.shuffle else tf.range(tf.cast(size, tf.int64))


def training_records(
    storage: Storage,
    ref: DatasetRef,
    manifest: DatasetManifest,
    start: StreamStart,
    *,
    chunk: int,
    decoded: DecodedExamples | None = None,
    planned: PlannedRecords | None = None,
) -> Any:
    """Return a dataset of vectors [chunk]: the records of the training examples, strings, in order.

    Where a dataset is read by columns, its elements are what `shards.extract` would return of such vectors.

    Args:
        start: where the stream begins.
        chunk: records in a vector.
        decoded: the examples in memory; then the vectors hold their rows, int64, in place of records.
        planned: what another host reads without Python; None: this process reads, without end.
    """
    plains = plain_datasets(storage, manifest, ref.folder)
    if decoded is None and has_columns(plain for _, plain in plains):
        if planned is not None:
            raise unreadable_elsewhere(manifest)
        return rows_dataset(lambda: _rows(storage, manifest, plains, start, chunk), manifest.features, chunk)
    if manifest.mixture is not None:
        return _mixed_records(storage, manifest, start, decoded, planned).batch(chunk, drop_remainder=True)
    if decoded is not None:
        return windows_of_rows(manifest, start, decoded.first_rows[0]).rebatch(chunk, drop_remainder=True)
    return _windows_of_records(storage, ref.folder, manifest, start, planned).rebatch(chunk, drop_remainder=True)


def windows_of_rows(manifest: DatasetManifest, start: StreamStart, first_row: int) -> Any:
    """Return a dataset of int64 vectors, one for each window, as `windows_of_records` of rows in memory.

    Args:
        start: where the stream begins.
        first_row: number of the dataset's first row.
    """
    rows = row_numbers(manifest, first_row)

    def plans() -> Iterator[Any]:
        for window in _windows(manifest, start):
            yield np.concatenate([rows[shard] for shard in window.shards]), window.seed, (window.skip, window.end)

    def read(of_window: Any, window_seed: Any, taken: Any) -> Any:
        return tf.gather(of_window, start.indices(tf.size(of_window), window_seed)[taken[0] : taken[1]])

    signature = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([2], tf.int64), tf.TensorSpec([2], tf.int64))
    return tf.data.Dataset.from_generator(plans, output_signature=signature).map(read)


def _windows_of_records(
    storage: Storage, folder: str, manifest: DatasetManifest, start: StreamStart, planned: PlannedRecords | None
) -> Any:
    """Return a dataset of string vectors, one for each window of a dataset with shards."""
    if planned is None:
        plans = _verified_windows(storage.at(folder), manifest, start)
    else:
        found = windows_with(_windows(manifest, start), planned.records)
        chosen = [
            ([manifest.train[shard] for shard in window.shards], window.seed, (window.skip, window.end))
            for window in found
        ]
        plans = constant_plans(storage.at(folder), f"{planned.root}/{folder}", manifest, "train", chosen)

    def read(paths: Any, count: Any, part_positions: Any, window_seed: Any, taken: Any) -> Any:
        if manifest.held_out is None:
            chosen = start.indices(count, window_seed)[taken[0] : taken[1]]
        else:
            indices = start.indices(tf.size(part_positions), window_seed)
            chosen = tf.gather(part_positions, indices[taken[0] : taken[1]])
        return records_in(paths).batch(count).map(lambda records: tf.gather(records, chosen))

    return plans.flat_map(read).prefetch(1)


def _verified_windows(at: Storage, manifest: DatasetManifest, start: StreamStart) -> Any:
    """Return a dataset of plans without end, whose shards are verified and on this machine."""

    def plans() -> Iterator[Plan]:
        planned = (([manifest.train[shard] for shard in window.shards], window) for window in _windows(manifest, start))
        with VerifiedShards(at) as shards:
            for paths, chosen, window in shards.read_ahead(planned):
                yield paths, *part_of(manifest, chosen, "train"), window.seed, (window.skip, window.end)

    return windows_of(plans)


def _windows(manifest: DatasetManifest, start: StreamStart) -> Iterator[order.Window]:
    return order.windows(
        [shard.examples for shard in manifest.train],
        seed=start.seed,
        window_shards=start.window_shards,
        first_example=start.first_example,
        epoch_examples=start.epoch_examples,
        shuffle=start.shuffle,
    )


def _mixed_records(
    storage: Storage,
    manifest: DatasetManifest,
    start: StreamStart,
    decoded: DecodedExamples | None,
    planned: PlannedRecords | None,
) -> Any:
    """Return a dataset of single records, or of rows in memory: each source's stream, in the order of the mixture."""
    mixture = manifest.mixture
    if mixture is None or start.epoch_examples is None:
        raise ValueError("not a mixture, or its epoch is not known")
    mixing = Mixing.of(mixture, seed=start.seed, epoch_examples=start.epoch_examples)
    starts = _starts(mixing, start)
    of_sources: list[PlannedRecords | None] = [None] * len(mixture.sources)
    if planned is None:
        chosen = _items(lambda: (found for found, _ in mixing.labels_from(start.first_example)), np.int64)
        kept = _items(lambda: (found for _, found in mixing.labels_from(start.first_example)), np.bool_)
    else:
        labels, are_kept = labels_with(mixing.labels_from(start.first_example), planned.records)
        chosen, kept = (tf.data.Dataset.from_tensor_slices(found) for found in (labels, are_kept))
        counts = np.bincount(labels, minlength=len(mixture.sources)).tolist()
        of_sources = [PlannedRecords(root=planned.root, records=count) for count in counts]
    streams = []
    for number, (source, own) in enumerate(zip(mixture.sources, starts, strict=True)):
        plain = load_manifest(storage, ref_of_source(source))
        if decoded is None:
            streams.append(_windows_of_records(storage, source.folder, plain, own, of_sources[number]).unbatch())
        else:
            streams.append(windows_of_rows(plain, own, decoded.first_rows[number]).unbatch())
    records = tf.data.Dataset.choose_from_datasets(streams, chosen, stop_on_empty_dataset=False)
    if not mixing.leaves_out:
        return records
    return tf.data.Dataset.zip(records, kept).filter(lambda _, keep: keep).map(lambda record, _: record)


def _starts(mixing: Mixing, start: StreamStart) -> list[StreamStart]:
    """Return where the stream of each source of a mixture begins."""
    return [
        StreamStart(
            seed=source_seed(start.seed, number),
            window_shards=start.window_shards,
            first_example=first,
            shuffle=start.shuffle,
        )
        for number, first in enumerate(mixing.taken_before(start.first_example))
    ]


def _rows(
    storage: Storage,
    manifest: DatasetManifest,
    plains: Sequence[tuple[str, DatasetManifest]],
    start: StreamStart,
    chunk: int,
) -> Iterator[Rows]:
    """Yield the training examples of datasets that are read by columns, `chunk` at a time, without end."""
    mixing, starts = None, [start]
    if manifest.mixture is not None and start.epoch_examples is not None:
        mixing = Mixing.of(manifest.mixture, seed=start.seed, epoch_examples=start.epoch_examples)
        starts = _starts(mixing, start)
    streams = [
        RangeReader(storage=storage.at(folder), manifest=plain, part="train", features=manifest.features).pieces(
            _row_plans(plain, own), chunk
        )
        for (folder, plain), own in zip(plains, starts, strict=True)
    ]
    with ExitStack() as stack:
        for stream in streams:
            stack.callback(stream.close)
        pieces = streams[0] if mixing is None else mixed(streams, mixing.labels_from(start.first_example), chunk)
        yield from together(pieces, chunk)


def _row_plans(manifest: DatasetManifest, start: StreamStart) -> Iterator[ColumnPlan]:
    def chosen(window: Window) -> npt.NDArray[np.int64]:
        with tf.device("/CPU:0"):
            found: npt.NDArray[np.int64] = start.indices(window.examples, window.seed).numpy()
        return found[window.skip : window.end]

    for window in _windows(manifest, start):
        yield [manifest.train[shard] for shard in window.shards], partial(chosen, window)


def _items(vectors: Callable[[], Iterator[Any]], dtype: Any) -> Any:
    """Return a dataset of the items of the vectors that a function yields."""
    return tf.data.Dataset.from_generator(vectors, output_signature=tf.TensorSpec([None], dtype)).unbatch()


def training_dataset(
    storage: Storage,
    ref: DatasetRef,
    *,
    seed: int,
    global_batch_size: int,
    window_shards: int,
    first_batch: int,
    host: int = 0,
    hosts: int = 1,
    local_replicas: int = 1,
    drop_remainder: bool = False,
    shuffle: bool = True,
    functions: TrainingFunctions | None = None,
    in_memory: bool = False,
    worker: WorkerFiles | None = None,
) -> Any:
    """Return per-replica batches from global batch `first_batch` on, without end.

    Global batch first_batch + k consists of the elements [k * local_replicas, (k + 1) * local_replicas) of every host,
    ordered by host, then by replica. Its examples do not depend on the number of hosts or replicas.

    Args:
        storage: the storage root; `ref.folder` is relative to it.
        global_batch_size: examples per step, over all replicas; divisible by their number.
        window_shards: shards that are read and permuted together, in memory; up to three windows are held.
        first_batch: index of the first global batch, from 0: step + skipped batches.
        host: index of this host, from 0.
        hosts: number of hosts that feed accelerators.
        local_replicas: replicas on each host.
        drop_remainder: whether an epoch ends with its last whole batch.
        shuffle: whether each epoch has another order; False: that of the source.
        functions: transforms of the examples and batches; None: examples as they were prepared.
        in_memory: whether all examples are decoded into memory first. The batches are the same.
        worker: the dataset is for a host that runs no Python of Baton, and ends after its batches, which are the same.

    Returns:
        A deterministic tf.data.Dataset of (x,), (x, y) or (x, y, sample_weight), each tensor
        [global_batch_size / (hosts * local_replicas), *shape] with a static shape: that of the feature, or of what
        `functions` return.

    Raises:
        AcceleratorError: a host without Python cannot read the dataset.
        DamagedDataset: the manifest belongs to another dataset. While iterating: a shard differs from the manifest.
    """
    manifest = load_manifest(storage, ref)
    if in_memory and worker is not None:
        raise AcceleratorError("data.cache: memory: the memory of this process is not that of another host; remove it")
    epoch = EpochLength(
        train_examples=manifest.train_examples, global_batch_size=global_batch_size, drop_remainder=drop_remainder
    )
    first = first_batch * global_batch_size
    start = StreamStart(
        seed=seed, window_shards=window_shards, first_example=first, epoch_examples=epoch.examples, shuffle=shuffle
    )
    # Parse several batches at once: for small ones, starting the operations would take most of the time.
    decoded = decode_examples(storage, ref) if in_memory else None
    together = _GATHER_EXAMPLES if decoded else _examples_to_parse(storage, ref, manifest, window_shards)
    batches = max(1, together // global_batch_size)

    chunk, planned = batches * global_batch_size, None
    if worker is not None:  # whole chunks, so that the last planned batch is not lost with the remainder
        planned = PlannedRecords(root=worker.root, records=-(-worker.batches // batches) * chunk)
    dataset = training_records(storage, ref, manifest, start, chunk=chunk, decoded=decoded, planned=planned)
    layout = Layout(
        first_example=first,
        chunk_batches=batches,
        global_batch_size=global_batch_size,
        host=host,
        hosts=hosts,
        local_replicas=local_replicas,
    )
    if functions is None:
        return finished(_untransformed(dataset, manifest, decoded, layout))
    decoding = _decoding(manifest, decoded)
    return finished(transformed_training(dataset, functions, decoding, layout, seed=seed))


def _untransformed(dataset: Any, manifest: DatasetManifest, decoded: DecodedExamples | None, layout: Layout) -> Any:
    """The per-replica batches of a host, from chunks of records or of rows in memory."""
    if decoded is None:
        dataset = parsed(dataset.map(layout.of_host), manifest, layout.chunk_batches * layout.per_host)
    else:
        take = tf.autograph.experimental.do_not_convert(lambda rows: unflatten(decoded.take(layout.of_host(rows))))
        dataset = dataset.map(take, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return dataset.rebatch(layout.per_host // layout.local_replicas, drop_remainder=True)


def _decoding(manifest: DatasetManifest, decoded: DecodedExamples | None) -> Decoding:
    """How transforms get examples from records, or from rows in memory."""
    if decoded is None:
        return Decoding(
            batch=lambda records: unflatten(parse(records, manifest.features)), one_by_one=has_images(manifest)
        )
    return Decoding(batch=lambda rows: unflatten(decoded.take(rows)), one_by_one=False)


def _examples_to_parse(storage: Storage, ref: DatasetRef, manifest: DatasetManifest, window_shards: int) -> int:
    """Examples to parse at once: at most a window, so that the first batch waits for one or two windows only."""
    if has_images(manifest):
        return 1  # decoded images are much larger than their records
    found = [plain for _, plain in plain_datasets(storage, manifest, ref.folder)]
    in_window = sum(min(plain.train[0].examples * window_shards, plain.train_examples) for plain in found)
    if has_columns(found):  # the bytes in the files say little of the arrays
        return min(_PARSE_EXAMPLES, max(1, _COLUMN_BYTES // max(1, value_bytes(manifest.features))), in_window)
    of_size = min(_PARSE_BYTES * plain.train[0].records_held // plain.train[0].size for plain in found)
    return min(_PARSE_EXAMPLES, of_size, in_window)
