"""Looks at the columns of Parquet, Arrow and CSV files: their types, their nulls, and which options they need.

Footers say how many rows and nulls Parquet files have. The rest is seen in the first rows: texts that are names of
categories, lists that all have one length, bytes that are images. `column_types.py` says what each column becomes, or
why it cannot be used, as it does for a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from baton.tasks.foundation.dataset.columns import is_list, plain
from baton.tasks.foundation.errors import SourceError
from baton.tasks.prepare_data.sources.column_types import ColumnType, KnownColumn, column_type
from baton.tasks.prepare_data.sources.image_folders import common_size
from baton.tasks.prepare_data.sources.source_files import SourceFile
from baton.tasks.prepare_data.sources.table import partition_type, partitions_of
from baton.tasks.prepare_data.sources.table_files import (
    CsvForm,
    Form,
    batches_of,
    csv_schema,
    footer_counts,
    form_of,
    likely_form,
    schema_of,
)

# Rows are read until one of these.
_ROWS, _BYTES = 100_000, 64 << 20
_IMAGES = 32  # are decoded to choose a size
_MOST_CATEGORIES = 100
FILLED_TEXT = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenColumn:
    """A column of a table.

    Attributes:
        name: with dots for a field of a structure, as `image.bytes`.
        type: its Arrow type.
        kind: what it becomes: an image, a number or an array of numbers, one of a few texts, or any text.
        nulls: in all rows if a footer says so, else in those that were read.
        problem: why it cannot be used; "": it can.
        texts: of a category that is stored as plain text: its vocabulary.
        shape: of lists that are stored as lists of any length, and all have one that nothing else says.
        size: (height, width, channels) of images.
        is_single: whether it is one number in each row.
    """

    name: str
    type: str
    kind: Literal["image", "number", "category", "text"] = "number"
    nulls: int = 0
    problem: str = ""
    texts: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    size: tuple[int, int, int] | None = None
    is_single: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenTable:
    """The columns of a table, the number of its rows (None: only reading tells), and options that its form needs."""

    columns: tuple[SeenColumn, ...]
    rows: int | None
    options: Mapping[str, str]


def look_at_tables(files: Sequence[SourceFile], known: Mapping[str, tuple[int, ...]] | None = None) -> SeenTable:
    """Look at the columns of tables of one format.

    Args:
        files: in order.
        known: shapes of arrays in columns, which are stored as lists.

    Raises:
        SourceError: a file is damaged.
    """
    form = form_of(files[0])
    rows, nulls = footer_counts(files) if form == "parquet" else (None, {})
    csv, problems = likely_form(files[0]) if form == "csv" else CsvForm(), dict[str, str]()
    sample = _sample(files, form, csv, problems)
    columns = [
        _seen(field, sample.column(index), files[0], (known or {}).get(field.name, ()), nulls.get(field.name))
        for index, field in enumerate(sample.schema)
        if not field.name.startswith("__index_level_")  # of pandas
    ]
    columns = [replace(each, problem=problems.get(each.name, each.problem)) for each in columns]
    columns += [_of_folders(*each) for each in partitions_of(files).items() if each[0] not in sample.schema.names]
    options = {"delimiter": csv.delimiter, "decimal": csv.decimal.strip(".")}
    return SeenTable(
        columns=tuple(columns), rows=rows, options={name: value for name, value in options.items() if value}
    )


def _of_folders(name: str, texts: Sequence[str | None]) -> SeenColumn:
    """Return the column that names of folders are; its nulls are those of files."""
    becomes, nulls = partition_type(texts), texts.count(None)
    words = sorted({text for text in texts if text is not None}) if becomes.encoding == "text" else []
    words = words + [FILLED_TEXT] * bool(nulls) if 0 < len(words) <= _MOST_CATEGORIES else []
    return SeenColumn(
        name=name,
        type=f"{becomes} of folders",
        kind=_kind(becomes, words),
        nulls=nulls,
        texts=tuple(words),
        is_single=becomes.encoding == "array",
    )


def _sample(files: Sequence[SourceFile], form: Form, csv: CsvForm, problems: dict[str, str]) -> Any:
    """Return the first rows as a `pyarrow.Table`, structures taken apart."""
    import pyarrow as pa

    schema = schema_of(files[0], form, csv)
    if form == "csv":
        schema = csv_schema(files, csv, columns=schema.names, floats="float32", problems=problems)
    tables = [schema.empty_table()]
    rows = size = 0
    for file in files:
        types = {field.name: field.type for field in schema}
        for batch in batches_of(file, form, csv, columns=schema.names, types=types):
            if batch.schema != schema:  # the source says what differs
                break
            tables.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            if rows >= _ROWS or size >= _BYTES:
                break
        if rows >= _ROWS or size >= _BYTES:
            break
    table = pa.concat_tables(tables).slice(0, _ROWS)
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return table


def _seen(field: Any, values: Any, file: SourceFile, known: tuple[int, ...], nulls: int | None) -> SeenColumn:
    import pyarrow as pa

    kind, size = field.type, None
    shape: tuple[int, ...] = ()
    values = plain(values)
    if pa.types.is_dictionary(kind) and values.num_chunks:
        nulls = values.cast(kind.value_type).null_count if nulls is None else nulls
    nulls = values.null_count if nulls is None else nulls
    if pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        size = _size_of_images(values)
    elif not known:
        shape = _one_shape(values)
    try:
        becomes = column_type(
            field,
            where=file,
            floats="float32",
            known=KnownColumn(image=size is not None, shape=known or shape or None),
            image=size or (),
            sequences=False,
        )
    except SourceError as fault:
        problem = str(fault).removeprefix(f"{file}: ").removeprefix(f"the column {field.name!r} ")
        return SeenColumn(name=field.name, type=str(kind), nulls=nulls, problem=problem)
    is_plain_text = becomes.encoding == "text" and not becomes.is_dictionary
    if is_plain_text and becomes.shape:
        return SeenColumn(name=field.name, type=str(kind), nulls=nulls, problem="has several texts in each row")
    texts = _categories(values) if is_plain_text else ()
    if becomes.is_dictionary and nulls:  # the vocabulary of its own has no text for them
        texts = tuple(text for text in values.combine_chunks().dictionary.to_pylist() if text is not None)
    return SeenColumn(
        name=field.name,
        type=str(kind),
        kind=_kind(becomes, texts),
        nulls=nulls,
        problem="it has images that are null; remove these rows" if size and nulls else "",
        texts=(*texts, FILLED_TEXT) if texts and nulls else texts,
        shape=shape,
        size=size,
        is_single=becomes.encoding == "array" and not becomes.shape,
    )


def _kind(becomes: ColumnType, texts: Sequence[str]) -> Literal["image", "number", "category", "text"]:
    if becomes.encoding == "image":
        return "image"
    if becomes.is_dictionary or texts:
        return "category"
    return "text" if becomes.encoding == "text" else "number"


def _size_of_images(values: Any) -> tuple[int, int, int] | None:
    """Return a size for the images of a column; None if its bytes are no images."""
    present = values.drop_null()
    some = [present[row].as_py() for row in range(0, len(present), max(1, len(present) // _IMAGES))]
    try:
        return common_size(some) if some else None
    except ValueError:
        return None


def _one_shape(values: Any) -> tuple[int, ...]:
    """Return the shape of all lists of a column; () if they differ, or their type says it."""
    import pyarrow as pa
    from pyarrow import compute

    found, varies = list[int](), False
    while is_list(values.type):
        varies |= not pa.types.is_fixed_size_list(values.type)
        lengths = compute.unique(compute.list_value_length(values.drop_null())).to_pylist()
        if len(lengths) != 1 or not lengths[0]:
            return ()
        found.append(lengths[0])
        values = compute.list_flatten(values)
    return tuple(found) if varies else ()


def _categories(values: Any) -> tuple[str, ...]:
    """Return the texts of a column in their order, if they are so few that they must be names of categories."""
    texts = values.drop_null().unique()
    if len(texts) > min(_MOST_CATEGORIES, len(values) // 2):
        return ()
    return tuple(sorted(texts.to_pylist()))
