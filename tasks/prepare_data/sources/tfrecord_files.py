"""The source `tfrecord`: existing TFRecord files, read in place or copied.

The framing of TFRecord files: each record has a length and two checksums, all verified here.

    uint64 length | uint32 masked crc32c of the length | bytes of the record | uint32 masked crc32c of the record

Numbers are little-endian (https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details).

The features of `tf.train.Example` records, as the run file describes them; compares them with records.

Parses records of `tf.train.Example` in batches, as training does; finds the record that fails.
"""

import io
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
from pydantic import Field

from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.dataset import Feature
from baton.tasks.foundation.dataset.features import MOST_EXAMPLE_BYTES, STRING, Array, unflatten
from baton.tasks.foundation.errors import RunFileError, SourceError
from baton.tasks.foundation.storage.opening import open_storage
from baton.tasks.foundation.storage.transfers import masked_crc32c
from baton.tasks.prepare_data.sources.column_ranges import cast_values
from baton.tasks.prepare_data.sources.image_folders import decode_image_file, size_of_image
from baton.tasks.prepare_data.sources.source import (
    InPlace,
    LocatedExample,
    Options,
    Range,
    Source,
    parse_options,
    suggestion,
)
from baton.tasks.prepare_data.sources.source_files import (
    SourceFile,
    find_files,
    fingerprint,
    fingerprint_by_stamps,
    require_unchanged,
)
from baton.tasks.prepare_data.sources.verified_reads import BlockStream, map_ahead

_LENGTH = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_MAX_BLOCK_BYTES = 8 << 20
# The first byte of a zlib header with the usual window; the first two bytes are a multiple of 31 (RFC 1950).
_ZLIB, _ZLIB_MULTIPLE = 0x78, 31


@dataclass(frozen=True, slots=True)
class Record:
    """One record with its frame."""

    number: int  # index in the file, from 0
    begin: int  # offset of the frame in the file
    frame: bytes

    @property
    def data(self) -> bytes:
        """The record without its frame."""
        return self.frame[_LENGTH.size : -_CHECKSUM.size]


def read_records(blocks: Iterable[bytes], *, where: str, compressed: bool = False) -> Iterator[Record]:
    """Yield the records of a file; memory holds the largest record and one block.

    Args:
        where: the file, for messages.
        compressed: the file may be compressed; then it is decompressed, and offsets are those of decompressed bytes.

    Raises:
        SourceError: the file is compressed, damaged, truncated or not a TFRecord file; names record and offset.
    """
    reader = io.BufferedReader(BlockStream(decompress(blocks, where=where) if compressed else blocks), _MAX_BLOCK_BYTES)
    number = begin = 0
    while header := reader.read(_LENGTH.size):
        at = f"{where}: record {number}, at byte {begin}"
        if len(header) < _LENGTH.size:
            raise _cut_off(at, len(header), _LENGTH.size, "its length")
        length, checksum = _LENGTH.unpack(header)
        if checksum != masked_crc32c(header[:8]):
            raise SourceError(_no_record(where, header) if number == 0 else f"{at}: {_damaged('length')}")
        if length > MOST_EXAMPLE_BYTES:
            raise SourceError(
                f"{at}: it says that it has {length} bytes, more than {MOST_EXAMPLE_BYTES}; write smaller records"
            )
        rest = b"".join(_pieces(reader, length + _CHECKSUM.size))
        if len(rest) < length + _CHECKSUM.size:
            raise _cut_off(at, len(rest), length + _CHECKSUM.size, "the rest of it")
        if _CHECKSUM.unpack(rest[length:])[0] != masked_crc32c(rest[:length]):
            raise SourceError(f"{at}: {_damaged('content')}")
        frame = header + rest
        yield Record(number, begin, frame)
        number += 1
        begin += len(frame)


def _pieces(reader: io.BufferedIOBase, size: int) -> Iterator[bytes]:
    """Yield the next bytes as they arrive: the file may have fewer than its record says."""
    while size and (piece := reader.read(min(size, _MAX_BLOCK_BYTES))):
        size -= len(piece)
        yield piece


