"""The source `table`: rows of Parquet, Arrow and CSV files, whose columns become x, y and weights.

Schemas and footers say what the columns are, so that a wrong name, a type without an array or a null is refused before
a row is read. Parquet and Arrow files stay where they are: the dataset consists of ranges of them. CSV files are
copied, and so are sequences that `data.pad` or `data.pack` brings to one length.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import numpy as np
from pydantic import Field

from baton.tasks.foundation.contracts.dataset import CLASSES, Feature
from baton.tasks.foundation.dataset.columns import column_of, table_arrays
from baton.tasks.foundation.dataset.features import STRING, Array
from baton.tasks.foundation.errors import DamagedDataset, RunFileError, SourceError
from baton.tasks.foundation.storage.transfers import parallel_map
from baton.tasks.prepare_data.sources.column_ranges import ranges_in_place
from baton.tasks.prepare_data.sources.column_types import (
    ColumnType,
    Fill,
    KnownColumn,
    column_type,
    find_field,
    require_fill,
    stacked_type,
)
from baton.tasks.prepare_data.sources.image_folders import ImageSize, decode_image_file
from baton.tasks.prepare_data.sources.returned_arrays import FLOATX, floatx
from baton.tasks.prepare_data.sources.source import (
    LocatedExample,
    Options,
    Range,
    Row,
    Source,
    parse_options,
    suggestion,
)
from baton.tasks.prepare_data.sources.source_files import (
    SourceFile,
    find_files,
    fingerprint,
    fingerprint_by_stamps,
    left_out,
    require_unchanged,
)
from baton.tasks.prepare_data.sources.table_files import (
    SUFFIXES,
    CsvForm,
    Form,
    batches_of,
    csv_schema,
    decoded_bytes,
    first_rows,
    form_of,
    planned_ranges,
    reading_schema,
    require_bound,
)

_Side = Annotated[int, Field(ge=1, le=2**14)]
_Columns = str | list[str] | dict[str, str | list[str]] | None
_INDEX = re.compile(r"__index_level_\d+__")
_PARTITION = re.compile(r"([^=/]+)=([^/]*)")
_NULL = "__HIVE_DEFAULT_PARTITION__"
_MOST_TEXTS = 65_536
_PACKED = tuple(suffix + packed for suffix in SUFFIXES for packed in (".gz", ".bz2", ".xz", ".zip", ".zst"))
# Files whose footers are read at once.
_WORKERS = 8


class TableOptions(Options):
    """`data.options` of `table`."""

    path: str = Field(
        min_length=1,
        description="a Parquet, Arrow, Feather or CSV file, a folder or a pattern such as data/*.parquet, also on "
        "gs://; folders such as year=2026 are a column",
    )
    x: _Columns = Field(
        default=None,
        description="the columns for x: a name, a list of names or {input: name}; by default all that are not y or "
        "weight; a list is a dict of inputs, or with stack: true one array; image.bytes is a field of a struct",
    )
    y: _Columns = Field(default=None, description="the column for y, or several, as for x")
    weight: str | None = Field(default=None, min_length=1, description="the column with the weights of the examples")
    stack: bool = Field(default=False, description="true makes one array of a list of columns of numbers")
    fill: Fill | dict[str, Fill] | None = Field(
        default=None, description="what stands in place of nulls: a value, or {column: value}; they are refused without"
    )
    vocabulary: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="{column: [texts]}; the position of a text is its value, as of classes in y; dictionary columns "
        "have one of their own",
    )
    shapes: dict[str, list[_Side]] = Field(
        default_factory=dict, description="{column: [n]}, the one shape of lists that are stored as lists of any length"
    )
    size: ImageSize = Field(
        default_factory=list,
        description="[height, width] of the examples of columns with JPEG or PNG files, or one integer for both",
    )
    channels: Literal[1, 3] = Field(default=3, description="3 for color images, 1 for grey")
    types: dict[str, str] = Field(
        default_factory=dict,
        description="of CSV: {column: type} where the cells do not tell, as text, int64 or float32",
    )
    delimiter: str | None = Field(
        default=None,
        min_length=1,
        max_length=1,
        description="of CSV: one character; left out: a comma, or in .tsv a tab",
    )
    decimal: Literal[".", ","] = Field(default=".", description="of CSV: what separates the decimals of numbers")
    decoded_bytes: int | None = Field(
        default=None,
        ge=1,
        description="the most memory of a row group or record batch; by default 128 MiB, or 100 times its bytes there",
    )
    copy_: bool = Field(
        default=False, alias="copy", description="true copies the examples into shards, in shuffled order"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TablePlan:
    """What is read of the files."""

    chosen: TableOptions
    form: Form
    csv: CsvForm
    schema: Any  # of the first file
    types: Mapping[str, ColumnType]  # of each column that is read
    features: tuple[Feature, ...] = ()  # in the order of the flattened example
    sequences: frozenset[str] = frozenset()  # the features that are lists of any length
    partitions: Mapping[str, Sequence[str | None]] = field(default_factory=dict)  # see `partitions_of`

    @property
    def types_in_csv(self) -> dict[str, Any]:
        """The Arrow types of columns of CSV; one without any value has numbers."""
        import pyarrow as pa

        if self.form != "csv":
            return {}
        return {each.name: pa.float64() if pa.types.is_null(each.type) else each.type for each in self.schema}

    @property
    def columns(self) -> dict[str, bool]:
        """The columns of the files, and whether their nulls are filled."""
        return {
            column: feature.fill is not None
            for feature in self.features
            for column in feature.stacked or (feature.record_key,)
            if find_field(self.schema, column) is not None
        }


def table(options: Mapping[str, Any], folder: Path, *, sequences: bool) -> Source:
    """Open a source of the rows of tables, see `table_source`.

    Args:
        options: `data.options`, see `TableOptions`.
        sequences: lists of any length are allowed; `data.pad` or `data.pack` is set.
    """
    chosen = parse_options(TableOptions, options, source="table")
    tables, others = _find_tables(chosen.path, folder)
    source = table_source(tables, chosen, sequences=sequences)
    return replace(source, left_out=left_out(chosen.path, others))


def _find_tables(path: str, folder: Path) -> tuple[list[SourceFile], list[SourceFile]]:
    """Return the tables at a path, see `find_files`, and the other files; of a folder, tables are named as tables are.

    Raises:
        SourceError: there are none.
    """
    files = find_files(path, folder)
    found = [file for file in files if not any(part.startswith((".", "_")) for part in file.relative.split("/"))]
    tables = [file for file in found if file.name.lower().endswith(tuple(SUFFIXES))]
    packed = [file for file in found if file.name.lower().endswith(_PACKED)]
    if packed and (tables or len(found) > 1):
        raise SourceError(
            f"{packed[0]}: is compressed, and tables are read as they are; unpack it, or name the other files, as *.csv"
        )
    if not found or (len(found) > 1 and not tables):
        raise SourceError(f"data.options.path: {path!r}: no files ending in {', '.join(SUFFIXES)}; name such files")
    read = tables or found
    uris = {file.uri for file in read}
    return read, [file for file in files if file.uri not in uris]


def table_source(
    files: Sequence[SourceFile],
    chosen: TableOptions,
    *,
    known: Mapping[str, KnownColumn] | None = None,
    origin: Mapping[str, str] | None = None,
    sequences: bool = False,
) -> Source:
    """Open a source of the rows of tables, for x, y and weights.

    Args:
        files: of one format, with the same columns.
        chosen: the options; `path` is not used.
        known: what is known of columns besides their types, by name.
        origin: rows for the manifest's `origin`, as the names of classes.
        sequences: lists of any length are allowed; `data.pad` or `data.pack` is set.

    Raises:
        RunFileError: an option cannot be used, or names a missing column.
        SourceError: a file is damaged, or a column has a type that no array can be made of.
    """
    form = _form(files)
    given = {"delimiter": chosen.delimiter, "types": chosen.types, "decimal": chosen.decimal.strip(".")}
    for key, value in given.items():
        if value and form != "csv":
            raise RunFileError(f"data.options.{key}: {value!r}: is for CSV, and {files[0]} is not; remove it")
    with reading_schema(files[0], form, _csv_form(chosen)) as found:
        schema = found
        if form == "csv":
            named = [*all_columns(chosen.x), *all_columns(chosen.y), *all_columns(chosen.weight)]
            columns = found.names if chosen.x is None else named
            schema = csv_schema(files, _csv_form(chosen), columns=columns, floats=floatx())
        else:
            schema = _without_nulls(schema, files, form, _csv_form(chosen))
        plan = _plan(files, chosen, form=form, schema=schema, known=known or {}, sequences=sequences)
    is_copied = chosen.copy_ or sequences or plan.form == "csv"
    contents = fingerprint(files) if is_copied else fingerprint_by_stamps(files)
    has_floats = any(each.dtype == floatx() for each in plan.features)
    classes = [list(each.vocabulary) for each in plan.features if each.name == "y" and each.vocabulary]
    return Source(
        content=contents.content,
        settings=chosen.model_dump(exclude={"path", *_newer(chosen)}) | ({FLOATX: floatx()} if has_floats else {}),
        origin={**contents.origin, **({CLASSES: json.dumps(classes[0])} if classes else {}), **(origin or {})},
        length=None,
        read=lambda: require_unchanged(files, contents, _rows(files, plan)),
        vocabularies={each.name: each.vocabulary for each in plan.features if each.vocabulary},
        files=files,
        in_place=None
        if is_copied
        else ranges_in_place(
            files,
            contents,
            lambda records: _planned(files, plan, records),
            plan.features,
            inspect=partial(_inspect, plan.chosen.decoded_bytes) if plan.form == "arrow" else None,
        ),
    )


def _without_nulls(schema: Any, files: Sequence[SourceFile], form: Form, csv: CsvForm) -> Any:
    """Return the first file's schema; a column that has only nulls there has the type that another file gives it."""
    import pyarrow as pa

    for file in files[1:]:
        if not any(pa.types.is_null(each.type) for each in schema):
            break
        with reading_schema(file, form, csv) as other:
            for at, each in enumerate(schema):
                if pa.types.is_null(each.type) and other.get_field_index(each.name) >= 0:
                    schema = schema.set(at, each.with_type(other.field(each.name).type))
    return schema


