"""The source `npz`: arrays of a .npz file, read in blocks of rows; the file is never in memory as a whole."""

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from pydantic import Field

from baton.tasks.foundation.dataset.features import MOST_EXAMPLE_BYTES, MOST_NPY_HEADER_BYTES, Array, npy_header
from baton.tasks.foundation.errors import RunFileError, SourceError
from baton.tasks.prepare_data.sources.returned_arrays import FLOATX, floatx
from baton.tasks.prepare_data.sources.source import LocatedExample, Options, Source, parse_options, suggestion
from baton.tasks.prepare_data.sources.source_files import SourceFile, find_files, fingerprint, require_unchanged

_CHUNK_BYTES = 1 << 20


class NpzOptions(Options):
    """`data.options` of `npz`."""

    path: str = Field(min_length=1, description="a .npz file, relative to the run file or on gs://")
    x: str = Field(default="x", min_length=1, description="the name of the array for x")
    y: str | None = Field(default=None, min_length=1, description="the name of the array for y")
    sample_weight: str | None = Field(default=None, min_length=1, description="the name of the array of weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one example."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


def npz(options: Mapping[str, Any], folder: Path) -> Source:
    """Open a source of rows of the named arrays for x, y and sample_weight; as in `fit`, floating numbers are floatx.

    Raises:
        RunFileError: an option cannot be used, or names a missing array.
        SourceError: the file is missing, or its arrays are empty, have different lengths, or hold Python objects.
    """
    chosen = parse_options(NpzOptions, options, source="npz")
    if chosen.sample_weight is not None and chosen.y is None:
        raise RunFileError(
            f"data.options.sample_weight: {chosen.sample_weight!r}: weights need labels; set data.options.y too"
        )
    try:
        files = find_files(chosen.path, folder)
    except SourceError as fault:
        raise SourceError(f"{fault}; name a .npz file") from fault
    if len(files) > 1:
        raise SourceError(f"data.options.path: {chosen.path!r}: found {len(files)} files; name one .npz file")
    (file,) = files
    found = fingerprint(files)
    names = {key: name for key, name in chosen.model_dump(exclude={"path"}).items() if name is not None}
    headers = _headers(file, names)
    floats = floatx()
    is_cast = any(header.dtype.kind == "f" and header.dtype.name != floats for header in headers)
    return Source(
        content=found.content,
        settings=names | ({FLOATX: floats} if is_cast else {}),
        origin=found.origin,
        length=headers[0].shape[0],
        read=lambda: require_unchanged(files, found, _read(file, names, floats)),
        files=files,
    )


def arrays_of(file: SourceFile) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each array of a file, by name.

    Raises:
        SourceError: it is no .npz file, or an array holds Python objects.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    with _archive(file, whole=False) as archive:
        for name in (member.removesuffix(".npy") for member in archive.namelist() if member.endswith(".npy")):
            with _member(archive, file, name, name) as (_, header):
                found[name] = header.dtype.name, header.shape
    return found


def _headers(file: SourceFile, names: Mapping[str, str]) -> list[_Header]:
    found: dict[str, _Header] = {}
    with _archive(file, whole=False) as archive:
        for key, name in names.items():
            with _member(archive, file, key, name) as (_, header):
                if not header.shape or not header.shape[0] or not header.row_bytes:
                    raise SourceError(
                        f"{file}: {name} has shape {header.shape} of {header.dtype}, which has no examples"
                    )
                # In Fortran order the rows are interleaved, so the array cannot be read row by row.
                held = header.row_bytes * (header.shape[0] if header.fortran_order else 1)
                if held > MOST_EXAMPLE_BYTES:
                    remedy = "save np.ascontiguousarray of it" if header.fortran_order else "save smaller rows"
                    raise SourceError(
                        f"{file}: {name} has {held} bytes in one piece, over {MOST_EXAMPLE_BYTES}; {remedy}"
                    )
                found[name] = header
    lengths = {name: header.shape[0] for name, header in found.items()}
    if len(set(lengths.values())) > 1:
        words = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise SourceError(f"{file}: the arrays have different lengths: {words}; save as many labels as examples")
    return list(found.values())


def _read(file: SourceFile, names: Mapping[str, str], floats: str) -> Iterator[LocatedExample]:
    with ExitStack() as stack:
        archive = stack.enter_context(_archive(file, whole=True))
        columns = [
            _rows(file, name, *stack.enter_context(_member(archive, file, key, name)), floats)
            for key, name in names.items()
        ]
        for index, row in enumerate(zip(*columns, strict=True)):
            yield f"{file}, example {index}", row


class _Bounded:
    """A file of which no read is larger than `most`: sizes of the directory of a zip, and of headers, stand in it."""

    def __init__(self, opened: IO[bytes], most: int) -> None:
        self._opened, self._most = opened, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def read(self, size: int = -1) -> bytes:
        if size > self._most:
            raise zipfile.BadZipFile(f"a part of {size} bytes, more than {self._most}")
        return self._opened.read(size)


@contextmanager
def _archive(file: SourceFile, *, whole: bool) -> Iterator[zipfile.ZipFile]:
    """Open the archive. `whole`: the caller reads each array to its end, where zipfile compares its CRC-32."""
    try:
        with (
            file.open(has_checksums=whole) as opened,
            zipfile.ZipFile(cast(IO[bytes], _Bounded(opened, MOST_EXAMPLE_BYTES))) as archive,
        ):
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as fault:
        raise SourceError(f"{file}: is not a valid .npz file ({fault}); write it with numpy.savez") from fault


@contextmanager
def _member(archive: zipfile.ZipFile, file: SourceFile, key: str, name: str) -> Iterator[tuple[IO[bytes], _Header]]:
    known = [member.removesuffix(".npy") for member in archive.namelist() if member.endswith(".npy")]
    if name not in known:
        raise RunFileError(f"data.options.{key}: {name!r}: {file} has no such array; {suggestion(name, known)}")
    with archive.open(f"{name}.npy") as member:
        begin = cast(IO[bytes], _Bounded(member, MOST_NPY_HEADER_BYTES))
        try:
            dtype, shape, fortran_order, _ = npy_header(begin, archive.getinfo(f"{name}.npy").file_size)
        except ValueError as fault:
            raise SourceError(f"{file}: {name} {fault}") from fault
        yield member, _Header(shape=shape, dtype=dtype, fortran_order=fortran_order)


def _rows(file: SourceFile, name: str, member: IO[bytes], header: _Header, floats: str) -> Iterator[Array]:
    dtype = np.dtype(floats) if header.dtype.kind == "f" else header.dtype
    if header.fortran_order:
        values = np.frombuffer(member.read(), header.dtype).reshape(header.shape, order="F")
        yield from (_cast(values[row], dtype) for row in range(len(values)))
        return
    row_shape, row_bytes = header.shape[1:], header.row_bytes
    chunk_rows = max(1, _CHUNK_BYTES // row_bytes)
    for begin in range(0, header.shape[0], chunk_rows):
        rows = min(chunk_rows, header.shape[0] - begin)
        data = member.read(rows * row_bytes)
        if len(data) != rows * row_bytes:
            raise SourceError(f"{file}: {name} ends before example {begin + rows}: the file is truncated; rewrite it")
        yield from _cast(np.frombuffer(data, header.dtype).reshape(rows, *row_shape), dtype)
    while member.read(_CHUNK_BYTES):  # zipfile compares the checksum at the end
        pass


def _cast(rows: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):  # becomes infinity, which is refused later
        return rows.astype(dtype, copy=False)
