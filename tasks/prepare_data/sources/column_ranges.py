"""Reads, checks and describes the ranges of files that stay in place, see `foundation/dataset/columns.py`.

A source plans its ranges from footers or an index. Here each range is read once, as training will read it: its bytes
get their checksum, every value is read and checked, and images are decoded.
"""

import dataclasses
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, islice

import google_crc32c
import numpy as np

from baton.tasks.foundation.contracts.dataset import Feature
from baton.tasks.foundation.dataset.columns import range_bytes, read_columns
from baton.tasks.foundation.dataset.features import Array, unflatten
from baton.tasks.foundation.errors import DamagedDataset, SourceChanged, SourceError
from baton.tasks.foundation.machine.processes import available_bytes
from baton.tasks.prepare_data.sources.image_folders import decode_image_file
from baton.tasks.prepare_data.sources.source import ExampleChecker, InPlace, LocatedExample, Range
from baton.tasks.prepare_data.sources.source_files import Fingerprint, SourceFile, require_unchanged
from baton.tasks.prepare_data.sources.verified_reads import BlockStream, map_ahead

# Ranges that are decoded at once; twice as many are in memory.
_WORKERS = 2
# Images of one range that are decoded at once.
_IMAGE_WORKERS = min(os.cpu_count() or 1, 16)
_BUFFER_BYTES = 1 << 20
# Called with a range, its head and its bytes, before they are decoded.
Inspect = Callable[[Range, bytes, bytes], None]


def ranges_in_place(
    files: Sequence[SourceFile],
    found: Fingerprint,
    planned: Callable[[int | None], Iterable[Range]],
    features: tuple[Feature, ...],
    *,
    inspect: Inspect | None = None,
) -> InPlace:
    """Return the examples of files that stay where they are.

    Args:
        found: what they were when the source was opened; a file that changes while it is read is refused.
        planned: returns the ranges, see `checked_ranges`, given the examples of a range; None: about 32 MiB of bytes.
        features: what is read of each range.
        inspect: raises an error for a range that must not be decoded.
    """
    return InPlace(
        features=features,
        ranges=lambda checker, records: require_unchanged(
            files, found, checked_ranges(files, planned(records), features, checker, inspect=inspect)
        ),
    )


def checked_ranges(
    files: Sequence[SourceFile],
    planned: Iterable[Range],
    features: Sequence[Feature],
    checker: ExampleChecker,
    *,
    inspect: Inspect | None = None,
) -> Iterator[Range]:
    """Read and check ranges of files, each once, and yield them with their checksums.

    Args:
        planned: the ranges, with any `crc32c` and `layout.head_crc32c`, each with a `layout` and at least one record.
            Those of one file follow each other in ascending order. `path` is the file's `uri`.
        features: what is read of each range, see `columns.read_columns`.
        checker: checks every value.
        inspect: see `ranges_in_place`.

    Raises:
        SourceError: bytes cannot be read as the layout says, or a value is refused; names the file and the row.
        SourceChanged: a file has become shorter.
        DamagedInTransit: other bytes arrived than the store has.
    """
    for found, first, arrays in _read_ranges(files, planned, features, images=False, inspect=inspect):
        checker.check_rows(partial(_where, found.path, first), arrays, features)
        yield found


def copied_examples(
    files: Sequence[SourceFile], planned: Iterable[Range], features: Sequence[Feature]
) -> Iterator[LocatedExample]:
    """Read ranges of files, and yield their examples one by one, for `Source.read`.

    Args:
        files: see `checked_ranges`.
        planned: see `checked_ranges`; memory holds the decoded examples of a few of them.
        features: what is read of each range.

    Raises:
        SourceError: see `checked_ranges`; values are checked later.
    """
    for found, first, arrays in _read_ranges(files, planned, features, images=True):
        for row in range(found.records):
            yield _where(found.path, first, row), unflatten({name: values[row] for name, values in arrays.items()})


def _read_ranges(
    files: Sequence[SourceFile],
    planned: Iterable[Range],
    features: Sequence[Feature],
    *,
    images: bool,
    inspect: Inspect | None = None,
) -> Iterator[tuple[Range, int, dict[str, Array]]]:
    """Yield each range with the row of its file that it begins with, and its values."""
    by_uri = {file.uri: file for file in files}
    ranges = iter(planned)
    first = list(islice(ranges, 1))
    # Ranges are about equally large. Of those that memory may hold only a few of, one is read after the other.
    held = sum(range_bytes(features, records=each.records, size=each.size) + each.size for each in first) * 2 * _WORKERS
    available = available_bytes()
    workers = _WORKERS if available is None or 2 * held <= available else 1
    of_files = groupby(chain(first, ranges), key=lambda each: each.path)
    # The next file is read while the last ranges of this one are decoded: many files have a single range.
    data = chain.from_iterable(_with_bytes(by_uri[uri], ranges) for uri, ranges in of_files)
    yield from map_ahead(partial(_read, features=features, images=images, inspect=inspect), data, workers=workers)


def _where(uri: str, first: int, row: int) -> str:
    return f"{uri}, row {first + row}"