def _plan(
    files: Sequence[SourceFile],
    chosen: TableOptions,
    *,
    form: Form,
    schema: Any,
    known: Mapping[str, KnownColumn],
    sequences: bool,
) -> _TablePlan:
    """Return what is read, as the first file's schema says; call it within `reading_schema`."""
    import pyarrow as pa

    partitions = partitions_of(files)
    names = dict.fromkeys([*(name for name in schema.names if not _INDEX.fullmatch(name)), *partitions])
    groups, times = _groups(chosen, list(names)), Counter(schema.names)
    image = (*chosen.size, chosen.channels) if chosen.size else ()
    types = {}
    for name, columns in groups.items():
        for column in _listed(columns):
            found = find_field(schema, column)
            if times[column] > 1:
                raise SourceError(
                    f"{files[0]}: the column {column!r} occurs twice; rename one, or leave it out of x and y"
                )
            if found is None and column not in partitions:
                raise RunFileError(
                    f"data.options.{_key(name)}: {files[0]} has no column {column!r}; "
                    f"{suggestion(column, [*schema.names, *partitions])}"
                )
            of_column = known.get(column, KnownColumn())
            if of_column.shape is None and column in chosen.shapes:
                of_column = replace(of_column, shape=tuple(chosen.shapes[column]))
            fill = chosen.fill.get(column) if isinstance(chosen.fill, Mapping) else chosen.fill
            if (
                found is not None
                and pa.types.is_null(found.type)
                and (isinstance(fill, str) or column in chosen.vocabulary)
            ):
                found = found.with_type(pa.string())
            types[column] = (
                partition_type(partitions[column])
                if found is None
                else column_type(
                    found, where=files[0], floats=floatx(), known=of_column, image=image, sequences=sequences
                )
            )
    plan = _TablePlan(
        form=form, csv=_csv_form(chosen), types=types, schema=schema, chosen=chosen, partitions=partitions
    )
    for option in ("vocabulary", "shapes"):
        for column in getattr(chosen, option):
            if column not in types:
                raise RunFileError(
                    f"data.options.{option}.{column}: the column is not read; {suggestion(column, types)}"
                )
    features = [_feature(name, columns, plan, files) for name, columns in groups.items()]
    varying = (name for name, columns in groups.items() if isinstance(columns, str) and types[columns].is_sequence)
    return replace(plan, features=tuple(features), sequences=frozenset(varying))


