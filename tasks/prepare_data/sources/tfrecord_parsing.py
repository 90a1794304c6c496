"""Records of `tf.train.Example` as arrays: what the reader will make of them, looked at one by one where it fails."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.dataset.features import Array, unflatten
from tasks.foundation.errors import SourceError
from tasks.prepare_data.sources.image_decoding import decoded
from tasks.prepare_data.sources.read_ahead import in_order
from tasks.prepare_data.sources.source_file import SourceFile
from tasks.prepare_data.sources.tfrecord_framing import Framed, framed
from tasks.prepare_data.sources.tfrecord_spec import Misfit, compare

# Records that are parsed together; so many of these batches, twice, are in memory.
_BATCH_RECORDS = 1024
_BATCH_BYTES = 8 << 20
_WORKERS = min(os.cpu_count() or 1, 16)


def examples_of(
    file: SourceFile, features: Sequence[Feature], *, compressed: bool
) -> Iterator[tuple[Framed, str, object]]:
    """(record, where it stands, its example) of a file, in order.

    Raises:
        SourceError: the file is damaged, or a record of it is not as the features say; names record and offset.
    """
    largest = sum(math.prod(feature.shape) * np.dtype(feature.dtype).itemsize for feature in features)
    work = partial(_with_arrays, features=features, where=partial(place, file.uri))
    with file.reading() as blocks:
        records = framed(blocks, where=file.uri, compressed=compressed)
        batches = _batches(records, most=max(1, min(_BATCH_RECORDS, _BATCH_BYTES // max(1, largest))))
        for batch, arrays in in_order(work, batches, workers=_WORKERS):
            for index, record in enumerate(batch):
                example = unflatten({name: values[index] for name, values in arrays.items()})
                yield record, place(file.uri, record), example


def place(uri: str, record: Framed) -> str:
    """Where a record stands, for messages."""
    return f"{uri}, record {record.number} at byte {record.begin}"


def _batches(records: Iterator[Framed], *, most: int) -> Iterator[list[Framed]]:
    batch: list[Framed] = []
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
    batch: list[Framed], *, features: Sequence[Feature], where: Callable[[Framed], str]
) -> tuple[list[Framed], dict[str, Array]]:
    """The batch, and name -> array [records, *feature.shape]."""
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
                compare(record.data, features)
            except Misfit as misfit:
                raise SourceError(f"{where(record)}: {misfit.told}") from fault
        raise SourceError(f"{where(batch[0])}, or soon after: cannot be parsed: {fault.message}") from fault
    arrays: dict[str, Array] = {}
    for feature in features:
        if feature.encoding == "raw":
            arrays[feature.name] = numbers[feature.name]
        elif feature.encoding == "image":
            arrays[feature.name] = _images(batch, found[feature.name].numpy(), feature, where)
        else:
            arrays[feature.name] = _cast(batch, found[feature.name].numpy(), feature, where)
    return batch, arrays


def _images(batch: list[Framed], files: Sequence[bytes], feature: Feature, where: Callable[[Framed], str]) -> Array:
    images = np.empty((len(batch), *feature.shape), feature.dtype)
    for index, (record, data) in enumerate(zip(batch, files, strict=True)):
        try:
            images[index] = decoded(data, feature.shape, feature.dtype)
        except ValueError as fault:
            raise SourceError(
                f"{where(record)}: {feature.record_key!r} {fault}; write it again as JPEG or PNG, or leave it out"
            ) from fault
    return images


def _cast(batch: list[Framed], values: Array, feature: Feature, where: Callable[[Framed], str]) -> Array:
    """Values as the dtype that is asked for; an integer must stay what it is."""
    with np.errstate(over="ignore"):  # becomes infinity, which is looked for later
        cast = values.astype(feature.dtype)
    if cast.dtype.kind not in "iub":
        return cast
    wrong = cast.astype(np.int64) != values
    if cast.dtype.kind == "u":
        wrong |= values < 0
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise SourceError(
            f"{where(batch[at[0]])}: {feature.record_key!r} holds {values[at]}, which is no {feature.dtype}; set a "
            "wider dtype, or correct the records"
        )
    return cast
