"""Streams of examples from ranges that readers of columns read, see `columns.py`: the same order as that of records.

A window's ranges are read, compared with the manifest's checksums and decoded in threads, while the window before is in
use; so memory holds two windows. The bytes that are decoded are the bytes that were compared. Local files are read
where they are; ranges of remote ones come through the cache of the process.

The datasets of a mixture may have different forms. Each gives rows as the features of the mixture say.
"""

import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from baton.tasks.foundation.contracts.dataset import DatasetManifest, Feature, ShardRecord
from baton.tasks.foundation.dataset.columns import read_columns
from baton.tasks.foundation.dataset.features import STRING, Array
from baton.tasks.foundation.dataset.manifest import Part, positions_of_part
from baton.tasks.foundation.dataset.shards import LocalBytes, decode, extract, fetched, framed, remember_read_errors
from baton.tasks.foundation.storage.interface import Storage

# By feature, [rows, …], as `shards.extract` returns them.
Rows = dict[str, Array]
# Ranges that are read together, and a function that says which examples of the part among them are taken, in order.
ColumnPlan = tuple[Sequence[ShardRecord], Callable[[], npt.NDArray[np.int64]]]
_Found = TypeVar("_Found")
_BUFFERS = threading.local()
# Bytes; Eigen's tensors begin at a multiple of it.
_ALIGNMENT = 64
_WORKERS = min(os.cpu_count() or 1, 8)
# What `shards.extract` returns for an encoding; the others have the feature's own dtype.
_DTYPES = {"raw": STRING, "image": STRING, "text": STRING, "int64": "int64", "float": "float32"}


def plans_in_order(shards: Iterable[ShardRecord], skip: int = 0) -> Iterator[ColumnPlan]:
    """Yield the examples of a part, one range after the other, without the first `skip`."""
    for shard in shards:
        if skip < shard.examples:
            yield [shard], partial(np.arange, skip, shard.examples)
        skip = max(skip - shard.examples, 0)


def has_columns(manifests: Iterable[DatasetManifest]) -> bool:
    """Whether the examples of these datasets with shards are read by columns: files that are no TFRecord files.

    So are records that hold their arrays in different ways.
    """
    found = list(manifests)
    return len({frozenset(manifest.features) for manifest in found}) > 1 or any(
        shard.layout for manifest in found for shard in (*manifest.train, *manifest.validation)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeReader:
    """Reads the ranges of a dataset.

    Attributes:
        storage: store rooted at the dataset's folder.
        manifest: of the dataset, which has shards.
        part: whose examples are read.
        features: as the rows have them: those of the dataset, or of the mixture that names it.
    """

    storage: Storage
    manifest: DatasetManifest
    part: Part
    features: tuple[Feature, ...]

    @property
    def shards(self) -> tuple[ShardRecord, ...]:
        """The ranges that have examples of the part."""
        return self.manifest.validation if self.part == "validation" else self.manifest.train

    def pieces(self, plans: Iterable[ColumnPlan], most: int) -> Generator[Rows, None, None]:
        """Yield the examples of all plans, at most `most` at a time.

        Raises:
            DamagedDataset: a range differs from the manifest.
            StorageError: the store failed.
        """
        with closing(self._windows(iter(plans))) as windows:
            for rows, chosen in windows:
                for begin in range(0, len(chosen), most):
                    yield _taken(rows, chosen[begin : begin + most])

    def _windows(self, plans: Iterator[ColumnPlan]) -> Generator[tuple[Rows, npt.NDArray[np.int64]], None, None]:
        """Yield the rows of each plan, and their order; those of the next one are read meanwhile."""
        pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="baton-columns")
        used: Rows = {}

        def read(used: Rows) -> tuple[Rows, npt.NDArray[np.int64]] | None:
            plan = next(plans, None)
            return None if plan is None else self._read(plan, pool, used)

        try:
            ahead = _in_thread(partial(read, used))
            while True:
                with remember_read_errors():
                    window = ahead.result()
                del ahead
                if window is None:
                    return
                ahead = _in_thread(partial(read, used))
                yield window
                # Fresh memory costs as much time as reading; objects would stay until they are replaced. A window of
                # fewer rows has a part of the memory of a larger one.
                used = {
                    name: values if values.base is None else values.base
                    for name, values in window[0].items()
                    if values.dtype != object
                }
                del window
        finally:
            # Do not wait: what is read ahead is not needed, and the store may be unreachable.
            pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, plan: ColumnPlan, pool: ThreadPoolExecutor, used: Rows) -> tuple[Rows, npt.NDArray[np.int64]]:
        """Return the part's examples of ranges, and their order; in arrays that were used before, if they suffice."""
        records, order = plan
        with fetched(self.storage, records) as places:
            ends = np.cumsum([record.examples for record in records])
            rows = {each.name: _room(each, int(ends[-1]), used.pop(each.name, None)) for each in self.features}

            def fill(place: tuple[LocalBytes, LocalBytes | None], end: int) -> None:
                begin = end - place[0].record.examples
                self._fill(*place, {name: values[begin:end] for name, values in rows.items()})

            filled = [pool.submit(fill, place, int(end)) for place, end in zip(places, ends, strict=True)]
            chosen = order()
            for each in filled:
                each.result()
            return rows, chosen

    def _fill(self, place: LocalBytes, head: LocalBytes | None, into: Rows) -> None:
        """Read the part's examples of a range."""
        record, own = place.record, self.manifest.features
        body = place.read_verified(_buffer(record.size))
        held_out = self.manifest.held_out
        chosen = None if held_out is None else positions_of_part(self.part, held_out, [record])
        if record.layout is None:
            with tf.device("/CPU:0"):
                rows = {name: values.numpy() for name, values in extract(tf.constant(framed(body)), own).items()}
            rows = rows if chosen is None else _taken(rows, chosen)
        else:
            of_head = memoryview(b"") if head is None else head.read_verified(memoryview(bytearray(head.record.size)))
            rows = read_columns(body, of_head, record, own, rows=chosen, into=into if own == self.features else None)
        of_own = {each.name: each for each in own}
        for each in self.features:
            if rows[each.name] is not into[each.name]:
                into[each.name][...] = _as(each, rows[each.name], of_own[each.name])


