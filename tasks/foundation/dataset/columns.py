"""Reads ranges of external files that are no TFRecord files: Parquet, Arrow, tar.

A range is a stretch of bytes with whole examples, listed in the manifest with its checksum. A reader gets these bytes,
verified, and returns the arrays that `shards.extract` would return, so that what follows, decoding and order, is the
same code for all sources. Readers run in threads ahead of the training, and hold the interpreter lock as little as
they can.

The columns of a table become arrays here: numbers, lists of one length, several columns as one array, texts, files of
images, and texts as the positions that they have in a vocabulary. A null is filled, or refused with its row.
"""

import io
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from baton.tasks.foundation.contracts.dataset import Feature, ShardRecord
from baton.tasks.foundation.dataset.features import Array
from baton.tasks.foundation.dataset.tar_ranges import read_tar
from baton.tasks.foundation.errors import DamagedDataset

if TYPE_CHECKING:
    import pyarrow as pa

# Called with the bytes of the range, those of its head (see `RangeLayout`), the range and the features. Returns for
# each feature an array [records_held, *shape] of its dtype, or, of text and images, of bytes objects; of columns that
# are stacked an iterator over them.
Reader = Callable[[memoryview, memoryview, ShardRecord, Sequence[Feature]], Mapping[str, Array | Iterator[Array]]]
# What lists of values are in records, see `shards.extract`.
_EXTRACTED = {"int64": "int64", "float": "float32"}
# Bytes that hold a whole array.
_WHOLE = {"image", "raw"}
# Columns and rows that are stacked at once: few, so that they stay in the processor's cache and take little memory.
_STACKED_COLUMNS = 64
_STACKED_ROWS = 2048
_MAGIC, _ARROW, _CONTINUES = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"