def decompress(blocks: Iterable[bytes], *, where: str) -> Iterator[bytes]:
    """Yield the content of a gzip or zlib file in blocks of bounded size; any other file unchanged.

    Raises:
        SourceError: the file is damaged or truncated.
    """
    stream = iter(blocks)
    first = next(stream, b"")
    if not _compression(first):
        yield first
        yield from stream
        return
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # detects either header
    for block in chain([first], stream):
        rest = block
        while rest:
            # A file may consist of several compressed streams.
            if decoder.eof:
                decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)
            try:
                yield decoder.decompress(rest, _MAX_BLOCK_BYTES)
            except zlib.error as fault:
                raise SourceError(f"{where}: is compressed and damaged ({fault}); rewrite it") from fault
            rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
    if not decoder.eof:
        raise SourceError(f"{where}: is compressed and truncated; rewrite it")


def _compression(begin: bytes) -> str:
    if begin.startswith(b"\x1f\x8b"):
        return "gzip"
    if len(begin) > 1 and begin[0] == _ZLIB and int.from_bytes(begin[:2], "big") % _ZLIB_MULTIPLE == 0:
        return "zlib"
    return ""


def _no_record(where: str, header: bytes) -> str:
    if kind := _compression(header):
        return (
            f"{where}: is compressed ({kind}), so records cannot be read in place; set data.options.copy: true to "
            "decompress it once"
        )
    return f"{where}: is not a TFRecord file; exclude it from data.options.path, with a pattern such as *.tfrecord"


def _damaged(what: str) -> str:
    return f"is damaged: the checksum of its {what} does not match; rewrite the file"


def _cut_off(at: str, found: int, expected: int, what: str) -> SourceError:
    return SourceError(
        f"{at}: the file ends inside it, after {found} of {expected} bytes of {what}; rewrite the file, or exclude it "
        "from data.options.path"
    )


_INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64")
_DTYPES = {
    "values": (*_INTEGERS, *_FLOATS),
    "raw": (*_INTEGERS, *_FLOATS, "complex64", "complex128"),
    "image": ("uint8", "float32"),
}
_TEXT_BYTES = 24  # of an empty tf.string
_IMAGE_RANK, _IMAGE_CHANNELS = 3, (1, 3)
_KIND = {"raw": "bytes_list", "image": "bytes_list", "text": "bytes_list", "int64": "int64_list", "float": "float_list"}


class FeatureSpec(Contract):
    """The description of one feature in the run file."""

    dtype: str
    shape: list[int] = Field(default_factory=list)
    encoding: Literal["values", "raw", "image"] = "values"


class TfrecordOptions(Options):
    """`data.options` of `tfrecord`."""

    path: str = Field(min_length=1, description="a file, a folder or a pattern such as train-*.tfrecord, also on gs://")
    features: dict[str, FeatureSpec] = Field(
        min_length=1,
        description="the features of the records: {name: {dtype: int64, shape: [], encoding: values}}; the encoding is "
        "values (a list of numbers), raw (bytes of little-endian numbers) or image (a JPEG or PNG file)",
    )
    x: str | dict[str, str] = Field(description="the name of the feature for x, or {input: name}")
    y: str | dict[str, str] | None = Field(default=None, description="the name of the feature for y, or {output: name}")
    sample_weight: str | None = Field(default=None, description="the name of the feature with the weights")
    copy_: bool = Field(
        default=False, alias="copy", description="true copies the examples into shards, in shuffled order"
    )


class RecordMismatch(Exception):
    """A record does not match the description in the run file.

    Attributes:
        key: the feature; None for the record as a whole.
        problem: what is wrong, and the remedy.
    """

    def __init__(self, key: str | None, problem: str) -> None:
        super().__init__(problem)
        self.key = key
        self.problem = problem


def chosen_features(options: TfrecordOptions) -> tuple[Feature, ...]:
    """Return the features that form an example, in the order of the flattened example.

    Raises:
        RunFileError: x, y or sample_weight names a missing feature, or a feature's description is invalid.
    """
    for name, spec in options.features.items():
        _check(name, spec)
    known = {key: _feature(key, spec) for key, spec in options.features.items()}
    parts = {"x": options.x, "y": options.y, "sample_weight": options.sample_weight}
    return named_features(parts, known, among="data.options.features")