def _buffer(size: int) -> memoryview:
    """Return memory of this thread; it is used again by the next call."""
    if len(getattr(_BUFFERS, "memory", b"")) < size:
        _BUFFERS.memory = np.empty(size, np.uint8)
    return memoryview(_BUFFERS.memory)[:size]


def _room(feature: Feature, count: int, used: Array | None) -> Array:
    if used is not None and len(used) >= count:
        return used[:count]
    return np.empty((count, *_shape(feature)), _numpy_dtype(feature))


def _taken(rows: Rows, chosen: npt.NDArray[np.int64]) -> Rows:
    return {
        name: values.take(chosen, axis=0)
        if values.dtype == object
        # The indices are valid; `clip` writes into the array without another copy.
        else values.take(chosen, axis=0, out=_aligned((len(chosen), *values.shape[1:]), values.dtype), mode="clip")
        for name, values in rows.items()
    }


def _aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return an array that TensorFlow takes without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _as(wanted: Feature, values: Array, own: Feature) -> Array:
    """Return what `extract` gives of a feature in the encoding that the mixture has it in."""
    if own.encoding == wanted.encoding or own.encoding in {"array", "text"}:
        return values
    with tf.device("/CPU:0"):
        decoded: Array = decode(tf.constant(values), own).numpy()
    return decoded


def _in_thread(work: Callable[[], _Found]) -> "Future[_Found]":
    """Run `work` in a thread that does not keep the process from ending."""
    future: Future[_Found] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as fault:  # noqa: BLE001 - raised in the thread that needs the rows
            future.set_exception(fault)

    threading.Thread(target=run, name="baton-window", daemon=True).start()
    return future


def together(pieces: Iterable[Rows], size: int) -> Iterator[Rows]:
    """Yield the rows of pieces, `size` at a time; the remainder is left out."""
    held = _RowBuffer(iter(pieces))
    while parts := held.take(size):
        yield _joined(parts)


def mixed(
    sources: Sequence[Iterator[Rows]], labels: Iterable[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]], most: int
) -> Iterator[Rows]:
    """Yield the rows of several streams in the order of a mixture.

    Args:
        sources: the pieces of each source's own stream, without end.
        labels: the source of each position, and whether it is kept, see `Mixing.labels_from`.
        most: positions in a piece, at most.
    """
    held = [_RowBuffer(source) for source in sources]
    for all_labels, all_kept in labels:
        for begin in range(0, len(all_labels), most):
            chosen, kept = all_labels[begin : begin + most], all_kept[begin : begin + most]
            parts = [part for number, each in enumerate(held) for part in each.take(int((chosen == number).sum()))]
            # Rows of all sources, one source after the other; a stable sort says where each position's row is.
            order = np.empty(len(chosen), np.int64)
            order[np.argsort(chosen, kind="stable")] = np.arange(len(chosen))
            yield _taken(_joined(parts), order[kept])


class _RowBuffer:
    """Gives the next rows of a stream, as many as are asked for; none if it ends before."""

    def __init__(self, pieces: Iterator[Rows]) -> None:
        self._pieces = pieces
        self._rest: Rows = {}

    def take(self, count: int) -> list[Rows]:
        found: list[Rows] = []
        while count:
            if not self._rest or not _length(self._rest):
                if (piece := next(self._pieces, None)) is None:
                    return []
                self._rest = piece
            found.append({name: values[:count] for name, values in self._rest.items()})
            self._rest = {name: values[count:] for name, values in self._rest.items()}
            count -= _length(found[-1])
        return found


def _joined(parts: Sequence[Rows]) -> Rows:
    return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _length(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def rows_dataset(rows: Callable[[], Iterator[Rows]], features: Sequence[Feature], size: int | None) -> Any:
    """Return a dataset of rows, `size` in each element (None: any number), as `shards.extract` returns them."""
    signature = {
        each.name: tf.TensorSpec([size, *_shape(each)], _DTYPES.get(each.encoding, each.dtype)) for each in features
    }
    return tf.data.Dataset.from_generator(rows, output_signature=signature)


def _shape(feature: Feature) -> tuple[int, ...]:
    return () if feature.encoding in {"raw", "image"} else feature.shape


def _numpy_dtype(feature: Feature) -> Any:
    dtype = _DTYPES.get(feature.encoding, feature.dtype)
    return object if dtype == STRING else dtype