def _csv_form(chosen: TableOptions) -> CsvForm:
    return CsvForm(delimiter=chosen.delimiter, types=chosen.types, decimal=chosen.decimal)


def _newer(chosen: TableOptions) -> set[str]:
    """Return the options that are as if there were none: datasets of earlier revisions keep their names."""
    fields = TableOptions.model_fields
    return {name for name in ("decimal", "decoded_bytes") if getattr(chosen, name) == fields[name].default}


def _form(files: Sequence[SourceFile]) -> Form:
    forms = {form_of(file): file for file in reversed(files)}
    if len(forms) > 1:
        found = ", ".join(f"{form} ({file.name})" for form, file in forms.items())
        raise SourceError(
            f"data.options.path: it has files of several formats: {found}; name those of one, as *.parquet"
        )
    return next(iter(forms))


def _groups(chosen: TableOptions, names: Sequence[str]) -> dict[str, str | list[str]]:
    """Return the column or columns of each feature, by the feature's name."""
    used = [*all_columns(chosen.y), *([chosen.weight] if chosen.weight else [])]
    x: _Columns = [name for name in names if name not in used] if chosen.x is None else chosen.x
    if not x:
        raise RunFileError(f"data.options.x: {x!r}: it names no column; the files have {', '.join(names)}")
    if chosen.weight is not None and chosen.y is None:
        raise RunFileError(f"data.options.weight: {chosen.weight!r}: weights need labels; set data.options.y too")
    groups: dict[str, str | list[str]] = {}
    for part, columns in (("x", x), ("y", chosen.y), ("sample_weight", chosen.weight)):
        if isinstance(columns, dict):
            groups |= {f"{part}/{name}": each for name, each in columns.items()}
        elif isinstance(columns, list) and not chosen.stack:
            groups |= {f"{part}/{name}": name for name in columns}
        elif columns is not None:
            groups[part] = columns
    _require_distinct(groups)
    return groups


