"""The files of a table: Parquet, Arrow (Feather; files and streams) and CSV.

Their schemas are read from footers and headers, without reading a row. Parquet and Arrow files are divided into ranges
of whole row groups or record batches, which can be read where they are. The footer of an Arrow file says where its
batches are; those of a stream follow each other. A batch says how many rows and bytes it has
(https://arrow.apache.org/docs/format/Columnar.html), so that the index costs one small read for each. CSV has no such
parts, and types only once all of its cells are read. All three are read batch by batch for a copy.

A few bytes can stand for gigabytes, as one text in a million rows. So what is decoded at once is bounded.
"""

import codecs
import io
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from baton.tasks.foundation.contracts.dataset import RangeLayout
from baton.tasks.foundation.dataset.columns import arrow_table
from baton.tasks.foundation.errors import RunFileError, SourceError
from baton.tasks.prepare_data.shard_writers import disk_errors, scratch_file, scratch_folder
from baton.tasks.prepare_data.sources.parquet_footers import Chunk, DamagedFooter, chunks_of
from baton.tasks.prepare_data.sources.source import Range, suggestion
from baton.tasks.prepare_data.sources.source_files import SourceFile
from baton.tasks.prepare_data.sources.verified_reads import BlockStream

Form = Literal["parquet", "arrow", "csv"]
SUFFIXES: Mapping[str, Form] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".arrows": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
}
_PARQUET, _ARROW, _FEATHER_1 = b"PAR1", b"ARROW1\0\0", b"FEA1"
_NAMES = {"parquet": "Parquet", "arrow": "Arrow", "csv": "CSV"}
_RANGE_BYTES = 32 << 20
_BATCH_BYTES = 8 << 20
_CSV_BLOCK_BYTES = 4 << 20
_DELIMITERS = ";\t|,"
_TEXTS = {"string", "large_string", "binary", "large_binary"}
# Positions in the tables of an Arrow message, and the kinds of messages.
_KIND, _HEADER, _BODY_BYTES, _ROWS, _BUFFERS = 1, 2, 3, 0, 2
_DICTIONARY, _RECORDS = 2, 3
_CONTINUES = b"\xff\xff\xff\xff"
_COMPRESSION, _DICTIONARIES, _BATCHES = 3, 2, 3
# The most memory for a row group or the batches of a range: bytes, or a multiple of their bytes in the file.
_DECODED_BYTES, _DECODED_TIMES = 128 << 20, 100
_OF_TEXTS = "BYTE_ARRAY"
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, _OF_TEXTS: 8}
_CSV_VALUE = re.compile(
    r"In CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error to ([^:]+): (?:invalid value )?(.*)", re.DOTALL
)
_CSV_CELLS = re.compile(r"CSV parse error: (?:Row #(\d+): )?Expected (\d+) columns, got (\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvForm:
    """How CSV files are written; `types` are those of columns that are not found in their cells."""

    delimiter: str | None = None  # None: a comma, or in .tsv files a tab
    decimal: str = "."
    types: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Part:
    """A row group or record batch: its number, its bytes from `begin` to `end`, its rows."""

    number: int
    begin: int
    end: int
    rows: int
    decoded: int = 0  # bytes of memory, of Parquet
    follows: bool = True  # whether it begins where the part before ends, if it must


def form_of(file: SourceFile) -> Form:
    """Return the format of a file, by its name, or by its first bytes.

    Raises:
        SourceError: it is of none of the formats.
    """
    for suffix, form in SUFFIXES.items():
        if file.name.lower().endswith(suffix):
            return form
    with file.open() as opened:
        begin = opened.read(len(_ARROW))
        if begin.startswith(_PARQUET):
            return "parquet"
        if begin == _ARROW or begin.startswith(_CONTINUES):
            return "arrow"
        raise SourceError(
            f"{file}: is not a Parquet, Arrow or CSV file (*.csv, *.tsv); name such files, as in data.options.path: "
            "data/*.parquet"
        )


def schema_of(file: SourceFile, form: Form, csv: CsvForm) -> Any:
    """Return a file's schema, see `reading_schema`."""
    with reading_schema(file, form, csv) as schema:
        return schema


@contextmanager
def reading_schema(file: SourceFile, form: Form, csv: CsvForm) -> Iterator[Any]:
    """Yield a file's `pyarrow.Schema`; of CSV the names of its columns, for their types see `csv_schema`.

    Refuse columns within the context, which then finds out whether the schema was damaged in transit.

    Raises:
        SourceError: the file is damaged, or of another format, or has no usable header.
    """
    with file.open() as opened:
        if form == "csv":
            import pyarrow as pa

            schema = pa.schema([(name, pa.null()) for name in _header(file, opened, csv)])
        else:
            with _errors_of(file, form):
                if form == "parquet":
                    from pyarrow import parquet

                    schema = parquet.ParquetFile(opened).schema_arrow
                else:
                    schema = _arrow(file, opened).schema
                _require_names(schema)
        yield schema


def _require_names(fields: Iterable[Any]) -> None:
    """Read all names, which raises if one is not UTF-8."""
    for each in fields:
        if each.name is not None and each.type.num_fields:
            _require_names(each.type.field(index) for index in range(each.type.num_fields))


def footer_counts(files: Sequence[SourceFile]) -> tuple[int, dict[str, int]]:
    """Return the rows of Parquet files, and the nulls of each column whose footers say them.

    Raises:
        SourceError: a file is damaged.
    """
    from pyarrow import parquet

    rows, nulls, unknown = 0, dict[str, int](), set[str]()
    for file in files:
        with file.open(has_checksums=True) as opened, _errors_of(file, "parquet"):
            metadata = parquet.ParquetFile(opened).metadata
            rows += metadata.num_rows
            for chunk in chain.from_iterable(chunks_of(opened, metadata)):
                if chunk.nulls is None:
                    unknown.add(chunk.path)
                else:
                    nulls[chunk.path] = nulls.get(chunk.path, 0) + chunk.nulls
    return rows, {name: count for name, count in nulls.items() if name not in unknown}


def batches_of(
    file: SourceFile,
    form: Form,
    csv: CsvForm,
    *,
    columns: Sequence[str],
    types: Mapping[str, Any],
    most_bytes: int | None = None,
) -> Iterator[Any]:
    """Yield the rows of a file in order, as `pyarrow.Table`s of a few MiB.

    Args:
        form: its format.
        csv: how it is written, if it is CSV.
        columns: what is read of it.
        types: of CSV: the Arrow types of the columns.
        most_bytes: see `require_bound`.

    Raises:
        SourceError: the file is damaged, or a cell is not of its column's type; or see `require_bound`.
    """
    import pyarrow as pa

    if form == "csv":
        with file.reading() as blocks:
            stream = io.BufferedReader(BlockStream(blocks), _CSV_BLOCK_BYTES)
            with _csv(file, stream, csv, types=types, columns=columns) as reader:
                for batch in reader:
                    yield pa.Table.from_batches([batch])
        return
    with _whole(file) as opened, _errors_of(file, form):
        read = _of_parquet if form == "parquet" else _of_arrow
        for batch in read(file, opened, columns, most_bytes):
            batch.validate(full=True)
            yield batch


def _of_parquet(file: SourceFile, opened: IO[bytes], columns: Sequence[str], most_bytes: int | None) -> Iterator[Any]:
    """Yield the rows of a Parquet file; few at once if they have long texts, for one text may stand in all of them."""
    import pyarrow as pa
    from pyarrow import parquet

    metadata = parquet.read_metadata(opened)
    schema = metadata.schema.to_arrow_schema()
    texts = [field.name for field in schema if str(field.type) in _TEXTS and schema.get_field_index(field.name) >= 0]
    _, _, parts = _row_groups(file, opened, opened.seek(0, 2), dict.fromkeys(columns, True), most_bytes)
    row_bytes = max((each.decoded // max(1, each.rows) for each in parts), default=1)
    found = parquet.ParquetFile(opened, metadata=metadata, read_dictionary=texts)
    for batch in found.iter_batches(batch_size=max(1, _BATCH_BYTES // max(1, row_bytes)), columns=list(columns)):
        table, sizes = pa.Table.from_batches([batch]), np.zeros(batch.num_rows, np.int64)
        coded = [name for name in table.schema.names if name in texts and pa.types.is_dictionary(table[name].type)]
        for column in map(batch.column, coded):
            sizes += _text_lengths(column)
        begins = np.flatnonzero(np.diff(np.cumsum(sizes) // _BATCH_BYTES, prepend=-1))
        for begin, end in zip(begins, [*begins[1:], len(table)], strict=True):
            rows = table.slice(begin, end - begin)
            for name in coded:
                kind = schema.field(name).type
                rows = rows.set_column(rows.schema.get_field_index(name), name, rows[name].cast(kind))
            yield rows


def _of_arrow(file: SourceFile, opened: IO[bytes], columns: Sequence[str], most_bytes: int | None) -> Iterator[Any]:
    """Yield the rows of an Arrow file or stream."""
    found = _arrow_parts(file, opened)
    schema = _arrow(file, opened).schema.serialize().to_pybytes()
    for group in _grouped(found.batches, None, None):
        head = [schema]
        for begin, end in found.dictionaries:
            if found.is_file or begin < group[0].begin:
                opened.seek(begin)
                head.append(opened.read(end - begin))
        opened.seek(group[0].begin)
        data = b"".join(head), opened.read(group[-1].end - group[0].begin)
        require_bound(decoded_bytes(*data), sum(map(len, data)), most_bytes, f"{file}, from byte {group[0].begin} on")
        yield arrow_table(*data, columns)


def require_bound(decoded: int, size: int, most_bytes: int | None, where: object) -> None:
    """Refuse what takes far more memory than it has bytes.

    Args:
        decoded: bytes of memory of a row group, or of record batches.
        size: their bytes in the file.
        most_bytes: the bound, `data.options.decoded_bytes`; None: 128 MiB, or 100 times their bytes.
        where: what it is, for messages.

    Raises:
        SourceError: it takes more.
    """
    bound = _bound(size, most_bytes)
    if decoded > bound:
        raise SourceError(
            f"{where}: {size:,} bytes become {decoded:,} bytes in memory, and {bound:,} are allowed; set "
            f"data.options.decoded_bytes to {decoded} or more, or write the file with fewer rows in a group or batch"
        )


def _bound(size: int, most_bytes: int | None) -> int:
    return most_bytes or max(_DECODED_BYTES, _DECODED_TIMES * size)


@contextmanager
def _whole(file: SourceFile) -> Iterator[IO[bytes]]:
    """Open a file to read all of it. One in a store is downloaded first, to compare it with the store's checksum."""
    if file.local is not None:
        with file.open() as opened:
            yield opened
        return
    with scratch_file() as scratch:
        with file.reading() as blocks, disk_errors(scratch_folder()):
            for block in blocks:
                scratch.write(block)
        scratch.seek(0)
        yield scratch


def first_rows(file: SourceFile, form: Form, column: str) -> Any | None:
    """Return a column of the first row group or record batches of a file, as a `pyarrow.Table`; None: it has no row."""
    from pyarrow import parquet

    if form == "arrow":
        return next((rows for rows in batches_of(file, form, CsvForm(), columns=[column], types={}) if len(rows)), None)
    with file.open() as opened, _errors_of(file, form):
        found = parquet.ParquetFile(opened)
        groups = (number for number in range(found.num_row_groups) if found.metadata.row_group(number).num_rows)
        number = next(groups, None)
        return None if number is None else found.read_row_group(number, columns=[column])


def planned_ranges(
    file: SourceFile,
    form: Form,
    columns: Mapping[str, bool],
    *,
    partition: Mapping[str, str],
    most_records: int | None,
    most_bytes: int | None,
) -> list[Range]:
    """Return the ranges of a Parquet or Arrow file, whose checksums are not known yet.

    Args:
        form: its format.
        columns: what is read of it, and whether nulls of the column are filled.
        partition: what the names of its folders say.
        most_records: rows of a range, unless a row group has more; None: about 32 MiB.
        most_bytes: see `require_bound`.

    Raises:
        SourceError: the file is damaged; or a footer says that a column has nulls, which are not filled.
    """
    with file.open() as opened, _errors_of(file, form):
        size = opened.seek(0, 2)
        if form == "parquet":
            begin, end, parts = _row_groups(file, opened, size, columns, most_bytes)
        else:
            found = _arrow_parts(file, opened)
            (begin, end), parts = found.head, found.batches
            if end < begin:
                raise SourceError(
                    f"{file}: has another dictionary after its first rows; set data.options.copy: true, or write the "
                    "file again with table.unify_dictionaries()"
                )
    return [
        Range(
            path=file.uri,
            begin=group[0].begin,
            size=group[-1].end - group[0].begin,
            crc32c="00000000",
            records=sum(part.rows for part in group),
            layout=RangeLayout(
                form="parquet" if form == "parquet" else "arrow",
                head_begin=begin,
                head_size=end - begin,
                first_part=group[0].number,
                parts=group[-1].number - group[0].number + 1,
                partition=dict(partition),
            ),
        )
        for group in _grouped(parts, most_records, most_bytes)
    ]


def _grouped(parts: Iterable[_Part], most_records: int | None, most_bytes: int | None) -> Iterator[list[_Part]]:
    group: list[_Part] = []
    for part in parts:
        rows = sum(each.rows for each in group) + part.rows
        size = part.end - group[0].begin if group else 0
        full = size > _RANGE_BYTES if most_records is None else rows > most_records
        decoded = sum(each.decoded for each in group) + part.decoded
        if group and (not part.follows or (part.rows and (full or decoded > _bound(size, most_bytes)))):
            yield group
            group = []
        if part.rows:
            group.append(part)
    if group:
        yield group


def _row_groups(
    file: SourceFile, opened: IO[bytes], size: int, columns: Mapping[str, bool], most_bytes: int | None
) -> tuple[int, int, list[_Part]]:
    """Return where the footer begins and ends, and the row groups."""
    from pyarrow import parquet

    found = parquet.ParquetFile(opened)
    metadata = found.metadata
    opened.seek(size - 8)
    footer = size - 8 - int.from_bytes(opened.read(4), "little")
    leaves = {
        index: leaf
        for index, leaf in enumerate(map(metadata.schema.column, range(metadata.num_columns)))
        if any(name in columns for name in _names_of(leaf.path))
    }
    parts: list[_Part] = []
    row = 0
    for number, of_group in enumerate(chunks_of(opened, metadata)):
        group = metadata.row_group(number)
        if not group.num_rows:
            continue
        if group.num_rows < 0:
            raise DamagedFooter(f"row group {number} has {group.num_rows} rows")
        chunks = [(leaf, of_group[index]) for index, leaf in leaves.items()]
        for _, chunk in chunks:
            if columns.get(chunk.path) is False and chunk.nulls:
                _refuse_nulls(file, found, number, chunk, row)
        # Pages of the chosen columns, and of those between them.
        begin = min((chunk.begin for _, chunk in chunks), default=len(_PARQUET))
        end = max((chunk.begin + chunk.compressed for _, chunk in chunks), default=len(_PARQUET))
        if not len(_PARQUET) <= begin <= end <= footer:
            raise SourceError(f"{file}: row group {number} lies outside of the file; write the file again")
        decoded = sum(
            chunk.values * (_WIDTHS.get(leaf.physical_type) or leaf.length)
            + (chunk.uncompressed if leaf.physical_type == _OF_TEXTS else 0)
            for leaf, chunk in chunks
        )
        where = f"{file}, row group {number}"
        require_bound(decoded, end - begin, most_bytes, where)
        for leaf, chunk in chunks:
            # Texts in lists and structures are not read as codes: each is held as often as it stands there.
            of_texts = leaf.physical_type == _OF_TEXTS and "." in chunk.path
            if of_texts and chunk.values * chunk.uncompressed > _bound(end - begin, most_bytes):
                coded = parquet.ParquetFile(opened, metadata=metadata, read_dictionary=[chunk.path])
                texts = coded.read_row_group(number, columns=[chunk.path]).column(0)
                decoded += max(0, sum(map(_bytes_of_texts, texts.chunks)) - chunk.uncompressed)
                require_bound(decoded, end - begin, most_bytes, where)
        parts.append(_Part(number, begin, end, group.num_rows, decoded))
        row += group.num_rows
    return footer, size, parts


def _bytes_of_texts(array: Any) -> int:
    """Return the bytes of all texts in lists or structures, which are read as codes."""
    while array.type.num_fields:
        parts = array.flatten()
        array = parts[0] if isinstance(parts, list) else parts
    return int(_text_lengths(array).sum())


def _text_lengths(coded: Any) -> npt.NDArray[np.int64]:
    """Return the bytes of each text of an array that is read as codes."""
    import pyarrow as pa
    from pyarrow import compute

    lengths = compute.binary_length(coded.dictionary.cast(pa.large_binary()))
    found: npt.NDArray[np.int64] = lengths.take(coded.indices).fill_null(0).to_numpy(zero_copy_only=False)
    return found


def _names_of(path: str) -> list[str]:
    """Return a Parquet column, and all that it is within, as the items of a list are."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _refuse_nulls(file: SourceFile, found: Any, number: int, chunk: Chunk, first_row: int) -> None:
    """Refuse nulls that the footer tells; all others are found when the values are read."""
    from pyarrow import compute

    name = chunk.path
    column = found.read_row_group(number, columns=[name]).column(0).combine_chunks()
    if fields := name.split(".")[1:] if column.type.num_fields else ():
        column = compute.struct_field(column, fields)
    row = first_row + compute.index(column.is_null(), value=True).as_py()
    raise SourceError(
        f"{file}, row {row}: the column {name!r} is null, as {(chunk.nulls or 1) - 1} more in this row group are; "
        f"set data.options.fill: {{{name}: a value}}, or remove these rows"
    )


@dataclass(frozen=True, slots=True)
class _ArrowParts:
    """Where the parts of an Arrow file or stream are, each as (begin, end)."""

    head: tuple[int, int]  # see `arrow_table`; ends before it begins: no stretch of bytes is one
    dictionaries: list[tuple[int, int]]
    batches: list[_Part]
    is_file: bool  # its dictionaries are those of all batches


def _arrow_parts(file: SourceFile, opened: IO[bytes]) -> _ArrowParts:
    size = opened.seek(0, 2)
    opened.seek(0)
    is_file = opened.read(len(_ARROW)) == _ARROW
    head, footer = (len(_ARROW), size) if is_file else (0, 0)
    if is_file:
        opened.seek(size - len(_ARROW) - 2)
        footer -= len(_ARROW) + 2 + int.from_bytes(opened.read(4), "little")
    found = list(_messages_of_file(file, opened, footer, size) if is_file else _messages_of_stream(file, opened, size))
    batches = [each for each in found if each[0] == _RECORDS]
    ends = [0, *(end for _, _, end, _ in batches)]
    parts = [
        _Part(number, begin, end, rows, follows=begin == ends[number])
        for number, (_, begin, end, rows) in enumerate(batches)
    ]
    dictionaries = [(begin, end) for kind, begin, end, _ in found if kind == _DICTIONARY]
    first = min((each.begin for each in parts), default=size)
    end = head
    for kind, begin, next_one, _ in found:
        end = next_one if begin == end and kind != _RECORDS else end
    if any(begin > first for begin, _ in dictionaries) or (dictionaries and end < max(dictionaries)[1]):
        head, end = 0, -1
    elif end == head or (parts and end != first):  # polars writes a schema that can be read into the footer alone
        head, end = footer, size
    return _ArrowParts((head, end), dictionaries, parts, is_file)


def _messages_of_stream(file: SourceFile, opened: IO[bytes], size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, begin, end and rows of each message."""
    at = 0
    while (message := _message_at(file, opened, at, size))[0]:
        yield message
        at = message[2]


def _messages_of_file(
    file: SourceFile, opened: IO[bytes], footer: int, size: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the schema, if it can be read at the beginning, and the messages that the footer lists."""
    opened.seek(max(footer, 0))
    data = opened.read(size - footer)
    try:
        blocks = [
            begin
            for number in (_DICTIONARIES, _BATCHES)
            if (place := _field_of(data, struct.unpack_from("<I", data, 0)[0], number))
            for begin, *_ in sorted(_vector(data, place, "<qi4xq"))
        ]
    except struct.error as fault:
        raise _DamagedMessage(str(fault)) from fault
    with suppress(_DamagedMessage, SourceError):
        yield _message_at(file, opened, len(_ARROW), size)
    yield from (_message_at(file, opened, begin, size) for begin in blocks)


def _message_at(file: SourceFile, opened: IO[bytes], at: int, size: int) -> tuple[int, int, int, int]:
    """Return kind, begin, end and rows of a message; of kind 0 at the end of a stream."""
    if not 0 <= at <= size:
        raise SourceError(f"{file}: has no Arrow message at byte {at}; write the file again")
    opened.seek(at)
    prefix = opened.read(8)
    start = 8 if prefix[:4] == _CONTINUES else 4  # versions before 0.15 wrote the size alone
    metadata_bytes = int.from_bytes(prefix[start - 4 : start], "little", signed=True)
    if not prefix or (len(prefix) >= start and metadata_bytes == 0):
        return 0, at, at, 0
    if metadata_bytes < 0 or at + start + metadata_bytes > size:
        raise SourceError(f"{file}: has no Arrow message at byte {at}; write the file again")
    opened.seek(at + start)
    message = _message(opened.read(metadata_bytes))
    if not message.kind:  # it would end a stream
        raise SourceError(f"{file}: has no Arrow message at byte {at}; write the file again")
    end = at + start + metadata_bytes + message.body_bytes
    if message.rows < 0 or end > size:
        raise SourceError(f"{file}: ends within the message at byte {at}; write the file again")
    return message.kind, at, end, message.rows


@dataclass(frozen=True, slots=True)
class _Message:
    kind: int
    body_bytes: int
    rows: int
    compressed: list[tuple[int, int]] | None  # begin and size of buffers within the body


def _message(metadata: bytes) -> _Message:
    """Return what an Arrow message says of a record batch or of a dictionary."""
    try:
        (root,) = struct.unpack_from("<I", metadata, 0)
        kind_at, header, body_at = (_field_of(metadata, root, number) for number in (_KIND, _HEADER, _BODY_BYTES))
        kind = metadata[kind_at] if kind_at else 0
        body_bytes = struct.unpack_from("<q", metadata, body_at)[0] if body_at else 0
        if body_bytes < 0:
            raise _DamagedMessage(f"a message has {body_bytes} bytes")
        if kind not in {_RECORDS, _DICTIONARY}:
            return _Message(kind, body_bytes, 0, None)
        table = header + struct.unpack_from("<I", metadata, header)[0]
        if kind == _DICTIONARY:
            header = _field_of(metadata, table, 1)
            table = header + struct.unpack_from("<I", metadata, header)[0]
        rows_at, buffers = _field_of(metadata, table, _ROWS), _field_of(metadata, table, _BUFFERS)
        rows = struct.unpack_from("<q", metadata, rows_at)[0] if rows_at else 0
        if not buffers or not _field_of(metadata, table, _COMPRESSION):
            return _Message(kind, body_bytes, rows, None)
        return _Message(kind, body_bytes, rows, _vector(metadata, buffers, "<qq"))
    except (struct.error, IndexError) as fault:
        raise _DamagedMessage(str(fault)) from fault


def _field_of(data: bytes, table: int, number: int) -> int:
    """Return where a field of a table of FlatBuffers is; 0: it has none."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, fields)
    offset = struct.unpack_from("<H", data, fields + 4 + 2 * number)[0] if 4 + 2 * number < size else 0
    return table + offset if offset else 0


def _vector(data: bytes, place: int, form: str) -> list[Any]:
    begin = place + struct.unpack_from("<I", data, place)[0]
    (count,) = struct.unpack_from("<I", data, begin)
    if begin + 4 + count * struct.calcsize(form) > len(data):
        raise struct.error(f"a vector of {count} ends after its message")
    return list(struct.iter_unpack(form, data[begin + 4 : begin + 4 + count * struct.calcsize(form)]))


def decoded_bytes(head: bytes, body: bytes) -> int:
    """Return the memory that record batches take, in bytes; for `head` and `body` see `arrow_table`."""
    total = 0
    for data in (head, body):
        at = 0
        while data[at : at + 4] == _CONTINUES or (at and at + 4 < len(data)):
            start = at + (8 if data[at : at + 4] == _CONTINUES else 4)
            size = int.from_bytes(data[start - 4 : start], "little")
            if not size:
                break
            message = _message(data[start : start + size])
            begin, at = start + size, start + size + message.body_bytes
            sizes = [
                length
                if (raw := int.from_bytes(data[begin + place : begin + place + 8], "little", signed=True)) < 0
                else raw
                for place, length in message.compressed or ()
                if length
            ]
            # A column of nulls has no bytes.
            total += max(message.body_bytes if message.compressed is None else sum(sizes), 8 * message.rows)
    return total


class _DamagedMessage(ValueError):
    """An Arrow message that is none."""


def _arrow(file: SourceFile, opened: IO[bytes]) -> Any:
    """Return a reader of an Arrow file or stream."""
    from pyarrow import ipc

    opened.seek(0)
    begin = opened.read(len(_ARROW))
    opened.seek(0)
    if begin.startswith(_FEATHER_1):
        raise SourceError(f"{file}: is Feather version 1; write it again with pyarrow.feather.write_feather")
    return ipc.open_file(opened) if begin == _ARROW else ipc.open_stream(opened)


@dataclass(slots=True, kw_only=True)
class _Cells:
    """What the cells of a CSV column are, in all rows of all files. The order in which they are noted changes no type.

    The attributes after `kinds` are the first such cell, with its place; "": there is none.
    """

    floats: str  # what floating numbers become
    kinds: dict[str, Any] = field(default_factory=dict)  # Arrow types of batches, by their names
    not_a_bit: str = ""  # an integer that is neither 0 nor 1
    negative: str = ""
    huge: str = ""  # an integer that int64 cannot hold
    too_huge: str = ""  # one that uint64 cannot hold either
    inexact: str = ""  # an integer that `floats` would round
    comma: str = ""  # a number with a decimal comma
    other: str = ""  # no number

    def note(self, texts: Any, values: Any, where: Callable[[int], str]) -> None:
        """Note the cells of a batch: `values` are what pyarrow takes the `texts` for."""
        import pyarrow as pa
        from pyarrow import compute

        def mark(name: str, found: Any) -> None:
            rows = np.flatnonzero(found)
            if rows.size and not getattr(self, name):
                setattr(self, name, f"{where(int(rows[0]))} is {_first_line(texts[int(rows[0])])}")

        def fits(pattern: str) -> Any:
            return compute.match_substring_regex(trimmed, f"^(?:{pattern})$").to_numpy(zero_copy_only=False)

        kind, trimmed = values.type, compute.utf8_trim_whitespace(texts)
        if pa.types.is_null(kind):
            return
        if pa.types.is_integer(kind):
            numbers = values.fill_null(0).to_numpy()
            mark("not_a_bit", (numbers < 0) | (numbers > 1))
            mark("negative", numbers < 0)
            mark("inexact", numbers.astype(self.floats).astype(np.float64).astype(object) != numbers)
        elif pa.types.is_floating(kind):
            whole = fits("[+-]?[0-9]+")
            if (whole | fits("")).all():
                kind = pa.int64()  # of more digits than that has
            long = np.flatnonzero(fits("[+-]?[0-9]{8,}"))  # shorter ones are exact
            numbers = np.array([int(texts[int(row)].as_py()) for row in long], object)
            for name, wrong in (
                ("negative", numbers < 0),
                ("huge", (numbers < -(2**63)) | (numbers >= 2**63)),
                ("too_huge", (numbers < -(2**63)) | (numbers >= 2**64)),
                ("inexact", [int(np.dtype(self.floats).type(number)) != number for number in numbers]),
            ):
                found = np.zeros(len(texts), bool)
                found[long] = wrong
                mark(name, found)
            mark("negative", whole & fits("-.*"))
            mark("not_a_bit", whole & ~fits("[01]"))
        elif pa.types.is_string(kind):
            mark("comma", fits("[+-]?[0-9]*,[0-9]+"))
            mark("other", ~fits("([+-]?[0-9]*,?[0-9]+)?"))
        self.kinds[str(kind)] = kind

    def type(self, column: str) -> Any:
        """Return the Arrow type of the column.

        Raises:
            SourceError: it would change a number.
        """
        import pyarrow as pa

        kinds, as_text = self.kinds.keys(), f"data.options.types: {{{column}: text}}"
        rounded = f"set data.options.types: {{{column}: {self.floats}}} to round it, or {as_text}"
        if not kinds:
            return pa.null()
        if kinds <= {"int64"} and self.huge:
            if self.too_huge or self.negative:
                raise SourceError(f"{self.too_huge or self.huge}, too large for integers of 64 bits; {rounded}")
            return pa.uint64()
        if kinds == {"int64", "bool"} and not self.not_a_bit:
            return pa.bool_()
        if kinds in ({"int64", "double"}, {"double"}):
            if self.inexact:
                raise SourceError(f"{self.inexact}, which {self.floats} cannot hold, as other cells need; {rounded}")
            return pa.float64()
        if self.comma and not self.other and kinds <= {"int64", "string"}:
            raise SourceError(f'{self.comma}, a number with a comma; set data.options.decimal: ",", or {as_text}')
        return next(iter(self.kinds.values())) if len(kinds) == 1 else pa.string()


def csv_schema(
    files: Sequence[SourceFile],
    csv: CsvForm,
    *,
    columns: Sequence[str],
    floats: str,
    problems: dict[str, str] | None = None,
) -> Any:
    """Return the `pyarrow.Schema` of CSV files. All cells are read, so that a column has one type in all of them.

    Args:
        files: in order.
        csv: how they are written.
        columns: those that get a type; all others are null.
        floats: the dtype of floating numbers.
        problems: takes the errors of single columns, which are text then; None: they are raised.

    Raises:
        SourceError: a file has no such column, or a number cannot be held exactly.
    """
    import pyarrow as pa

    names, wanted = schema_of(files[0], "csv", csv).names, set(columns)
    sought = [name for name in names if name in wanted and name not in csv.types]
    cells = {name: _Cells(floats=floats) for name in sought}
    for file in files if sought else []:
        own = set(schema_of(file, "csv", csv).names)
        if missing := [name for name in sought if name not in own]:
            raise SourceError(
                f"{file}: has no column {missing[0]!r}, as other files have; {suggestion(missing[0], own)}"
            )
        row = 2  # as spreadsheets count
        for batch in batches_of(file, "csv", csv, columns=sought, types=dict.fromkeys(sought, pa.string())):
            for name, texts, values in zip(sought, batch.columns, _taken_for(batch, csv), strict=True):
                cells[name].note(texts.combine_chunks(), values, partial(_cell, file, name, row))
            row += batch.num_rows
    types = {name: _arrow_type(name, kind) for name, kind in csv.types.items()}
    for name, each in cells.items():
        try:
            types[name] = each.type(name)
        except SourceError as fault:
            if problems is None:
                raise
            problems[name], types[name] = str(fault), pa.string()
    return pa.schema([(name, types.get(name, pa.null())) for name in names])


def _cell(file: SourceFile, name: str, first: int, row: int) -> str:
    return f"{file}, row {first + row}: {name!r}"


def _taken_for(texts: Any, form: CsvForm) -> list[Any]:
    """Return the columns of a table of texts as pyarrow takes them in CSV."""
    import pyarrow as pa
    from pyarrow import csv

    sink = pa.BufferOutputStream()
    csv.write_csv(texts, sink)
    found = csv.read_csv(
        pa.BufferReader(sink.getvalue()),
        read_options=csv.ReadOptions(use_threads=False),
        parse_options=csv.ParseOptions(newlines_in_values=True),
        convert_options=_converting(form, {}, ()),
    )
    return [column.combine_chunks() for column in found.columns]


def _converting(form: CsvForm, types: Mapping[str, Any], columns: Sequence[str]) -> Any:
    from pyarrow import csv

    return csv.ConvertOptions(
        null_values=[""],
        strings_can_be_null=False,
        decimal_point=form.decimal,
        column_types={name: _arrow_type(name, kind) for name, kind in types.items()},
        include_columns=list(columns),
    )


def _delimiter(file: SourceFile, form: CsvForm) -> str:
    return form.delimiter or ("\t" if file.name.lower().endswith(".tsv") else ",")


@contextmanager
def _csv(
    file: SourceFile, opened: IO[bytes], form: CsvForm, *, types: Mapping[str, Any], columns: Sequence[str]
) -> Iterator[Any]:
    """Yield a reader of a CSV file, `pyarrow.csv.CSVStreamingReader`."""
    import pyarrow as pa
    from pyarrow import csv

    try:
        yield csv.open_csv(
            opened,
            # Threads would not count the rows.
            read_options=csv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK_BYTES),
            parse_options=csv.ParseOptions(delimiter=_delimiter(file, form), newlines_in_values=True),
            convert_options=_converting(form, types, columns),
        )
    except pa.ArrowInvalid as fault:
        raise _csv_refused(file, form, str(fault)) from fault
    except (pa.ArrowException, UnicodeDecodeError) as fault:
        raise SourceError(f"{file}: cannot be read as CSV: {_first_line(fault)}; save it as UTF-8 CSV") from fault


def _header(file: SourceFile, opened: IO[bytes], form: CsvForm) -> list[str]:
    """Return the names of the columns of a CSV file."""
    begin = opened.read(_CSV_BLOCK_BYTES)
    opened.seek(0)
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise SourceError(f"{file}: is UTF-16; save it as UTF-8 CSV")
    line = re.split(r"[\r\n]", begin.decode("utf-8-sig", "replace").lstrip("\r\n"), maxsplit=1)[0]
    others = [mark for mark in _DELIMITERS if mark in line]
    if form.delimiter is None and others and _delimiter(file, form) not in others:
        raise SourceError(
            f"{file}, row 1: {_first_line(line)!r} is one name; set data.options.delimiter: {json.dumps(others[0])} if "
            'it separates columns, or "," if this is the only one'
        )
    with _csv(file, opened, form, types={}, columns=()) as reader:
        fields = list(reader.schema)
    names = dict[str, int]()
    for number, each in enumerate(fields, 1):
        try:
            name = each.name
        except UnicodeDecodeError as fault:
            raise SourceError(
                f"{file}, row 1: the name of column {number} is {fault.object!r}, no UTF-8; save it as UTF-8 CSV"
            ) from fault
        if name in names:
            raise SourceError(f"{file}, row 1: the column {name!r} occurs twice; rename one")
        if _is_number(name):
            raise SourceError(
                f"{file}, row 1: {name!r} is a number, but a header is expected; add a first row with column names"
            )
        names[name] = number
    return list(names)


def likely_form(file: SourceFile) -> CsvForm:
    """Return how a CSV file is written, as its first rows look.

    Raises:
        SourceError: it cannot be read.
    """
    import pyarrow as pa

    def kinds(form: CsvForm) -> list[Any]:
        try:
            with file.open() as opened, _csv(file, opened, form, types={}, columns=()) as reader:
                return list(reader.schema.types)
        except SourceError:  # the source says what is wrong
            return []

    plain = kinds(CsvForm())
    form = max((CsvForm(delimiter=mark) for mark in _DELIMITERS), key=lambda each: len(kinds(each)))
    if len(plain) > 1 or len(kinds(form)) <= 1:
        return CsvForm()
    with_comma = replace(form, decimal=",")
    of_texts = zip(kinds(form), kinds(with_comma), strict=True)
    return (
        with_comma if any(pa.types.is_string(one) and pa.types.is_floating(other) for one, other in of_texts) else form
    )


def _arrow_type(column: str, kind: Any) -> Any:
    import pyarrow as pa

    if not isinstance(kind, str):
        return kind
    try:
        return pa.string() if kind == "text" else pa.type_for_alias(kind)
    except ValueError as fault:
        raise RunFileError(
            f"data.options.types.{column}: {kind!r}: is no type; write text, bool, int64, float32 or the like"
        ) from fault


def _csv_refused(file: SourceFile, form: CsvForm, why: str) -> SourceError:
    if found := _CSV_VALUE.match(why):
        column, row, kind, value = found.groups()
        header = schema_of(file, "csv", form).names
        name = header[int(column)] if int(column) < len(header) else f"column {column}"
        remedy = "correct it, or give the column another type, as data.options.types says"
        if "UTF8" in why or "\ufffd" in value:
            remedy = "save the file as UTF-8 CSV"
        kind = {"double": "a number", "float": "a number", "int64": "an integer"}.get(kind, f"of type {kind}")
        return SourceError(f"{file}, row {row}: {name!r} is {_first_line(value)}, which is not {kind}; {remedy}")
    if found := _CSV_CELLS.match(why):
        row, expected, cells = found.groups()
        return SourceError(f"{file}, row {row}: has {cells} cells, but the header has {expected}; correct the row")
    if "Empty CSV file" in why:
        return SourceError(f"{file}: is empty; it needs a header and rows")
    return SourceError(f"{file}: {_first_line(why)}; save it as UTF-8 CSV")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


@contextmanager
def _errors_of(file: SourceFile, form: Form) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, DamagedFooter, _DamagedMessage) as fault:
        raise SourceError(_unreadable(file, form, fault)) from fault
    except OSError as fault:
        if fault.errno is not None:  # of the disk
            raise
        raise SourceError(_unreadable(file, form, fault)) from fault


def _unreadable(file: SourceFile, form: Form, fault: Exception) -> str:
    return f"{file}: cannot be read as {_NAMES[form]}: {_first_line(fault)}; write the file again, or leave it out"


def _first_line(fault: object) -> str:
    return str(fault).partition("\n")[0][:200]