def named_features(
    parts: Mapping[str, str | dict[str, str] | None], known: Mapping[str, Feature | str], *, among: str
) -> tuple[Feature, ...]:
    """Return the features that form an example, in the order of the flattened example.

    Args:
        parts: what the options x, y and sample_weight name.
        known: the features of the records by key; or why such a feature cannot be used, with the remedy.
        among: what has these features, for messages.

    Raises:
        RunFileError: a part names a feature that is missing or cannot be used, or an example is too large.
    """
    if parts["sample_weight"] is not None and parts["y"] is None:
        raise RunFileError(
            f"data.options.sample_weight: {parts['sample_weight']!r}: weights need labels; set data.options.y too"
        )
    found: list[Feature] = []
    for part, value in parts.items():
        for name, key in [(part, value)] if isinstance(value, str) else _named(part, value):
            at = f"data.options.{name.replace('/', '.')}: {key!r}"
            feature = known.get(key)
            if feature is None:
                raise RunFileError(f"{at}: {among} has no such feature; {suggestion(key, known)}")
            if isinstance(feature, str):
                raise RunFileError(f"{at}: {feature}")
            found.append(feature.model_copy(update={"name": name}))
    size = sum(math.prod(each.shape) * _value_bytes(each) for each in found)
    if size > MOST_EXAMPLE_BYTES:
        raise RunFileError(
            f"data.options.x: {parts['x']!r}: {among} gives an example of {size} bytes, and it has at most "
            f"{MOST_EXAMPLE_BYTES}; name smaller features, or a smaller size"
        )
    return tuple(found)


def _value_bytes(feature: Feature) -> int:
    return _TEXT_BYTES if feature.dtype == STRING else np.dtype(feature.dtype).itemsize


def _named(part: str, value: Mapping[str, str] | None) -> list[tuple[str, str]]:
    if value is None:
        return []
    if not value or "" in value:
        raise RunFileError(f"data.options.{part}: {dict(value)!r}: each array needs a name; write {{name: feature}}")
    return [(f"{part}/{key}", value[key]) for key in sorted(value)]


def value_encoding(dtype: str) -> Literal["int64", "float"] | None:
    """Return the encoding of lists of numbers of a dtype; None if they cannot have it."""
    if dtype in _FLOATS:
        return "float"
    return "int64" if dtype in _INTEGERS else None


def _feature(key: str, spec: FeatureSpec) -> Feature:
    encoding: Any = value_encoding(spec.dtype) if spec.encoding == "values" else spec.encoding
    return Feature(name=key, dtype=spec.dtype, shape=tuple(spec.shape), key=key, encoding=encoding)


def _check(name: str, spec: FeatureSpec) -> None:
    at = f"data.options.features.{name}"
    known = _DTYPES[spec.encoding]
    if spec.dtype not in known:
        raise RunFileError(
            f"{at}.dtype: {spec.dtype!r}: the encoding {spec.encoding} does not support this dtype; "
            f"{suggestion(spec.dtype, known)}"
        )
    if min(spec.shape, default=1) < 1:
        raise RunFileError(f"{at}.shape: {spec.shape}: each dimension must be at least 1; give the shape of an example")
    if spec.encoding == "image" and (len(spec.shape) != _IMAGE_RANK or spec.shape[2] not in _IMAGE_CHANNELS):
        raise RunFileError(
            f"{at}.shape: {spec.shape}: an image has the shape [height, width, channels], with 1 or 3 channels; images "
            "of another size are resized"
        )