def _require_distinct(groups: Mapping[str, str | list[str]]) -> None:
    """Refuse a column in two features, and a feature without a column."""
    seen: dict[str, str] = {}
    for name, columns in groups.items():
        if not columns or name.endswith("/"):
            raise RunFileError(f"data.options.{_key(name)}: {columns!r}: name at least one column")
        for column in _listed(columns):
            if column in seen:
                raise RunFileError(
                    f"data.options.{_key(name)}: {column!r} is in {_key(seen[column])} too; leave it out of one"
                )
            seen[column] = name


def _listed(columns: str | list[str]) -> list[str]:
    return [columns] if isinstance(columns, str) else columns


def all_columns(columns: _Columns) -> list[str]:
    """Return all columns that an option names."""
    each = columns.values() if isinstance(columns, dict) else [columns or []]
    return list(chain.from_iterable(map(_listed, each)))


def _key(feature: str) -> str:
    """Return the key of the run file that names a feature's column."""
    part, slash, name = feature.partition("/")
    return "weight" if part == "sample_weight" else f"{part}{'.' * len(slash)}{name}"


def partitions_of(files: Sequence[SourceFile]) -> dict[str, list[str | None]]:
    """Return what the names of the files' folders say, as `year=2026` does: a text for each file; None: null.

    Raises:
        SourceError: the folders of a file do not say what those of others do.
    """
    found = [
        {part[1]: unquote(part[2]) for part in map(_PARTITION.fullmatch, file.relative.split("/")[:-1]) if part}
        for file in files
    ]
    for name in (names := list(dict.fromkeys(chain.from_iterable(found)))):
        if lacking := [file for file, each in zip(files, found, strict=True) if name not in each]:
            raise SourceError(
                f"{lacking[0]}: its folders do not say {name!r}, as those of other files do; name files of one kind in "
                "data.options.path"
            )
    return {name: [None if each[name] == _NULL else each[name] for each in found] for name in names}


