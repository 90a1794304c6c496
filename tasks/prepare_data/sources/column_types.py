"""What a column of a table becomes: an Arrow field → dtype, shape and encoding, or a refusal with the remedy.

The sources that read tables share this code, so that a column of one type is the same feature in Parquet, Arrow, CSV
and saved datasets: numbers keep their dtype, but floating ones are floatx, as in `fit`; lists of one length are arrays;
lists of any length are sequences for `data.pad` and `data.pack`; text is `tf.string`, or its positions in a
vocabulary; bytes are images, once their size is known. What is none of this is refused, before a value is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from baton.tasks.foundation.contracts.dataset import Feature
from baton.tasks.foundation.dataset.columns import is_list
from baton.tasks.foundation.dataset.features import STRING
from baton.tasks.foundation.errors import RunFileError, SourceError
from baton.tasks.prepare_data.sources.source import suggestion

Fill = bool | float | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownColumn:
    """What is known of a column besides its Arrow type."""

    image: bool = False  # its bytes are JPEG or PNG files
    shape: tuple[int, ...] | None = None  # of the lists in it, which may be stored as lists of any length


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnType:
    """What the values of a column become."""

    dtype: str
    shape: tuple[int, ...] = ()  # of one value; of sequences: of one item
    encoding: Literal["array", "text", "image"] = "array"
    is_sequence: bool = False  # its values are lists of any length
    is_dictionary: bool = False  # its texts are stored as positions in a vocabulary

    def __str__(self) -> str:
        lengths = [None] * self.is_sequence + list(self.shape)
        return f"{self.dtype}{lengths}" if lengths else self.dtype

    def feature(
        self, name: str, columns: str | Sequence[str], *, vocabulary: Sequence[str] = (), fill: Fill | None = None
    ) -> Feature:
        """Return the feature of one column, or of several that form its last dimension."""
        stacked = () if isinstance(columns, str) else tuple(columns)
        return Feature(
            name=name,
            dtype="int64" if vocabulary else self.dtype,
            shape=(len(stacked),) if stacked else self.shape,
            key=columns if isinstance(columns, str) else None,
            encoding="array" if vocabulary else self.encoding,
            stacked=stacked,
            vocabulary=tuple(vocabulary),
            fill=int(fill) if isinstance(fill, bool) else fill,
        )


def find_field(schema: Any, name: str) -> Any | None:
    """Return the field of a column, `image.bytes` for a field within one; None if there is none.

    Args:
        schema: a `pyarrow.Schema`.
        name: of the column; one with this very name comes first.
    """
    import pyarrow as pa

    if (position := schema.get_field_index(name)) >= 0:
        return schema.field(position)
    begin, dot, rest = name.rpartition(".")
    above = find_field(schema, begin) if dot else None
    if above is None or not pa.types.is_struct(above.type):
        return None
    position = above.type.get_field_index(rest)
    return above.type.field(position).with_name(name) if position >= 0 else None


def column_type(
    field: Any, *, where: object, floats: str, known: KnownColumn, image: Sequence[int], sequences: bool
) -> ColumnType:
    """Return what a column becomes.

    Args:
        field: a `pyarrow.Field`, its name as in the run file.
        where: the file, for messages.
        floats: the dtype of floating numbers.
        image: (height, width, channels) of its images; empty: not known.
        sequences: whether lists of any length are allowed; `data.pad` or `data.pack` is set.

    Raises:
        SourceError: no array can be made of it; names file, column, type and remedy.
    """
    import pyarrow as pa

    kind, is_dictionary = field.type, False
    if isinstance(kind, pa.FixedShapeTensorType):
        known = KnownColumn(shape=_tensor_shape(field, where))
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind, is_dictionary = kind.value_type, True
    shape, is_sequence, kind = _lists(field, kind, known.shape, where)
    encoding: Literal["array", "text", "image"] = "array"
    if pa.types.is_null(kind):  # a CSV column without a value
        dtype = floats
    elif (pa.types.is_boolean(kind) or pa.types.is_integer(kind)) and not is_dictionary:
        dtype = np.dtype(kind.to_pandas_dtype()).name
    elif pa.types.is_floating(kind) and not is_dictionary:
        dtype = floats
    elif _is_text(kind) and not (is_dictionary and shape):
        dtype, encoding = STRING, "text"
    elif _is_bytes(kind) and (known.image or image) and image and not shape and not is_dictionary:
        return ColumnType(dtype="uint8", shape=tuple(image), encoding="image")
    else:
        raise _refused(field, kind, where)
    if is_sequence and not sequences:
        raise SourceError(
            f"{where}: the column {field.name!r} is {field.type}: lists of any length; set data.pad: "
            f"{{{field.name}: n}}, or data.pack; if all have one length, set data.options.shapes: "
            f"{{{field.name}: [n]}}"
        )
    return ColumnType(dtype=dtype, shape=shape, encoding=encoding, is_sequence=is_sequence, is_dictionary=is_dictionary)


def _tensor_shape(field: Any, where: object) -> tuple[int, ...]:
    order = field.type.permutation
    if order is not None and list(order) != sorted(order):
        raise SourceError(
            f"{where}: the column {field.name!r} is {field.type}, whose values are not in the order of its dimensions; "
            "write it without a permutation, or leave it out: name the columns under data.options.x"
        )
    return tuple(field.type.shape)


def stacked_type(types: Mapping[str, ColumnType], *, key: str, floats: str) -> ColumnType:
    """Return the type of one array that several columns form.

    Raises:
        RunFileError: one of them is no number.
    """
    for column, each in types.items():
        if each.encoding != "array" or each.shape or each.is_sequence:
            row = f"; in CSV, types: {{{column}: float64}} finds the row without a number" * (each.encoding == "text")
            raise RunFileError(
                f"data.options.{key}: {column!r} is {each}, and only single numbers can be stacked; leave it out of "
                f"the stack, as {{numbers: [a, b], text: c}}{row}"
            )
    common = np.result_type(*(each.dtype for each in types.values()))
    return ColumnType(dtype=floats if common.kind == "f" else common.name)


def require_fill(column: str, fill: Fill, kind: ColumnType, vocabulary: Sequence[str]) -> None:
    """Refuse what cannot stand in place of nulls.

    Raises:
        RunFileError: the column cannot hold it.
    """
    at = f"data.options.fill.{column}: {fill!r}"
    if kind.encoding == "image":
        raise RunFileError(f"{at}: the column holds images; remove the rows without one")
    if vocabulary:
        if fill not in vocabulary:
            raise RunFileError(f"{at}: is not in its vocabulary; {suggestion(str(fill), vocabulary)}")
    elif (kind.encoding == "text") != isinstance(fill, str) or (
        not isinstance(fill, str)
        and np.dtype(kind.dtype).kind != "f"
        and (abs(fill) >= 2**64 or np.asarray(fill).astype(kind.dtype) != fill)
    ):
        raise RunFileError(f"{at}: the column is {kind}; give a value that it can hold")


def _lists(field: Any, kind: Any, shape: tuple[int, ...] | None, where: object) -> tuple[tuple[int, ...], bool, Any]:
    """Return the shape that nested lists have, whether the first dimension varies, and the type of their values."""
    import pyarrow as pa

    whole, found = kind, list[int | None]()
    while is_list(kind):
        found.append(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
        kind = kind.value_type
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
    if 0 in found:
        raise SourceError(
            f"{where}: the column {field.name!r} is {whole}: lists without values; leave it out: name the columns "
            "under data.options.x"
        )
    if shape is not None and found:
        if len(shape) < len(found):
            raise SourceError(
                f"{where}: the column {field.name!r} is {whole}, and {list(shape)} says the lengths of the outer lists "
                f"alone; set data.options.shapes: {{{field.name}: [{', '.join('nmkl'[: len(found)])}]}}"
            )
        return shape, False, kind
    fixed = tuple(size for size in found[bool(found and found[0] is None) :] if size is not None)
    if len(fixed) + (None in found[:1]) != len(found):
        return (), False, pa.list_(kind)  # of any length within lists; refused
    return fixed, None in found[:1], kind


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _refused(field: Any, kind: Any, where: object) -> SourceError:
    import pyarrow as pa

    name, types = field.name, pa.types
    if types.is_temporal(kind):
        how = (
            f'write numbers: pyarrow.compute.cast(table["{name}"], "int64"), or in pandas '
            f'df["{name}"].astype("int64") // 10**9 for seconds'
        )
    elif types.is_decimal(kind):
        how = f'write floating numbers: pyarrow.compute.cast(table["{name}"], "float64")'
    elif types.is_dictionary(field.type):
        how = f'only texts can be a vocabulary; write its values: table["{name}"].cast(...)'
    elif types.is_struct(kind):
        fields = [kind.field(index).name for index in range(kind.num_fields)]
        how = f"name one of its fields, as {name}.{fields[0]}" if fields else "leave it out"
    elif _is_bytes(kind) or types.is_fixed_size_binary(kind):
        how = (
            "if these are JPEG or PNG files, set data.options.size: [height, width]; text must be written as strings, "
            "CSV as UTF-8"
        )
    elif types.is_list(kind):
        how = f"lists of any length within lists; if all have one shape, set data.options.shapes: {{{name}: [n, m]}}"
    else:
        how = "write it as numbers or text"
    return SourceError(
        f"{where}: the column {name!r} is {field.type}; {how}, or leave it out: name the columns under data.options.x"
    )