def fit_to_record(
    data: bytes, features: Sequence[Feature], options: TfrecordOptions, *, where: str
) -> tuple[Feature, ...]:
    """Return the features as the first record stores them: floats may be stored as a list of integers.

    Args:
        data: the first record.
        features: as `chosen_features` returns them.
        where: the record, for messages.

    Raises:
        RunFileError: the record lacks a feature, or has values of another type or number.
    """
    try:
        parsed = _parsed(data)
    except RecordMismatch as mismatch:
        raise RunFileError(f"data.options.path: {options.path!r}: {where}: {mismatch.problem}") from mismatch
    integers = {name for name, feature in parsed.items() if feature.WhichOneof("kind") == "int64_list"}
    fitting = tuple(
        feature.model_copy(update={"encoding": "int64"})
        if feature.encoding == "float" and feature.record_key in integers
        else feature
        for feature in features
    )
    for feature in fitting:
        try:
            _compare(parsed, feature)
        except RecordMismatch as mismatch:
            spec = options.features[feature.record_key].model_dump()
            raise RunFileError(
                f"data.options.features.{mismatch.key}: {spec}: {where}: {mismatch.problem}"
            ) from mismatch
    return fitting


def require_fit(data: bytes, features: Sequence[Feature]) -> None:
    """Check a record against the features, as far as possible without decoding it.

    Raises:
        RecordMismatch: it does not match; describes what it has.
    """
    parsed = _parsed(data)
    for feature in features:
        _compare(parsed, feature)


def _compare(parsed: Mapping[str, Any], feature: Feature) -> None:
    key, expected, shape = feature.record_key, _KIND[feature.encoding], list(feature.shape)
    if key not in parsed:
        raise RecordMismatch(key, f"it has no feature {key!r}; it has {_shown(parsed)}")
    kind, values = _content(parsed[key])
    if kind != expected:
        raise RecordMismatch(key, f"{key!r} is {kind}, not {expected}; set another dtype or encoding")
    needed = 1 if feature.encoding in ("raw", "image") else math.prod(shape)
    if len(values) != needed:
        raise RecordMismatch(
            key, f"{key!r} has {len(values)} values, but the shape {shape} needs {needed}; correct the shape"
        )
    if feature.encoding == "raw":
        bytes_needed = np.dtype(feature.dtype).itemsize * math.prod(shape)
        if len(values[0]) != bytes_needed:
            raise RecordMismatch(
                key,
                f"{key!r} has {len(values[0])} bytes, but {feature.dtype} {shape} needs {bytes_needed}; correct dtype "
                "or shape",
            )


def features_of_record(data: bytes) -> dict[str, FeatureSpec | None]:
    """Describe a record's features as a run file does; None stands for bytes that are no image.

    Raises:
        RecordMismatch: it is not a `tf.train.Example`.
    """
    found: dict[str, FeatureSpec | None] = {}
    for name, feature in sorted(_parsed(data).items()):
        kind, values = _content(feature)
        shape = [] if len(values) == 1 else [len(values)]
        if kind in {"int64_list", "float_list"} and values:
            found[name] = FeatureSpec(dtype="int64" if kind == "int64_list" else "float32", shape=shape)
        elif kind == "bytes_list" and len(values) == 1 and (size := size_of_image(values[0])) is not None:
            found[name] = FeatureSpec(dtype="uint8", shape=list(size), encoding="image")
        else:
            found[name] = None
    return found


def _shown(parsed: Mapping[str, Any]) -> str:
    contents = {name: _content(feature) for name, feature in sorted(parsed.items())}
    return ", ".join(f"{name} ({kind} of {len(values)})" for name, (kind, values) in contents.items()) or "none"


def _content(feature: Any) -> tuple[str, Sequence[Any]]:
    kind = feature.WhichOneof("kind")
    return ("empty", ()) if kind is None else (kind, getattr(feature, kind).value)


def _parsed(data: bytes) -> Mapping[str, Any]:
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    try:
        features: Mapping[str, Any] = tf.train.Example.FromString(data).features.feature
    except DecodeError as fault:
        raise RecordMismatch(None, "it is not a tf.train.Example; write the records as tf.train.Examples") from fault
    return features


# Limits of a batch of records that is parsed at once; memory holds 2 * _WORKERS batches, or of large examples fewer.
_BATCH_RECORDS = 1024
_BATCH_BYTES = 8 << 20
_WORKERS = min(os.cpu_count() or 1, 16)