def partition_type(texts: Sequence[str | None]) -> ColumnType:
    """Return what the names of folders become: integers, if all are, else text."""
    whole = all(text is None or re.fullmatch(r"-?\d{1,18}", text) for text in texts)
    return ColumnType(dtype="int64") if whole else ColumnType(dtype=STRING, encoding="text")


def _partition(at: int, files: Sequence[SourceFile], plan: _TablePlan) -> dict[str, str]:
    """Return the columns that the folders of a file alone say, as a reader takes them: nulls are filled."""
    found = {}
    for feature in plan.features:
        for name in set(feature.stacked or (feature.record_key,)) & plan.partitions.keys():
            text = plan.partitions[name][at]
            if find_field(plan.schema, name) is not None:
                _require_agreement(files[at], plan, name, text)
                continue
            if text is None:
                if feature.fill is None:
                    raise SourceError(
                        f"{files[at]}: its folder says that {name!r} is null; set data.options.fill: {{{name}: a "
                        "value}, or leave out the files of this folder"
                    )
                is_text = feature.encoding == "text" or feature.vocabulary
                text = str(feature.fill if is_text else np.asarray(feature.fill).astype(feature.dtype))
            if feature.vocabulary and text not in feature.vocabulary:
                raise SourceError(
                    f"{files[at]}: its folder says {text!r} for {name!r}, which is not in its vocabulary; set "
                    f"data.options.vocabulary: {{{name}: [all texts]}}"
                )
            found[name] = text
    return found


def _require_agreement(file: SourceFile, plan: _TablePlan, name: str, text: str | None) -> None:
    """Refuse a file that has another value in a column than its folder says."""
    import pyarrow as pa
    from pyarrow import compute

    row, types = 2 if plan.form == "csv" else 0, plan.types_in_csv
    for rows in batches_of(file, plan.form, plan.csv, columns=[name], types=types):
        column = column_of(rows, name, str)
        if isinstance(column, pa.DictionaryArray):
            column = column.dictionary_decode()
        try:
            expected = pa.scalar(text, pa.string()).cast(column.type)
            same = column.is_null() if text is None else compute.fill_null(compute.equal(column, expected), False)
        except pa.ArrowException:  # such a text is no value of the column
            same = pa.repeat(pa.scalar(False), len(column))
        if (at := compute.index(same, value=False).as_py()) >= 0:
            raise SourceError(
                f"{file}, row {row + at}: the column {name!r} has {column[at].as_py()!r}, but the folder says "
                f"{text or _NULL!r}; rename the folder, or write the file again"
            )
        row += len(column)


