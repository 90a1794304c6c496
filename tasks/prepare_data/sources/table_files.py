"""The files of a table: Parquet, Arrow (Feather; files and streams) and CSV.

Their schemas are read from footers and headers, without reading a row. Parquet and Arrow files are divided into ranges
of whole row groups or record batches, which can be read where they are. Arrow files are divided by their messages: a
record batch says how many rows and bytes it has (https://arrow.apache.org/docs/format/Columnar.html), so that the index
costs one small read for each. CSV has no such parts. All three are read row by row for a copy.
"""

import io
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from csv import reader as rows_of_text
from dataclasses import dataclass, field
from typing import IO, Any, Literal

from tasks.foundation.contracts.dataset import RangeLayout
from tasks.foundation.errors import RunFileError, SourceError
from tasks.prepare_data.sources.source import Range
from tasks.prepare_data.sources.source_files import SourceFile
from tasks.prepare_data.sources.verified_reads import BlockStream
from tasks.prepare_data.writing import disk_errors, scratch_file, scratch_folder

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
# Positions in the tables of an Arrow message, and the kinds of messages.
_KIND, _HEADER, _BODY_BYTES, _ROWS = 1, 2, 3, 0
_DICTIONARY, _RECORDS = 2, 3
_CONTINUES = 0xFFFFFFFF
_CSV_VALUE = re.compile(
    r"In CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error to ([^:]+): (?:invalid value )?(.*)", re.DOTALL
)
_CSV_CELLS = re.compile(r"CSV parse error: (?:Row #(\d+): )?Expected (\d+) columns, got (\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvForm:
    """How CSV files are written; `types` are those of columns that are not found in the first rows."""

    delimiter: str | None = None  # None: a comma, or in .tsv files a tab
    types: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Part:
    """A row group or record batch: its number, its bytes from `begin` to `end`, its rows."""

    number: int
    begin: int
    end: int
    rows: int


def form_of(file: SourceFile) -> Form:
    """Return the format of a file, by its name, or by its first bytes.

    Raises:
        SourceError: it is of none of the formats.
    """
    for suffix, form in SUFFIXES.items():
        if file.name.endswith(suffix):
            return form
    with file.open() as opened:
        begin = opened.read(len(_ARROW))
        if begin.startswith(_PARQUET):
            return "parquet"
        if begin == _ARROW or begin.startswith(struct.pack("<I", _CONTINUES)):
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
    """Yield a file's `pyarrow.Schema`; of CSV as its first rows have it.

    Refuse columns within the context, which then finds out whether the schema was damaged in transit.

    Raises:
        SourceError: the file is damaged, or of another format, or has no usable header.
    """
    with file.open() as opened:
        if form == "csv":
            begin = opened.read(_CSV_BLOCK_BYTES)
            opened.seek(0)
            with _csv(file, opened, csv, begin=begin, types=csv.types, columns=()) as reader:
                schema = reader.schema
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
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                statistics = chunk.statistics
                if statistics is None or not statistics.has_null_count:
                    unknown.add(chunk.path_in_schema)
                else:
                    nulls[chunk.path_in_schema] = nulls.get(chunk.path_in_schema, 0) + statistics.null_count
    return rows, {name: count for name, count in nulls.items() if name not in unknown}


def batches_of(
    file: SourceFile, form: Form, csv: CsvForm, *, columns: Sequence[str], types: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield the rows of a file in order, as `pyarrow.Table`s of a few MiB.

    Args:
        file: the file.
        form: its format.
        csv: how it is written, if it is CSV.
        columns: what is read of it.
        types: of CSV: the Arrow types of the columns.

    Raises:
        SourceError: the file is damaged, or a cell is not of its column's type.
    """
    import pyarrow as pa

    if form == "csv":
        with file.reading() as blocks:
            stream = io.BufferedReader(BlockStream(blocks), _CSV_BLOCK_BYTES)
            with _csv(file, stream, csv, begin=stream.peek(), types=types, columns=columns) as reader:
                for batch in reader:
                    yield pa.Table.from_batches([batch])
        return
    with _whole(file) as opened, _errors_of(file, form):
        if form == "parquet":
            from pyarrow import parquet

            found = parquet.ParquetFile(opened)
            groups = [found.metadata.row_group(number) for number in range(found.num_row_groups)]
            row_bytes = max((each.total_byte_size // max(1, each.num_rows) for each in groups), default=1)
            rows = max(1, _BATCH_BYTES // max(1, row_bytes))
            batches: Iterator[Any] = found.iter_batches(batch_size=rows, columns=list(columns))
        else:
            batches = _record_batches_of(_arrow(file, opened))
        for batch in batches:
            batch.validate(full=True)
            yield pa.Table.from_batches([batch])


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


def _record_batches_of(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "read_next_batch"):
        return iter(reader)
    return (reader.get_batch(number) for number in range(reader.num_record_batches))


def first_rows(file: SourceFile, form: Form, column: str) -> Any | None:
    """Return a column of the first row group or record batch of a file, as a `pyarrow.Table`; None if it has no row."""
    import pyarrow as pa
    from pyarrow import parquet

    with file.open() as opened, _errors_of(file, form):
        if form == "arrow":
            batches = _record_batches_of(_arrow(file, opened))
            first = next((batch for batch in batches if batch.num_rows), None)
            if first is not None:
                first.validate(full=True)  # offsets outside of their buffers would be read
            return None if first is None else pa.Table.from_batches([first])
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
) -> list[Range]:
    """Return the ranges of a Parquet or Arrow file, whose checksums are not known yet.

    Args:
        file: the file.
        form: its format.
        columns: what is read of it, and whether nulls of the column are filled.
        partition: what the names of its folders say.
        most_records: rows of a range, unless a row group has more; None: about 32 MiB.

    Raises:
        SourceError: the file is damaged; or a footer says that a column has nulls, which are not filled.
    """
    with file.open() as opened, _errors_of(file, form):
        size = opened.seek(0, 2)
        if form == "parquet":
            begin, end, parts = _row_groups(file, opened, size, columns)
        else:
            begin, end, parts = _record_batches(file, opened, size)
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
        for group in _grouped(parts, most_records)
    ]


def _grouped(parts: Iterable[_Part], most_records: int | None) -> Iterator[list[_Part]]:
    group: list[_Part] = []
    for part in parts:
        if not part.rows:
            continue
        rows = sum(each.rows for each in group) + part.rows
        full = (
            part.end - group[0].begin > _RANGE_BYTES if group and most_records is None else rows > (most_records or 0)
        )
        if group and full:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _row_groups(
    file: SourceFile, opened: IO[bytes], size: int, columns: Mapping[str, bool]
) -> tuple[int, int, list[_Part]]:
    """Return where the footer begins and ends, and the row groups."""
    from pyarrow import parquet

    found = parquet.ParquetFile(opened)
    metadata = found.metadata
    opened.seek(size - 8)
    footer = size - 8 - int.from_bytes(opened.read(4), "little")
    chosen = [
        index
        for index in range(metadata.num_columns)
        if any(_is_of(metadata.schema.column(index).path, column) for column in columns)
    ]
    parts: list[_Part] = []
    row = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(index) for index in chosen]
        for chunk in chunks:
            if columns.get(chunk.path_in_schema) is False:
                _require_no_nulls(file, found, number, chunk, row)
        # Pages of the chosen columns, and of those between them.
        begin = min((_first_byte(chunk) for chunk in chunks), default=len(_PARQUET))
        end = max((_first_byte(chunk) + chunk.total_compressed_size for chunk in chunks), default=len(_PARQUET))
        if not len(_PARQUET) <= begin <= end <= footer:
            raise SourceError(f"{file}: row group {number} lies outside of the file; write the file again")
        parts.append(_Part(number, begin, end, group.num_rows))
        row += group.num_rows
    return footer, size, parts


def _first_byte(chunk: Any) -> int:
    offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
    return int(min(offset for offset in offsets if offset))


def _is_of(path: str, column: str) -> bool:
    """Whether a Parquet column is the one with this name, or within it, as the items of a list are."""
    return path == column or path.startswith(f"{column}.")


def _require_no_nulls(file: SourceFile, found: Any, number: int, chunk: Any, first_row: int) -> None:
    """Refuse nulls that the footer tells; all others are found when the values are read."""
    from pyarrow import compute

    name, statistics = chunk.path_in_schema, chunk.statistics
    if statistics is None or not statistics.has_null_count or not statistics.null_count:
        return
    column = found.read_row_group(number, columns=[name]).column(0).combine_chunks()
    if fields := name.split(".")[1:] if column.type.num_fields else ():
        column = compute.struct_field(column, fields)
    row = first_row + compute.index(column.is_null(), value=True).as_py()
    raise SourceError(
        f"{file}, row {row}: the column {name!r} is null, as {statistics.null_count - 1} more in this row group are; "
        f"set data.options.fill: {{{name}: a value}}, or remove these rows"
    )


def _record_batches(file: SourceFile, opened: IO[bytes], size: int) -> tuple[int, int, list[_Part]]:
    """Return where the schema begins and the dictionaries end, and the record batches."""
    opened.seek(0)
    begin = at = len(_ARROW) if opened.read(len(_ARROW)) == _ARROW else 0
    parts: list[_Part] = []
    while True:
        opened.seek(at)
        prefix = opened.read(8)
        continues, metadata_bytes = struct.unpack("<Ii", prefix.ljust(8, b"\0"))
        if len(prefix) < 8 or continues != _CONTINUES or metadata_bytes <= 0:  # noqa: PLR2004 - of two numbers
            if not prefix or (continues == _CONTINUES and metadata_bytes == 0):
                break
            raise SourceError(f"{file}: has no Arrow message at byte {at}; write the file again")
        kind, body_bytes, rows = _message(opened.read(metadata_bytes))
        end = at + 8 + metadata_bytes + body_bytes
        if body_bytes < 0 or rows < 0 or end > size:
            raise SourceError(f"{file}: ends within the message at byte {at}; write the file again")
        if kind == _RECORDS:
            parts.append(_Part(len(parts), at, end, rows))
        elif kind == _DICTIONARY and parts:
            raise SourceError(
                f"{file}: has another dictionary after its first rows, at byte {at}; set data.options.copy: true, or "
                "write the file again with table.unify_dictionaries()"
            )
        at = end
    return begin, parts[0].begin if parts else at, parts


def _message(metadata: bytes) -> tuple[int, int, int]:
    """Return the kind of an Arrow message, the bytes of its body, and the rows of a record batch."""

    def field_of(table: int, number: int) -> int:
        fields = table - struct.unpack_from("<i", metadata, table)[0]
        (size,) = struct.unpack_from("<H", metadata, fields)
        offset = struct.unpack_from("<H", metadata, fields + 4 + 2 * number)[0] if 4 + 2 * number < size else 0
        return table + offset if offset else 0

    try:
        (root,) = struct.unpack_from("<I", metadata, 0)
        places = [field_of(root, number) for number in (_KIND, _HEADER, _BODY_BYTES)]
        kind = metadata[places[0]] if places[0] else 0
        body_bytes = struct.unpack_from("<q", metadata, places[2])[0] if places[2] else 0
        rows = 0
        if kind == _RECORDS:
            header = places[1] + struct.unpack_from("<I", metadata, places[1])[0]
            at = field_of(header, _ROWS)
            rows = struct.unpack_from("<q", metadata, at)[0] if at else 0
    except (struct.error, IndexError) as fault:
        raise _DamagedMessage(str(fault)) from fault
    return kind, body_bytes, rows


class _DamagedMessage(ValueError):
    """An Arrow message that is none."""


def _arrow(file: SourceFile, opened: IO[bytes]) -> Any:
    """Return a reader of an Arrow file or stream."""
    from pyarrow import ipc

    begin = opened.read(len(_ARROW))
    opened.seek(0)
    if begin.startswith(_FEATHER_1):
        raise SourceError(f"{file}: is Feather version 1; write it again with pyarrow.feather.write_feather")
    return ipc.open_file(opened) if begin == _ARROW else ipc.open_stream(opened)


@contextmanager
def _csv(
    file: SourceFile,
    opened: IO[bytes],
    form: CsvForm,
    *,
    begin: bytes,
    types: Mapping[str, Any],
    columns: Sequence[str],
) -> Iterator[Any]:
    """Yield a reader of a CSV file, `pyarrow.csv.CSVStreamingReader`; `begin` is its first block."""
    import pyarrow as pa
    from pyarrow import csv

    delimiter = form.delimiter or ("\t" if file.name.endswith(".tsv") else ",")
    parsing = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    # Threads would not count the rows.
    reading = csv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK_BYTES)
    converting = csv.ConvertOptions(
        null_values=[""],
        strings_can_be_null=False,
        column_types={name: _arrow_type(name, kind) for name, kind in types.items()},
        include_columns=list(columns),
    )
    text = begin.decode("utf-8-sig", "replace").lstrip("\r\n")
    header = next(rows_of_text(io.StringIO(text), delimiter=delimiter), [])
    _require_header(file, header)
    try:
        yield csv.open_csv(opened, read_options=reading, parse_options=parsing, convert_options=converting)
    except pa.ArrowInvalid as fault:
        raise _csv_refused(file, header, str(fault)) from fault
    except pa.ArrowException as fault:
        raise SourceError(f"{file}: cannot be read as CSV: {_first_line(fault)}; save it as UTF-8 CSV") from fault


def _require_header(file: SourceFile, header: Sequence[str]) -> None:
    if not header:
        raise SourceError(f"{file}: is empty; it needs a header and rows")
    for name, count in Counter(header).items():
        if count > 1:
            raise SourceError(f"{file}, row 1: the column {name!r} occurs twice; rename one")
        if _is_number(name):
            raise SourceError(
                f"{file}, row 1: {name!r} is a number, but a header is expected; add a first row with column names"
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


def _csv_refused(file: SourceFile, header: Sequence[str], why: str) -> SourceError:
    if found := _CSV_VALUE.match(why):
        column, row, kind, value = found.groups()
        name = header[int(column)] if int(column) < len(header) else f"column {column}"
        remedy = "correct it, or give the column another type, as data.options.types says"
        if "UTF8" in why or "\ufffd" in value:
            remedy = "save the file as UTF-8 CSV"
        kind = {"double": "a number", "float": "a number", "int64": "an integer"}.get(kind, f"of type {kind}")
        return SourceError(f"{file}, row {row}: {name!r} is {_first_line(value)}, which is not {kind}; {remedy}")
    if found := _CSV_CELLS.match(why):
        row, expected, cells = found.groups()
        return SourceError(f"{file}, row {row}: has {cells} cells, but the header has {expected}; correct the row")
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
    except (pa.ArrowException, UnicodeDecodeError, _DamagedMessage) as fault:
        raise SourceError(_unreadable(file, form, fault)) from fault
    except OSError as fault:
        if fault.errno is not None:  # of the disk
            raise
        raise SourceError(_unreadable(file, form, fault)) from fault


def _unreadable(file: SourceFile, form: Form, fault: Exception) -> str:
    return f"{file}: cannot be read as {_NAMES[form]}: {_first_line(fault)}; write the file again, or leave it out"


def _first_line(fault: object) -> str:
    return str(fault).partition("\n")[0][:200]