def _with_bytes(file: SourceFile, planned: Iterable[Range]) -> Iterator[tuple[Range, int, bytes, bytes]]:
    """Yield each range with the number of records before it, the bytes of its head and its own."""
    heads: dict[tuple[int, int], bytes] = {}

    def head_of(each: Range) -> bytes:
        layout = each.layout
        if layout is None:
            raise ValueError(f"{each.path} is a TFRecord file")
        place = layout.head_begin, layout.head_size
        if place not in heads:
            heads.clear()  # a file has one, or they follow each other
            with file.open() as opened:
                opened.seek(layout.head_begin)
                heads[place] = opened.read(layout.head_size)
        return heads[place]

    first = 0
    if file.local is not None:
        with file.open() as opened:
            for each in planned:
                opened.seek(each.begin)
                yield each, first, *_of_size(each, head_of(each), opened.read(each.size))
                first += each.records
        return
    ranges = list(planned)
    of_heads = [head_of(each) for each in ranges]
    # One request after the other, compared with the store's checksum of the whole file.
    with file.reading() as blocks:
        stream, at = io.BufferedReader(BlockStream(blocks), _BUFFER_BYTES), 0
        for each, head in zip(ranges, of_heads, strict=True):
            while at < each.begin:
                at += len(stream.read(min(each.begin - at, _BUFFER_BYTES))) or _end(each)
            yield each, first, *_of_size(each, head, stream.read(each.size))
            at += each.size
            first += each.records


def _of_size(each: Range, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    if len(body) < each.size or (each.layout is not None and len(head) < each.layout.head_size):
        _end(each)
    return head, body


def _end(each: Range) -> int:
    raise SourceChanged(f"{each.path}: changed while it was being read; run again when no process writes to it")


def _read(
    found: tuple[Range, int, bytes, bytes], *, features: Sequence[Feature], images: bool, inspect: Inspect | None
) -> tuple[Range, int, dict[str, Array]]:
    """Return a range with its checksums, the records before it, and its values; of images the files or `images`."""
    planned, first, head, body = found
    layout = planned.layout
    if layout is None:
        raise ValueError(f"{planned.path} is a TFRecord file")
    if inspect is not None:
        inspect(planned, head, body)
    crc32c, head_crc32c = (f"{google_crc32c.value(data):08x}" for data in (body, head))
    read = dataclasses.replace(planned, crc32c=crc32c, layout=layout.model_copy(update={"head_crc32c": head_crc32c}))
    try:
        arrays = read_columns(memoryview(body), memoryview(head), read.as_shard(first), features)
    except DamagedDataset as fault:
        raise SourceError(str(fault)) from fault
    where = partial(_where, read.path, first)
    return read, first, {each.name: decoded_values(arrays[each.name], each, where, images=images) for each in features}


def decoded_values(values: Array, feature: Feature, where: Callable[[int], str], *, images: bool = False) -> Array:
    """Return what a reader of ranges or `shards.extract` gave, as the feature's dtype; each image is decoded once.

    Args:
        values: [rows, …], as `columns.read_columns` returns them.
        feature: what they are.
        where: says where a row is, given its index, for messages.
        images: return decoded images, and not their files.

    Returns:
        [rows, *feature.shape] of the feature's dtype; of text bytes objects; of images their files, unless `images`.

    Raises:
        SourceError: an image cannot be decoded, or a number does not fit into the feature's dtype.
    """
    if feature.encoding in {"array", "text"}:
        return values
    if feature.encoding == "image":
        decoded = np.empty((len(values) if images else 0, *feature.shape), feature.dtype)
        decode = partial(decode_image_file, shape=feature.shape, dtype=feature.dtype)
        found = map_ahead(decode, values, workers=_IMAGE_WORKERS)
        for row in range(len(values)):
            try:
                image = next(found)
            except ValueError as fault:
                raise SourceError(
                    f"{where(row)}: {feature.record_key!r} {fault}; save it as JPEG or PNG, or remove it"
                ) from fault
            if images:
                decoded[row] = image
        return decoded if images else values
    if feature.encoding == "raw":
        return _numbers(values, feature, where)
    return cast_values(values, feature, where)


def _numbers(values: Array, feature: Feature, where: Callable[[int], str]) -> Array:
    size = np.dtype(feature.dtype).itemsize * int(np.prod(feature.shape))
    for row, data in enumerate(values):
        if len(data) != size:
            raise SourceError(
                f"{where(row)}: {feature.record_key!r} has {len(data)} bytes, but {feature.dtype} "
                f"{list(feature.shape)} needs {size}; correct dtype or shape"
            )
    numbers: Array = np.frombuffer(b"".join(values), feature.dtype).reshape(len(values), *feature.shape)
    return numbers


def cast_values(values: Array, feature: Feature, where: Callable[[int], str]) -> Array:
    """Cast values [rows, …] to the feature's dtype; an integer must keep its value, see `decoded_values`."""
    with np.errstate(over="ignore"):  # becomes infinity, which is refused later
        cast: Array = values.astype(feature.dtype)
    if cast.dtype.kind not in "iub":
        return cast
    wrong = cast.astype(np.int64) != values
    if cast.dtype.kind == "u":
        wrong |= values < 0
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise SourceError(
            f"{where(int(at[0]))}: {feature.record_key!r} contains {values[at]}, which does not fit into "
            f"{feature.dtype}; set a wider dtype, or correct the records"
        )
    return cast