def _feature(name: str, columns: str | list[str], plan: _TablePlan, files: Sequence[SourceFile]) -> Feature:
    """Return a feature, with its vocabulary and what fills its nulls."""
    types = {column: plan.types[column] for column in _listed(columns)}
    first = next(iter(types))
    if isinstance(columns, list):
        kind, vocabulary = stacked_type(types, key=_key(name), floats=floatx()), []
    else:
        kind, vocabulary = types[columns], plan.chosen.vocabulary.get(columns, [])
        if kind.is_dictionary and not vocabulary:
            vocabulary = _dictionary(columns, plan, files)
        if vocabulary and (kind.encoding != "text" or kind.shape or kind.is_sequence):
            raise RunFileError(f"data.options.vocabulary.{first}: the column is {kind}, and only text has a vocabulary")
        if len(set(vocabulary)) < len(vocabulary):
            raise RunFileError(f"data.options.vocabulary.{first}: {vocabulary!r}: a text is in it twice; remove one")
    if name == "sample_weight":
        if kind.encoding != "array" or kind.shape or kind.is_sequence:
            raise RunFileError(f"data.options.weight: {columns!r} is {kind}; weights are one number for each example")
        kind = replace(kind, dtype=floatx())
    fills = {column: _fill_of(column, plan.chosen.fill, kind, vocabulary) for column in types}
    if len(set(fills.values())) > 1:
        raise RunFileError(
            f"data.options.fill: {plan.chosen.fill!r}: stacked columns have one value for nulls; give all columns of "
            f"{_key(name)} the same"
        )
    return kind.feature(name, columns, vocabulary=vocabulary, fill=fills[first])


def _fill_of(
    column: str, fill: Fill | Mapping[str, Fill] | None, kind: ColumnType, vocabulary: Sequence[str]
) -> Fill | None:
    """Return what fills a column's nulls. One value for all columns fills those that it fits."""
    if isinstance(fill, Mapping):
        if column in fill:
            require_fill(column, fill[column], kind, vocabulary)
        return fill.get(column)
    if fill is None or kind.encoding == "image" or (kind.encoding == "text") != isinstance(fill, str):
        return None
    require_fill(column, fill, kind, vocabulary)
    return fill


def _dictionary(column: str, plan: _TablePlan, files: Sequence[SourceFile]) -> list[str]:
    """Return the vocabulary of a dictionary column, as the first rows have it. Other rows must keep to it."""
    import pyarrow as pa

    for file in files:
        rows = first_rows(file, plan.form, column)
        found = None if rows is None else column_of(rows, column, str)
        if isinstance(found, pa.DictionaryArray):
            texts = [str(text) for text in found.dictionary.to_pylist() if text is not None]
            if len(texts) > _MOST_TEXTS:
                raise SourceError(
                    f"{file}: the column {column!r} is {found.type} with {len(texts):,} values, and a vocabulary has "
                    f"at most {_MOST_TEXTS:,}; write it as text or as numbers"
                )
            return texts
    raise SourceError(
        f"{files[0]}: the column {column!r} has no rows with a vocabulary; set data.options.vocabulary: "
        f"{{{column}: [texts]}}"
    )


def _require_same(file: SourceFile, plan: _TablePlan) -> None:
    """Refuse a file whose columns have other types than the first file's; nulls alone have any type."""
    import pyarrow as pa

    with reading_schema(file, plan.form, plan.csv) as schema:
        for column in plan.columns:
            field, first = find_field(schema, column), find_field(plan.schema, column)
            if field is None or first is None:
                raise SourceError(
                    f"{file}: has no column {column!r}, as other files have; {suggestion(column, schema.names)}"
                )
            if field.type != first.type and not pa.types.is_null(field.type) and plan.form != "csv":
                raise SourceError(
                    f"{file}: the column {column!r} is {field.type}, but {first.type} in other files; "
                    "write them with one type"
                )


def _planned(files: Sequence[SourceFile], plan: _TablePlan, most_records: int | None) -> list[Range]:
    """Return the ranges of all files, once their footers are read."""

    def of_file(at: int) -> list[Range]:
        if at:
            _require_same(files[at], plan)
        partition = _partition(at, files, plan)
        return planned_ranges(
            files[at],
            plan.form,
            plan.columns,
            partition=partition,
            most_records=most_records,
            most_bytes=plan.chosen.decoded_bytes,
        )

    found = list(chain.from_iterable(parallel_map(of_file, range(len(files)), workers=_WORKERS)))
    if not found:
        raise SourceError(f"{files[0]}: no file has a row; name files with rows")
    return found