def read_columns(
    body: memoryview,
    head: memoryview,
    record: ShardRecord,
    features: Sequence[Feature],
    *,
    rows: npt.NDArray[np.int64] | None = None,
    into: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """Return the values of all features of a range, by name.

    Args:
        body: the bytes of the range, verified.
        head: its footer or schema, verified.
        record: the range.
        features: what is read of it.
        rows: indices of the examples that are kept; None: all.
        into: arrays of the kept examples, which are filled and returned. Without it, what is returned may be a view of
            `body`.

    Raises:
        DamagedDataset: the bytes are not what `record` says, or a value cannot be what its feature says; names the
            file, the row and the column.
    """
    if record.layout is None:
        raise ValueError(f"{record.path} is a TFRecord file")
    found = _READERS[record.layout.form](body, head, record, features)
    return {
        each.name: _filled(
            each, found[each.name], partial(_kept, record, each, rows), None if into is None else into[each.name]
        )
        for each in features
    }


def _kept(record: ShardRecord, feature: Feature, rows: npt.NDArray[np.int64] | None, values: Array, axis: int) -> Array:
    if (found := values.shape[axis]) != record.records_held:
        raise DamagedDataset(
            f"{record.path}: {feature.record_key!r} has {found} values from byte {record.begin} on, not "
            f"{record.records_held}; restore the original file, or start a new run"
        )
    return values if rows is None else values.take(rows, axis=axis)


def _filled(
    feature: Feature, values: Array | Iterator[Array], kept: Callable[[Array, int], Array], target: Array | None
) -> Array:
    """Return the kept values of a feature, in `target` if there is one; `kept` takes them along an axis."""
    if isinstance(values, np.ndarray):
        if target is None:
            return kept(values, 0)
        target[...] = kept(values, 0)
        return target
    first = 0
    for columns in values:
        block = kept(columns, 1)
        if target is None:
            target = np.empty((block.shape[1], *feature.shape), feature.dtype)
        for begin in range(0, len(target), _STACKED_ROWS):
            rows = slice(begin, begin + _STACKED_ROWS)
            target[rows, ..., first : first + len(block)] = np.moveaxis(block[:, rows], 0, -1)
        first += len(block)
    if target is None:
        raise ValueError(f"{feature.name} has no columns")
    return target


def _parquet(
    body: memoryview, head: memoryview, record: ShardRecord, features: Sequence[Feature]
) -> Mapping[str, Array | Iterator[Array]]:
    import pyarrow as pa
    from pyarrow import parquet

    layout = record.layout
    if layout is None:
        raise ValueError(f"{record.path} has no row groups")
    coded = {each.record_key for each in features if each.vocabulary}
    texts = {each.record_key for each in features if each.encoding in {"text", *_WHOLE}}
    try:
        metadata = parquet_metadata(bytes(head))
        groups = [
            number
            for number in range(layout.first_part, layout.first_part + layout.parts)
            if metadata.row_group(number).num_rows  # one without rows may say that it lies anywhere
        ]
        # Codes of a dictionary are read faster than its texts, and one text may stand in all rows. Within lists and
        # structures pyarrow reads several row groups as texts alone.
        leaves = [metadata.schema.column(index) for index in range(len(metadata.schema))] if coded or texts else []
        coded &= {each.path for each in leaves}
        coded |= texts & {each.path for each in leaves if each.physical_type == "BYTE_ARRAY" and "." not in each.path}
        opened = pa.PythonFile(_FileBytes(body, record.begin), mode="r")
        # One call of Python reads the bytes of many columns.
        file = parquet.ParquetFile(opened, metadata=metadata, read_dictionary=sorted(coded), pre_buffer=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as fault:
        raise DamagedDataset(f"{record.path}: its footer cannot be read: {fault}") from fault
    first = sum(metadata.row_group(group).num_rows for group in range(layout.first_part))

    def read(keys: Sequence[str]) -> pa.Table:
        try:
            return file.read_row_groups(groups, columns=[key for key in keys if key not in layout.partition])
        except (pa.ArrowException, OSError, IndexError) as fault:
            raise DamagedDataset(f"{record.path}: row group {layout.first_part} cannot be read: {fault}") from fault

    return _arrays_of(read, features, partition=layout.partition, where=lambda row: f"{record.path}, row {first + row}")


def _arrow(body: memoryview, head: memoryview, record: ShardRecord, features: Sequence[Feature]) -> dict[str, Array]:
    """Read record batches, as messages that follow the schema and the dictionaries: together they are a stream."""
    import pyarrow as pa

    layout = record.layout
    if layout is None:
        raise ValueError(f"{record.path} has no record batches")
    at = f"from record batch {layout.first_part} on"
    try:
        table = arrow_table(head, body, {key for feature in features for key in column_names(feature)})
    except (pa.ArrowException, OSError, UnicodeDecodeError) as fault:
        raise DamagedDataset(f"{record.path}: {at}, it cannot be read: {fault}") from fault
    return table_arrays(
        table, features, partition=layout.partition, where=lambda row: f"{record.path}, {at}, row {row}"
    )


def arrow_table(head: bytes | memoryview, body: bytes | memoryview, keys: Collection[str]) -> "pa.Table":
    """Return the columns of record batches that `keys` name, or that have such fields.

    Args:
        head: the messages of the schema and the dictionaries; or the footer of a file, if only that has the schema.
        keys: as in `column_names`.

    Raises:
        pyarrow.ArrowException: they cannot be read.
    """
    import pyarrow as pa
    from pyarrow import ipc

    if bytes(head[-len(_ARROW) :]) == _ARROW and bytes(head[:4]) != _CONTINUES:
        head = ipc.open_file(pa.BufferReader(_ARROW + b"\0\0" + head)).schema.serialize()
    names = {key.partition(".")[0] for key in keys}
    stream = pa.py_buffer(b"".join([head, body]))
    schema = ipc.open_stream(stream).schema
    chosen = [index for index, name in enumerate(schema.names) if name in names or "." in name]
    # An empty list would mean all.
    table = ipc.open_stream(stream, options=ipc.IpcReadOptions(included_fields=chosen or [0])).read_all()
    table.validate(full=True)  # offsets outside of their buffers would be read
    return table


@lru_cache(maxsize=8)
def parquet_metadata(footer: bytes) -> Any:
    """Return the `pyarrow.parquet.FileMetaData` of a footer: the last bytes of a file, with their length and magic.

    Raises:
        pyarrow.ArrowException: it is no footer.
    """
    import pyarrow as pa
    from pyarrow import parquet

    return parquet.read_metadata(pa.BufferReader(_MAGIC + footer))


class _FileBytes(io.RawIOBase):
    """A file of which only the bytes of a range can be read, without a copy."""

    def __init__(self, body: memoryview, begin: int) -> None:
        self._body = body
        self._begin = begin
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        end = self._begin + len(self._body)
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: end}[whence]
        return self._at

    def read(self, size: int = -1) -> Any:
        begin = self._at - self._begin
        if begin < 0:
            raise OSError(f"byte {self._at} is outside of the range, which begins at byte {self._begin}")
        found = self._body[begin:] if size < 0 else self._body[begin : begin + size]
        self._at += len(found)
        return found


def column_names(feature: Feature) -> tuple[str, ...]:
    """The columns that a feature is read from; a field of a struct is named as in `image.bytes`."""
    return feature.stacked or (feature.record_key,)


def table_arrays(
    table: "pa.Table", features: Sequence[Feature], *, partition: Mapping[str, str], where: Callable[[int], str]
) -> dict[str, Array]:
    """Return the values of a table's rows, by feature; for arguments and errors see `_arrays_of`."""
    found = _arrays_of(lambda _: table, features, partition=partition, where=where)
    return {each.name: _filled(each, found[each.name], lambda values, _: values, None) for each in features}


def _arrays_of(
    read: Callable[[Sequence[str]], "pa.Table"],
    features: Sequence[Feature],
    *,
    partition: Mapping[str, str],
    where: Callable[[int], str],
) -> Mapping[str, Array | Iterator[Array]]:
    """Return the values of a table's rows, by feature; of columns that are stacked an iterator, see `Reader`.

    Args:
        read: returns a table of some columns, with at least one row; it may have more.
        features: what is read of it.
        partition: columns that have one text in all rows.
        where: says where a row is, given its index, for messages.

    Raises:
        DamagedDataset: a column is missing, has a null and no `fill`, lists of another length, or a text that is not in
            the vocabulary.
    """
    import pyarrow as pa

    def values(table: "pa.Table", feature: Feature, key: str) -> Array:
        if key in partition:
            return _constant(partition[key], feature, table.num_rows)
        shape = () if feature.encoding in _WHOLE else feature.shape[:-1] if feature.stacked else feature.shape
        array = column_of(table, key, where)
        try:
            return _values(array, key, shape, feature, where)
        except (pa.ArrowException, ValueError) as fault:
            raise DamagedDataset(f"{where(0)}: column {key!r} is {array.type}, and cannot be read: {fault}") from fault

    def columns(feature: Feature) -> Iterator[Array]:
        for begin in range(0, len(feature.stacked), _STACKED_COLUMNS):
            keys = feature.stacked[begin : begin + _STACKED_COLUMNS]
            table = read(keys)
            plain = _equal_numbers(table, keys, feature)
            yield np.stack([values(table, feature, key) for key in keys]) if plain is None else plain

    single = [each for each in features if not each.stacked]
    table = read([each.record_key for each in single]) if single else None
    found: dict[str, Array | Iterator[Array]] = {each.name: columns(each) for each in features if each.stacked}
    return {**found, **{each.name: values(table, each, each.record_key) for each in single}}


def _equal_numbers(table: "pa.Table", keys: Sequence[str], feature: Feature) -> Array | None:
    """Return columns of numbers [columns, rows] in one call, which hundreds of columns need; None: they are others."""
    import pyarrow as pa

    schema = table.schema
    if any(schema.get_field_index(key) < 0 for key in keys) or len(feature.shape) > 1:
        return None
    chosen = table.select(keys)
    wanted = pa.from_numpy_dtype(np.dtype(feature.dtype))
    if not (pa.types.is_integer(wanted) or pa.types.is_floating(wanted)) or any(
        column.type != wanted or column.null_count for column in chosen.columns
    ):
        return None
    (batch,) = chosen.combine_chunks().to_batches()
    found: Array = batch.to_tensor(row_major=False).to_numpy().T
    return found


def column_of(table: "pa.Table", key: str, where: Callable[[int], str]) -> "pa.Array":
    """Return a column of a table, or the field of a struct that `image.bytes` names.

    Raises:
        DamagedDataset: there is none.
    """
    from pyarrow import compute

    # Not among `column_names`, a list that is made for each of many columns.
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        if (position := table.schema.get_field_index(".".join(parts[:count]))) >= 0:
            column = table.column(position)
            column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            column = plain(column)
            return plain(compute.struct_field(column, parts[count:])) if count < len(parts) else column
    raise DamagedDataset(f"{where(0)}: has no column {key!r}")


def plain(array: Any) -> Any:
    """Return a `pyarrow.Array` or `ChunkedArray` as one of the types for which pyarrow has all functions."""
    import pyarrow as pa

    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_string_view(array.type):
        return array.cast(pa.large_string())
    return array.cast(pa.large_binary()) if pa.types.is_binary_view(array.type) else array


def is_list(kind: "pa.DataType") -> bool:
    """Whether an Arrow type is a list that is read."""
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _items(
    array: "pa.Array", key: str, shape: Sequence[int], feature: Feature, where: Callable[[int], str]
) -> "pa.Array":
    """Return the values in the lists of a column, one after the other; of a list that is null: nulls, to be filled."""
    import pyarrow as pa
    from pyarrow import compute

    rows, sizes = len(array), list(shape)
    while sizes and is_list(array.type):
        inner = array.type.value_type
        nested = is_list(inner.storage_type if isinstance(inner, pa.BaseExtensionType) else inner)
        # The list of a tensor has the values of all its dimensions.
        size, sizes = (sizes[0], sizes[1:]) if nested else (math.prod(sizes), [])
        if feature.fill is None:
            _refuse_null(array, key, rows, where)
        lengths = compute.list_value_length(array)
        if compute.any(compute.not_equal(lengths, size)).as_py():
            at = compute.index(compute.not_equal(lengths, size), value=True).as_py()
            raise DamagedDataset(
                f"{where(at * rows // len(array))}: column {key!r} has a list of {lengths[at]} values, not {size}; "
                "correct the row, or set data.pad"
            )
        items = array.flatten()  # without those of lists that are null
        if array.null_count:
            there = np.repeat(array.is_valid().to_numpy(zero_copy_only=False), size)
            items = items.take(pa.array(np.cumsum(there) - 1, mask=~there))
        array = plain(items)
    return array


def _values(array: "pa.Array", key: str, shape: Sequence[int], feature: Feature, where: Callable[[int], str]) -> Array:
    """Return the values of a column [rows, *shape]."""
    import pyarrow as pa
    from pyarrow import compute

    rows, types = len(array), pa.types
    array = _items(array, key, shape, feature, where)
    if feature.vocabulary:
        array = _codes(array, key, feature, rows, where)
    elif types.is_dictionary(array.type) and not (array.null_count or array.dictionary.null_count):
        texts = plain(array.dictionary).cast(pa.large_binary()).to_numpy(zero_copy_only=False)
        values: Array = texts[array.indices.to_numpy(zero_copy_only=False)]
        return values.reshape(rows, *shape)
    else:
        if types.is_dictionary(array.type):
            array = plain(array.dictionary_decode())
        if types.is_null(array.type):
            array = array.cast(pa.string() if feature.encoding == "text" else pa.from_numpy_dtype(feature.dtype))
        if array.null_count and feature.fill is not None:
            made = (
                bool if types.is_boolean(array.type) else float if types.is_floating(array.type) else lambda fill: fill
            )
            array = compute.fill_null(array, pa.scalar(made(feature.fill), array.type))
        _refuse_null(array, key, rows, where)
    if feature.encoding == "text" or feature.encoding in _WHOLE:
        large = types.is_large_string(array.type) or types.is_large_binary(array.type)
        values = array.cast(pa.large_binary() if large else pa.binary()).to_numpy(zero_copy_only=False)
    else:
        dtype = _EXTRACTED.get(feature.encoding, feature.dtype)
        with np.errstate(over="ignore"):  # becomes infinity, which is refused later
            values = array.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    return values.reshape(rows, *shape)


def _codes(array: "pa.Array", key: str, feature: Feature, rows: int, where: Callable[[int], str]) -> "pa.Array":
    """Return the positions that texts have in the vocabulary."""
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_dictionary(array.type) and array.dictionary.null_count:
        array = array.dictionary_decode()
    if not pa.types.is_dictionary(array.type):
        array = (array.cast(pa.string()) if pa.types.is_null(array.type) else plain(array)).dictionary_encode()
    if feature.fill is None:
        _refuse_null(array, key, rows, where)
    known = pa.array(feature.vocabulary, pa.string())
    codes = compute.index_in(array.dictionary.cast(pa.string()), value_set=known).take(array.indices)
    unknown = compute.and_(array.is_valid(), codes.is_null())
    if compute.any(unknown).as_py():
        at = compute.index(unknown, value=True).as_py()
        raise DamagedDataset(
            f"{where(at * rows // len(array))}: column {key!r} has {array[at].as_py()!r}, not in its vocabulary; set "
            f"data.options.vocabulary: {{{key}: [all texts]}}, or correct the row"
        )
    if not codes.null_count:
        return codes
    return compute.fill_null(codes, pa.scalar(feature.vocabulary.index(str(feature.fill)), codes.type))


def _refuse_null(array: "pa.Array", key: str, rows: int, where: Callable[[int], str]) -> None:
    from pyarrow import compute

    if array.null_count:
        at = compute.index(array.is_null(), value=True).as_py()
        raise DamagedDataset(
            f"{where(at * rows // len(array))}: column {key!r} is null; set data.options.fill: {{{key}: a value}}, or "
            "remove these rows"
        )


def _constant(text: str, feature: Feature, rows: int) -> Array:
    """Return what the name of a folder says, for each row."""
    if feature.dtype == "bool":  # of an earlier revision, which took every text as true
        raise DamagedDataset(f"{feature.record_key!r}: a folder says {text!r}, which was read as true; start a new run")
    if feature.vocabulary:
        return np.full(rows, feature.vocabulary.index(text), feature.dtype)
    if feature.encoding == "text":
        return np.full(rows, text.encode(), object)
    return np.full(rows, np.asarray(text).astype(feature.dtype))


def shared_features(of_sources: Sequence[Sequence[Feature]]) -> tuple[Feature, ...]:
    """Return the features of a mixture, whose sources may hold the same arrays in different ways.

    Args:
        of_sources: the features of each source; names, dtypes and shapes are the same.
    """
    by_name = [{each.name: each for each in features} for features in of_sources]

    def shared(feature: Feature) -> Feature:
        all_of = [features[feature.name] for features in by_name]
        longest = max(all_of, key=lambda each: len(each.vocabulary))
        if all(each.model_copy(update={"vocabulary": longest.vocabulary}) == longest for each in all_of):
            return longest  # one may have more texts than another, at the end
        kept = feature.encoding in {"image", "text"} and all(each.encoding == feature.encoding for each in all_of)
        return Feature(
            name=feature.name, dtype=feature.dtype, shape=feature.shape, encoding=feature.encoding if kept else "array"
        )

    return tuple(map(shared, of_sources[0]))


def value_bytes(features: Sequence[Feature]) -> int:
    """Return the bytes of the numbers in one example as a reader returns it; texts and images are not numbers."""
    numbers = (each for each in features if each.encoding != "text" and each.encoding not in _WHOLE)
    return sum(math.prod(each.shape) * np.dtype(_EXTRACTED.get(each.encoding, each.dtype)).itemsize for each in numbers)


def range_bytes(features: Sequence[Feature], *, records: int, size: int) -> int:
    """Return the memory that the values of a range take, in bytes: of texts and files as much as they take in it."""
    has_bytes = any(each.encoding == "text" or each.encoding in _WHOLE for each in features)
    return value_bytes(features) * records + has_bytes * size


_READERS: Mapping[str, Reader] = {"parquet": _parquet, "arrow": _arrow, "tar": read_tar}
