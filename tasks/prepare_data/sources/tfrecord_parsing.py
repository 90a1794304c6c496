"""Parses records of `tf.train.Example` in batches, as training does; finds the record that fails."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.dataset.features import Array, unflatten
from tasks.foundation.errors import SourceError
from tasks.prepare_data.sources.image_decoding import decode_image_file
from tasks.prepare_data.sources.read_ahead import map_ahead
from tasks.prepare_data.sources.source_file import SourceFile
from tasks.prepare_data.sources.tfrecord_framing import Record, read_records
from tasks.prepare_data.sources.tfrecord_spec import RecordMismatch, require_fit

# Limits of a batch of records that is parsed at once; memory holds 2 * _WORKERS batches.
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
    largest = sum(math.prod(feature.shape) * np.dtype(feature.dtype).itemsize for feature in features)
    work = partial(_with_arrays, features=features, where=partial(record_position, file.uri))
    with file.reading() as blocks:
        records = read_records(blocks, where=file.uri, compressed=compressed)
        batches = _batches(records, most=max(1, min(_BATCH_RECORDS, _BATCH_BYTES // max(1, largest))))
        for batch, arrays in map_ahead(work, batches, workers=_WORKERS):
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

    from tasks.foundation.dataset.shards import decode, extract

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
        else:
            arrays[feature.name] = _cast(batch, found[feature.name].numpy(), feature, where)
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


def _cast(batch: list[Record], values: Array, feature: Feature, where: Callable[[Record], str]) -> Array:
    """Cast values to the feature's dtype; an integer must keep its value."""
    with np.errstate(over="ignore"):  # becomes infinity, which is refused later
        cast = values.astype(feature.dtype)
    if cast.dtype.kind not in "iub":
        return cast
    wrong = cast.astype(np.int64) != values
    if cast.dtype.kind == "u":
        wrong |= values < 0
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise SourceError(
            f"{where(batch[at[0]])}: {feature.record_key!r} contains {values[at]}, which does not fit into "
            f"{feature.dtype}; set a wider dtype, or correct the records"
        )
    return cast