def _inspect(most_bytes: int | None, planned: Range, head: bytes, body: bytes) -> None:
    where = f"{planned.path}, from byte {planned.begin} on"
    try:
        decoded = decoded_bytes(head, body)
    except ValueError as fault:
        raise SourceError(
            f"{where}: cannot be read as Arrow: {fault}; write the file again, or leave it out"
        ) from fault
    require_bound(decoded, len(head) + len(body), most_bytes, where)


def _rows(files: Sequence[SourceFile], plan: _TablePlan) -> Iterator[LocatedExample]:
    """Yield the rows of all files, to be copied."""
    plain = [each for each in plan.features if each.name not in plan.sequences]
    for at, file in enumerate(files):
        if at:
            _require_same(file, plan)
        partition = _partition(at, files, plan)
        # As spreadsheets count, the header of CSV is row 1.
        first = 2 if plan.form == "csv" else 0
        for rows in batches_of(
            file,
            plan.form,
            plan.csv,
            columns=list(plan.columns),
            types=plan.types_in_csv,
            most_bytes=plan.chosen.decoded_bytes,
        ):
            where = partial(_where, file, first)
            arrays: dict[str, Array | list[Array]] = dict(_arrays(rows, plain, partition, where))
            for feature in plan.features:
                if feature.name in plan.sequences:
                    arrays[feature.name] = _lists(rows, feature, where)
            yield from _examples(arrays, plan.features, rows.num_rows, where)
            first += rows.num_rows


def _where(file: SourceFile, first: int, row: int) -> str:
    return f"{file}, row {first + row}"


def _arrays(
    rows: Any, features: Sequence[Feature], partition: Mapping[str, str], where: Callable[[int], str]
) -> dict[str, Array]:
    """Return the features of rows, [rows, *shape]."""
    try:
        return table_arrays(rows, features, partition=partition, where=where)
    except DamagedDataset as fault:
        raise SourceError(str(fault)) from fault


def _lists(rows: Any, feature: Feature, where: Callable[[int], str]) -> list[Array]:
    """Return the lists of a column, one array [items, *shape] for each row."""
    import pyarrow as pa
    from pyarrow import compute

    column = column_of(rows, feature.record_key, where)
    if column.null_count:
        row = compute.index(column.is_null(), value=True).as_py()
        raise SourceError(
            f"{where(row)}: column {feature.record_key!r} is null; write an empty list, or remove the row"
        )
    ends = np.cumsum(compute.list_value_length(column).to_numpy(zero_copy_only=False))
    items = pa.table({feature.record_key: column.flatten()})
    if not len(items):
        return [np.zeros((0, *feature.shape), object if feature.encoding == "text" else feature.dtype)] * len(ends)
    values = _arrays(items, [feature], {}, lambda item: where(int(np.searchsorted(ends, item, side="right"))))
    return np.split(values[feature.name], ends[:-1])


def _examples(
    arrays: Mapping[str, Array | list[Array]], features: Sequence[Feature], rows: int, where: Callable[[int], str]
) -> Iterator[LocatedExample]:
    for row in range(rows):
        example: dict[str, Array] = {}
        for feature in features:
            values: Any = arrays[feature.name]
            example[feature.name] = values[row] if isinstance(values, list) else values[row, ...]
            if feature.encoding == "image":
                try:
                    example[feature.name] = decode_image_file(values[row], feature.shape, feature.dtype)
                except ValueError as fault:
                    raise SourceError(
                        f"{where(row)}: column {feature.record_key!r} {fault}; save it as JPEG or PNG, or remove it"
                    ) from fault
        yield where(row), Row(example)