def parsed_examples(
    file: SourceFile, features: Sequence[Feature], *, compressed: bool
) -> Iterator[tuple[Record, str, object]]:
    """Yield (record, its position, its example) for each record of a file, in order.

    Raises:
        SourceError: the file is damaged, or a record does not match the features; names record and offset.
    """
    largest = sum(math.prod(each.shape) * np.dtype(each.dtype).itemsize for each in features if each.encoding != "text")
    work = partial(_with_arrays, features=features, where=partial(record_position, file.uri))
    with file.reading() as blocks:
        records = read_records(blocks, where=file.uri, compressed=compressed)
        batches = _batches(records, most=max(1, min(_BATCH_RECORDS, _BATCH_BYTES // max(1, largest))))
        workers = max(1, min(_WORKERS, MOST_EXAMPLE_BYTES // (2 * max(largest, _BATCH_BYTES))))
        for batch, arrays in map_ahead(work, batches, workers=workers):
            for index, record in enumerate(batch):
                example = unflatten({name: values[index] for name, values in arrays.items()})
                yield record, record_position(file.uri, record), example


def record_position(uri: str, record: Record) -> str:
    """Return a record's position, for messages."""
    return f"{uri}, record {record.number} at byte {record.begin}"


def _batches(records: Iterator[Record], *, most: int) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.frame)
        if len(batch) == most or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _with_arrays(
    batch: list[Record], *, features: Sequence[Feature], where: Callable[[Record], str]
) -> tuple[list[Record], dict[str, Array]]:
    """Return the batch, and name -> array [records, *feature.shape]."""
    import tensorflow as tf

    from baton.tasks.foundation.dataset.shards import decode, extract

    records = [record.data for record in batch]
    try:
        with tf.device("/CPU:0"):
            found = extract(tf.constant(records), features)
            numbers = {
                feature.name: decode(found[feature.name], feature).numpy()
                for feature in features
                if feature.encoding == "raw"
            }
    except tf.errors.InvalidArgumentError as fault:
        for record in batch:
            try:
                require_fit(record.data, features)
            except RecordMismatch as mismatch:
                raise SourceError(f"{where(record)}: {mismatch.problem}") from fault
        raise SourceError(f"{where(batch[0])} or soon after: cannot be parsed: {fault.message}") from fault
    arrays: dict[str, Array] = {}
    for feature in features:
        if feature.encoding == "raw":
            arrays[feature.name] = numbers[feature.name]
        elif feature.encoding == "image":
            arrays[feature.name] = _images(batch, found[feature.name].numpy(), feature, where)
        elif feature.encoding == "text":
            arrays[feature.name] = found[feature.name].numpy()
        else:
            values = found[feature.name].numpy()
            arrays[feature.name] = cast_values(values, feature, lambda row: where(batch[row]))
    return batch, arrays


def _images(batch: list[Record], files: Sequence[bytes], feature: Feature, where: Callable[[Record], str]) -> Array:
    images = np.empty((len(batch), *feature.shape), feature.dtype)
    for index, (record, data) in enumerate(zip(batch, files, strict=True)):
        try:
            images[index] = decode_image_file(data, feature.shape, feature.dtype)
        except ValueError as fault:
            raise SourceError(
                f"{where(record)}: {feature.record_key!r} {fault}; save it as JPEG or PNG, or remove it"
            ) from fault
    return images


_RANGE_BYTES = 32 << 20
_PEEK_BYTES = 64 << 10


def tfrecord(options: Mapping[str, Any], folder: Path) -> Source:
    """Open a source of features of `tf.train.Example`s for x, y and sample_weight: one array each, or a dict of arrays.

    Preparing reads every file once. It checks the framing and both checksums of each record, and parses each record as
    training will, images included. That takes about as long as reading an epoch; otherwise training would find an
    invalid record later, while an accelerator is rented.

    By default nothing is copied: the dataset consists of ranges of these files, which must not change. `copy: true`
    writes shards instead. Use it for compressed files; for sorted files, because records in place are only shuffled
    within a window of ranges; and for frequent evaluation, because held-out examples in place lie in every range.

    Raises:
        RunFileError: an option cannot be used, or the first record does not match the features.
        InvalidInput: the files are in an unknown store, or in folders without a usable address.
        SourceError: there are no files, or no records. While reading: a file is damaged, truncated or compressed, or a
            record does not match the features.
    """
    chosen = parse_options(TfrecordOptions, options, source="tfrecord")
    features = chosen_features(chosen)
    files = [file for file in find_files(chosen.path, folder) if not file.name.startswith(".")]
    require_readable_folders(files)
    file, record = first_record(files, path=chosen.path, compressed=chosen.copy_)
    features = fit_to_record(record.data, features, chosen, where=record_position(file.uri, record))
    examples = partial(parsed_examples, features=features, compressed=chosen.copy_)
    return records_source(files, features, examples, copy=chosen.copy_, settings=chosen.model_dump(exclude={"path"}))


def require_readable_folders(files: Sequence[SourceFile]) -> None:
    """Refuse addresses now that training could not read from.

    Raises:
        InvalidInput: the files are in an unknown store, or in folders without a usable address.
    """
    for address in {file.uri.rpartition("/")[0] for file in files if file.local is None}:
        open_storage(address, relative_to=Path("/"))


def records_source(
    files: Sequence[SourceFile],
    features: tuple[Feature, ...],
    examples: Callable[[SourceFile], Iterator[tuple[Record, str, object]]],
    *,
    copy: bool,
    settings: Mapping[str, Any],
    origin: Mapping[str, str] | None = None,
) -> Source:
    """Return the source of all records of TFRecord files.

    Args:
        files: the files, in order.
        features: what is read of each record.
        examples: yields the examples of a file, as `parsed_examples`.
        copy: copy the examples into shards; False: their records stay in place.
        settings: see `Source.settings`.
        origin: what the manifest says besides the files.
    """
    found = fingerprint(files) if copy else fingerprint_by_stamps(files)
    return Source(
        content=found.content,
        settings=settings,
        origin={**(origin or {}), **found.origin},
        length=None,
        read=lambda: require_unchanged(files, found, _read(files, examples)),
        files=files,
        in_place=None
        if copy
        else InPlace(
            features=features,
            ranges=lambda checker, records: require_unchanged(
                files, found, _ranges(files, examples, checker.check, records)
            ),
        ),
    )


def first_record(files: Sequence[SourceFile], *, path: str, compressed: bool) -> tuple[SourceFile, Record]:
    """Return the first record, and its file.

    Args:
        files: some may have none.
        path: `data.options.path`, for messages.
        compressed: the files may be compressed.

    Raises:
        SourceError: no file has a record, or one is damaged.
    """
    for file in files:
        with file.open() as opened:
            blocks = iter(partial(opened.read, _PEEK_BYTES), b"")
            record = next(read_records(blocks, where=file.uri, compressed=compressed), None)
        if record is not None:
            return file, record
    raise SourceError(f"data.options.path: {path!r}: none of these files has a record; name files with records")


def _read(
    files: Sequence[SourceFile], examples: Callable[[SourceFile], Iterator[tuple[Record, str, object]]]
) -> Iterator[LocatedExample]:
    for file in files:
        yield from ((where, example) for _, where, example in examples(file))


def _ranges(
    files: Sequence[SourceFile],
    examples: Callable[[SourceFile], Iterator[tuple[Record, str, object]]],
    check: Callable[[str, object], object],
    records_per_range: int | None,
) -> Iterator[Range]:
    for file in files:
        begin = size = records = crc = 0
        for record, where, example in examples(file):
            check(where, example)
            full = (
                size + len(record.frame) > _RANGE_BYTES if records_per_range is None else records == records_per_range
            )
            if records and full:
                yield _range(file, begin, size, records, crc)
                begin, size, records, crc = begin + size, 0, 0, 0
            size += len(record.frame)
            records += 1
            crc = google_crc32c.extend(crc, record.frame)
        if records:
            yield _range(file, begin, size, records, crc)


def _range(file: SourceFile, begin: int, size: int, records: int, crc: int) -> Range:
    return Range(path=file.uri, begin=begin, size=size, records=records, crc32c=f"{crc:08x}")
