"""What the footer of a Parquet file says of its column chunks: where they are, how large, and how many nulls they have.

pyarrow tells it, too (`RowGroupMetaData.column`), but for some damaged footers it ends the whole process: there it does
not catch what C++ throws. It catches that where it reads the footer, its schema and the values. So the chunks alone are
read here. A footer is a struct in Thrift's compact protocol
(https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md), whose fields have numbers
(https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift).
"""

from dataclasses import dataclass
from typing import IO, Any, Final

# Types of Thrift; 1 and 2 are true and false.
_FALSE, _INTEGERS, _BINARY, _LISTS, _MAP, _STRUCT = 2, {4, 5, 6}, 8, {9, 10}, 11, 12
_WIDTHS: Final = {1: 1, 2: 1, 3: 1, 7: 8, 13: 16}
_LONG, _LAST, _MOST_BITS = 15, 127, 63
# FileMetaData, RowGroup, ColumnChunk, ColumnMetaData and Statistics.
_GROUPS, _COLUMNS, _META, _NULLS = 4, 1, 3, 3
_PATH, _VALUES, _UNCOMPRESSED, _COMPRESSED, _DATA_AT, _DICTIONARY_AT, _STATISTICS = 3, 5, 6, 7, 9, 11, 12


class DamagedFooter(ValueError):
    """A footer that is none."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A column of a row group.

    Attributes:
        path: its name, with those of the lists and structures around it.
        values: how many, with nulls.
        nulls: how many of them; None if it is not known.
        begin: where its first page is.
        compressed: bytes of its pages in the file.
        uncompressed: their bytes before compression.
    """

    path: str
    values: int
    nulls: int | None
    begin: int
    compressed: int
    uncompressed: int


def chunks_of(opened: IO[bytes], metadata: Any) -> list[list[Chunk]]:
    """Return the chunks of each row group, in the order of the schema.

    Args:
        opened: the file.
        metadata: pyarrow's, of the same footer; what is read here may have been damaged since.

    Raises:
        DamagedFooter: it does not say them.
    """
    try:
        opened.seek(-8, 2)
        size = int.from_bytes(opened.read(4), "little")
        opened.seek(-8 - size, 2)
        footer, _ = _struct(opened.read(size), 0)
        groups = [[_chunk(column[_META]) for column in group[_COLUMNS]] for group in footer.get(_GROUPS, ())]
    except UnicodeDecodeError:
        raise
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as fault:
        raise DamagedFooter(f"its footer is damaged ({type(fault).__name__}: {fault})") from fault
    if [len(each) for each in groups] != metadata.num_row_groups * [metadata.num_columns]:
        raise DamagedFooter(f"its row groups do not have {metadata.num_columns} columns each")
    return groups


def _chunk(fields: dict[int, Any]) -> Chunk:
    nulls = fields.get(_STATISTICS, {}).get(_NULLS)
    begins = (int(at) for at in (fields.get(_DICTIONARY_AT), fields[_DATA_AT]) if at)
    return Chunk(
        path=b".".join(fields[_PATH]).decode(),
        values=int(fields[_VALUES]),
        nulls=None if nulls is None else int(nulls),
        begin=min(begins, default=0),
        compressed=int(fields[_COMPRESSED]),
        uncompressed=int(fields[_UNCOMPRESSED]),
    )


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """The fields of a struct by their numbers, and where it ends. Fields that are true or false are left out."""
    fields, number = dict[int, Any](), 0
    while head := data[at]:
        number, at = (number + (head >> 4), at + 1) if head > _LONG else _integer(data, at + 1)
        if head & _LONG > _FALSE:
            fields[number], at = _value(data, at, head & _LONG)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in _INTEGERS:
        return _integer(data, at)
    if kind == _STRUCT:
        return _struct(data, at)
    if kind in _LISTS:
        head, at = data[at], at + 1
        count, at = _varint(data, at) if head >> 4 == _LONG else (head >> 4, at)
        return _values(data, at, count, [head & _LONG])
    if kind == _MAP:
        count, at = _varint(data, at)
        return _values(data, at + 1, count, [data[at] >> 4, data[at] & _LONG]) if count else ([], at)
    size, at = _varint(data, at) if kind == _BINARY else (_WIDTHS[kind], at)
    if at + size > len(data):
        raise IndexError(f"a value of {size} bytes")
    return data[at : at + size], at + size


def _values(data: bytes, at: int, count: int, kinds: list[int]) -> tuple[list[Any], int]:
    if count > len(data):  # each takes a byte
        raise IndexError(f"{count} values")
    values = []
    for kind in count * kinds:
        value, at = _value(data, at, kind)
        values.append(value)
    return values, at


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) > _LAST:
        value, shift, at = value | (byte & _LAST) << shift, shift + 7, at + 1
        if shift > _MOST_BITS:
            raise ValueError("an integer has more than 64 bits")
    return value | byte << shift, at + 1
