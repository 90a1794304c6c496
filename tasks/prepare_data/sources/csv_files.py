"""The source `csv`: tables of numbers with a header."""

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic import Field

from tasks.foundation.errors import RunFileError, SourceError
from tasks.prepare_data.sources.source import LocatedExample, Options, Source, parse_options, suggestion
from tasks.prepare_data.sources.source_files import SourceFile, confirm_all, find_files, fingerprint, require_unchanged
from tasks.prepare_data.sources.verified_reads import BlockStream

_LARGEST_LABEL = 2**63


class CsvOptions(Options):
    """`data.options` of `csv`."""

    path: str = Field(min_length=1, description="a file, a folder or a pattern such as parts/*.csv, also on gs://")
    label: str = Field(min_length=1, description="the column for y")
    features: list[str] | None = Field(
        default=None, min_length=1, description="a list of the columns for x; by default all but the label"
    )
    delimiter: str = Field(default=",", min_length=1, max_length=1, description="one character")


def csv_files(options: Mapping[str, Any], folder: Path) -> Source:
    """Open a source of x: float32 [features]; y: int64 [] if the first label is an integer, else float32 [].

    Raises:
        RunFileError: an option cannot be used, or names a missing column.
        SourceError: there are no files, or one has no usable header.
    """
    chosen = parse_options(CsvOptions, options, source="csv")
    files = find_files(chosen.path, folder, suffix=".csv")
    with _checked_header(files[0], chosen) as header:
        features = _features(files[0], header, chosen)
    for file in files[1:]:
        with _checked_header(file, chosen) as header:
            _columns(file, header, chosen, features)
    found = fingerprint(files)
    return Source(
        content=found.content,
        settings={"label": chosen.label, "features": features, "delimiter": chosen.delimiter},
        origin=found.origin,
        length=None,
        read=lambda: require_unchanged(files, found, _read(files, chosen, features)),
        confirm=partial(confirm_all, files),
    )


def _features(file: SourceFile, header: Sequence[str], options: CsvOptions) -> list[str]:
    if options.features is not None:
        if options.label in options.features:
            raise RunFileError(
                f"data.options.features: it contains the label {options.label!r}; remove it, or choose another label"
            )
        features = options.features
    else:
        features = [name for name in header if name != options.label]
    if not features:
        raise SourceError(f"{file}, line 1: there is no column besides the label; x needs at least one")
    _columns(file, header, options, features)
    return features


@contextmanager
def _checked_header(file: SourceFile, options: CsvOptions) -> Iterator[list[str]]:
    """Yield a file's header. Check it inside the context, which detects damage in transit."""
    with file.open() as opened:
        yield _header(file, _rows(file, opened, options))


def _columns(
    file: SourceFile, header: Sequence[str], options: CsvOptions, features: Sequence[str]
) -> tuple[int, list[int]]:
    """Return the positions of the label and of the features."""
    positions = {name: position for position, name in enumerate(header)}
    for key, name in [("label", options.label), *(("features", name) for name in features)]:
        if name not in positions:
            raise RunFileError(f"data.options.{key}: {file} has no column {name!r}; {suggestion(name, header)}")
    return positions[options.label], [positions[name] for name in features]


def _header(file: SourceFile, rows: Iterator[tuple[int, list[str]]]) -> list[str]:
    """Return the first row, checked."""
    header = next((cells for _, cells in rows), None)
    if header is None:
        raise SourceError(f"{file}: is empty; it needs a header and rows")
    count = Counter(header)
    for name in header:
        if count[name] > 1:
            raise SourceError(f"{file}, line 1: the column {name!r} occurs twice; rename one")
        if _is_number(name):
            raise SourceError(
                f"{file}, line 1: {name!r} is a number, but a header is expected; add a first line with column names"
            )
    return header


def _read(files: Sequence[SourceFile], options: CsvOptions, features: Sequence[str]) -> Iterator[LocatedExample]:
    whole: bool | None = None
    for file in files:
        with file.reading() as blocks:
            rows = _rows(file, io.BufferedReader(BlockStream(blocks)), options)
            header = _header(file, rows)
            label_column, columns = _columns(file, header, options, features)
            for line, cells in rows:
                where = f"{file}, line {line}"
                if len(cells) != len(header):
                    raise SourceError(
                        f"{where}: has {len(cells)} cells, but the header has {len(header)}; correct the line"
                    )
                x = [_number(cells[column], where, header[column]) for column in columns]
                label = cells[label_column]
                whole = _is_whole(label) if whole is None else whole
                y = _label(label, where, options.label, whole=whole)
                with np.errstate(over="ignore"):  # becomes infinity, which is refused later
                    yield where, (np.asarray(x, np.float32), y)


def _label(label: str, where: str, column: str, *, whole: bool) -> np.int64 | np.float32:
    """Return one label. `whole`: the first label was an integer."""
    if whole and not _is_whole(label) and _is_number(label):
        raise SourceError(
            f"{where}: the label {column!r} is {label}, but earlier labels were integers; write all labels with a "
            "decimal point, or none"
        )
    y = _number(label, where, column)
    if not whole:
        with np.errstate(over="ignore"):
            return np.float32(y)
    if abs(int(label)) >= _LARGEST_LABEL:
        raise SourceError(f"{where}: the label {column!r} is {label}, which exceeds 64 bits; number classes from 0")
    return np.int64(int(label))


def _rows(file: SourceFile, opened: IO[bytes], options: CsvOptions) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) for each line that is not blank."""
    lines = io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")
    reader = csv.reader(lines, delimiter=options.delimiter, strict=True)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, [cell.strip() for cell in cells]
    except (csv.Error, UnicodeDecodeError) as fault:
        raise SourceError(f"{file}: after line {reader.line_num}: {fault}; save it as UTF-8 CSV") from fault


def _number(cell: str, where: str, column: str) -> float:
    try:
        return float(cell)
    except ValueError as fault:
        raise SourceError(
            f"{where}: {column!r} is {cell!r}, which is not a number; correct it, or exclude the column with "
            "data.options.features"
        ) from fault


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _is_whole(cell: str) -> bool:
    return cell.lstrip("+-").isdecimal()
