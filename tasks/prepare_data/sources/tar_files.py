"""The source `tar`: examples in tar files, as WebDataset writes them, read in place or copied.

Files of one key form an example, see `tasks/foundation/dataset/tar_ranges.py`. Preparing reads the headers of each file
once, which finds damaged files before any image is decoded, and divides the file into ranges of whole examples. The
first example says dtypes and shapes; all others are compared with it.
"""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from baton.tasks.foundation.contracts.dataset import Feature, RangeLayout
from baton.tasks.foundation.dataset.features import STRING
from baton.tasks.foundation.dataset.tar_ranges import (
    KINDS,
    TarExample,
    TarFault,
    document,
    examples,
    kind_of,
    members,
    npy_of,
    parse_key,
    pick,
    values_of,
)
from baton.tasks.foundation.errors import RunFileError, SourceError
from baton.tasks.prepare_data.sources.column_ranges import copied_examples, ranges_in_place
from baton.tasks.prepare_data.sources.image_folders import ImageSize, common_size
from baton.tasks.prepare_data.sources.source import LocatedExample, Options, Range, Source, parse_options
from baton.tasks.prepare_data.sources.source_files import (
    SourceFile,
    find_and_sort_out,
    fingerprint,
    fingerprint_by_stamps,
    left_out,
    require_unchanged,
)
from baton.tasks.prepare_data.sources.tfrecord_files import named_features, require_readable_folders
from baton.tasks.prepare_data.sources.verified_reads import BlockStream, map_ahead

_RANGE_BYTES = 32 << 20
_DECODED_BYTES = 32 << 20
_BUFFER_BYTES = 1 << 20
# Files of a store that are indexed at once.
_WORKERS = 4
_DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)
_Names = str | dict[str, str]


class TarOptions(Options):
    """`data.options` of `tar`."""

    path: str = Field(min_length=1, description="a file, a folder or a pattern such as train-*.tar, also on gs://")
    x: _Names = Field(
        description="what x is: the suffix of a file, such as jpg, jpg;png (either), txt, npy or cls, or a key of a "
        "JSON file, such as json.caption; or {input: suffix}"
    )
    y: _Names | None = Field(default=None, description="what y is, such as cls or json.label; or {output: suffix}")
    sample_weight: str | None = Field(default=None, description="what the weights are, such as json.weight")
    size: ImageSize | None = Field(
        default=None, description="[height, width] of images, each an integer of at least 1, or one integer for both"
    )
    channels: Literal[1, 3] = Field(default=3, description="3 for color, 1 for grey")
    dtypes: dict[str, str] = Field(
        default_factory=dict,
        description="dtypes of values in JSON files, such as {json.price: float32}; by default int64, float32 or bool "
        "as in the first example",
    )
    copy_: bool = Field(
        default=False, alias="copy", description="true copies the examples into shards, in shuffled order"
    )

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        of_json: set[str] = set()
        for at, key in _named(self):
            suffixes, path = parse_key(key)
            kinds = {KINDS.get(suffix.rpartition(".")[2]) for suffix in suffixes}
            if None in kinds or len(kinds) > 1:
                problem = "is not read" if None in kinds else "has files of different kinds"
                raise ValueError(
                    f"{at}: {key!r}: {problem}; name the suffix of a file, of these: {', '.join(KINDS)}; of a JSON "
                    "file also its keys, such as json.label; prepare other files in your own data.py:load"
                )
            if "image" in kinds and self.size is None:
                raise ValueError(f"size is missing: data.options.{at}: {key} is an image; set its [height, width]")
            of_json.update({key} if path or "json" in kinds else ())
        for key, dtype in self.dtypes.items():
            if key not in of_json:
                names = ", ".join(sorted(of_json)) or "none"
                raise ValueError(
                    f"dtypes: {key!r}: x, y and sample_weight name no such value of a JSON file, but {names}"
                )
            if dtype not in _DTYPES:
                raise ValueError(f"dtypes.{key}: {dtype!r} is no dtype of these: {', '.join(_DTYPES)}")
        return self


def tar(options: Mapping[str, Any], folder: Path) -> Source:
    """Open a source of files in tar files for x, y and sample_weight: one array each, or a dict of arrays.

    Images (jpg, jpeg, png) are uint8 [height, width, channels], see `images`; cls is int64 []; txt is a string []; npy
    has its own dtype and shape; and values of JSON files have those of the first example.

    By default nothing is copied: the dataset consists of ranges of these files, which must not change. `copy: true`
    writes shards instead, for sorted files and frequent evaluation, see `tfrecord`.

    Raises:
        RunFileError: an option cannot be used, or names what the first example does not have.
        InvalidInput: the files are in an unknown store, or in folders without a usable address.
        SourceError: there are no files, or no examples. While reading: a file is damaged, truncated, compressed or has
            links, or an example lacks a file or has another dtype or shape than the first.
    """
    chosen = parse_options(TarOptions, options, source="tar")
    found_files, others = find_and_sort_out(chosen.path, folder, suffix=".tar")
    files = [file for file in found_files if not file.name.startswith(".")]
    require_readable_folders(files)
    file, first = _first_example(files, chosen)
    features = _features(file, first, chosen)
    found = fingerprint(files) if chosen.copy_ else fingerprint_by_stamps(files)
    return Source(
        content=found.content,
        settings=chosen.model_dump(exclude={"path"}),
        origin=found.origin,
        length=None,
        read=lambda: require_unchanged(files, found, _read(files, features)),
        files=files,
        left_out=left_out(chosen.path, others),
        in_place=None
        if chosen.copy_
        else ranges_in_place(
            files, found, lambda most: planned_ranges(files, most, None if most else _RANGE_BYTES), features
        ),
    )


def _read(files: Sequence[SourceFile], features: Sequence[Feature]) -> Iterator[LocatedExample]:
    # So few that their decoded images fit into memory.
    size = sum(math.prod(each.shape) * np.dtype(each.dtype).itemsize for each in features if each.dtype != STRING)
    planned = planned_ranges(files, max(1, _DECODED_BYTES // max(1, size)), _RANGE_BYTES)
    yield from copied_examples(files, planned, features)


def planned_ranges(files: Sequence[SourceFile], most_records: int | None, most_bytes: int | None) -> list[Range]:
    """Return the ranges of all files, without checksums; reads only headers.

    Args:
        files: the tar files, in order.
        most_records: examples in a range; None: any number.
        most_bytes: size of a range of several examples; None: any.

    Raises:
        SourceError: a file is damaged, truncated, compressed or has links; names the file and the byte.
    """
    workers = 1 if files[0].local is not None else _WORKERS
    work = partial(_ranges_of, most_records=most_records, most_bytes=most_bytes)
    return [each for found in map_ahead(work, files, workers=workers) for each in found]


def _ranges_of(file: SourceFile, most_records: int | None, most_bytes: int | None) -> list[Range]:
    found: list[Range] = []
    begin = end = records = 0
    for example in _indexed(file):
        too_large = most_bytes is not None and example.end - begin > most_bytes
        if records and (too_large or records == most_records):
            found.append(_range(file, begin, end, records))
            records = 0
        if not records:
            begin = example.begin
        records, end = records + 1, example.end
    if records:
        found.append(_range(file, begin, end, records))
    return found


def _range(file: SourceFile, begin: int, end: int, records: int) -> Range:
    layout = RangeLayout(form="tar")
    return Range(path=file.uri, begin=begin, size=end - begin, crc32c="0" * 8, records=records, layout=layout)


def _indexed(file: SourceFile) -> Iterator[TarExample]:
    """Yield the examples of a file without their contents."""
    try:
        if file.local is not None:
            with file.open() as opened:
                size = opened.seek(0, io.SEEK_END)
                opened.seek(0)
                yield from examples(members(partial(_take, opened), skip=partial(_seek, opened, size=size)))
            return
        with file.reading() as blocks:  # compared with the store's checksum
            stream = io.BufferedReader(BlockStream(blocks), _BUFFER_BYTES)
            yield from examples(members(partial(_take, stream), skip=partial(_read_over, stream)))
    except TarFault as fault:
        raise SourceError(f"{file}: {fault}") from fault


def _take(stream: IO[bytes] | io.BufferedIOBase, size: int) -> memoryview:
    return memoryview(stream.read(size))


def _seek(stream: IO[bytes], count: int, *, size: int) -> int:
    at = stream.tell()
    return stream.seek(min(at + count, size)) - at


def _read_over(stream: io.BufferedIOBase, count: int) -> int:
    rest = count
    while rest and (block := stream.read(min(rest, _BUFFER_BYTES))):
        rest -= len(block)
    return count - rest


def _first_example(files: Sequence[SourceFile], options: TarOptions) -> tuple[SourceFile, TarExample]:
    for file in files:
        try:
            with file.open() as opened:
                example = next(examples(members(partial(_take, opened))), None)
        except TarFault as fault:
            raise SourceError(f"{file}: {fault}") from fault
        if example is not None:
            return file, example
    raise SourceError(
        f"data.options.path: {options.path!r}: none of these files has an example; name tar files with files such as "
        "0001.jpg and 0001.cls"
    )


def describe_tars(files: Sequence[SourceFile], *, path: str) -> tuple[dict[str, Feature | str], tuple[int, int, int]]:
    """Return what the first example has, by the key that names it, and the size of its images.

    A feature that cannot be read is the reason.

    Args:
        files: tar files.
        path: `data.options.path`, for messages.

    Raises:
        SourceError: no file has an example, or it is damaged.
    """
    file, first = _first_example(files, TarOptions(path=path, x="cls"))
    known: dict[str, Feature | str] = {}
    size = (1, 1, 3)
    for suffix, content in first.files.items():
        kind = KINDS.get(suffix.rpartition(".")[2])
        keys = [suffix]
        try:
            if kind == "image":
                size = common_size([bytes(content)])
            elif kind == "json":
                value = document(first, (suffix,))
                keys = [f"{suffix}.{key}" for key in value] if isinstance(value, dict) else []
        except ValueError as fault:
            raise SourceError(f"{file}: {first}: {suffix}: {fault}") from fault
        options = TarOptions(path=path, x=suffix, size=list(size[:2]), channels=1 if size[2] == 1 else 3)
        for key in keys:
            try:
                known[key] = "is no file that this source reads" if kind is None else _feature(first, key, options)
            except TarFault as fault:
                known[key] = f"cannot be read: {fault}"
    return known, size


def _named(options: TarOptions) -> Iterator[tuple[str, str]]:
    """Yield option and key of everything that forms an example."""
    for part in ("x", "y", "sample_weight"):
        value = getattr(options, part)
        pairs = value.items() if isinstance(value, dict) else [] if value is None else [("", value)]
        yield from ((f"{part}{'.' if name else ''}{name}", key) for name, key in pairs)


def _features(file: SourceFile, first: TarExample, options: TarOptions) -> tuple[Feature, ...]:
    known: dict[str, Feature | str] = dict.fromkeys(first.files, "")
    for at, key in _named(options):
        suffixes, _ = parse_key(key)
        if any(suffix in first.files for suffix in suffixes) or first.dotted(suffixes):
            try:
                feature = known[key] = _feature(first, key, options)
                values_of([first], [feature])
            except TarFault as fault:
                raise RunFileError(f"data.options.{at}: {key!r}: {file}: {fault}") from fault
    parts = {"x": options.x, "y": options.y, "sample_weight": options.sample_weight}
    return named_features(parts, known, among=f"{file}: {first}")


def _feature(first: TarExample, key: str, options: TarOptions) -> Feature:
    """Return what a key is in the first example."""
    suffixes, path = parse_key(key)
    kind = KINDS[suffixes[0].rpartition(".")[2]]
    if kind == "image":
        shape = (*(options.size or ()), options.channels)
        return Feature(name=key, dtype="uint8", shape=shape, key=key, encoding="image")
    if kind == "text":
        return Feature(name=key, dtype=STRING, shape=(), key=key, encoding="text")
    if kind == "class":
        return Feature(name=key, dtype="int64", shape=(), key=key, encoding="array")
    if kind == "array":
        dtype, shape, _, _ = npy_of(first, first.file(suffixes))
        return Feature(name=key, dtype=dtype.newbyteorder("<").name, shape=shape, key=key, encoding="array")
    return _of_json(first, pick(first, document(first, suffixes), path), key, options.dtypes.get(key))


def _of_json(first: TarExample, value: object, key: str, dtype: str | None) -> Feature:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    found = {"b": "bool", "i": "int64", "f": "float32", "U": STRING}.get(array.dtype.kind)
    texts = found == STRING and all(isinstance(each, str) for each in (value if isinstance(value, list) else [value]))
    if isinstance(value, dict) or found is None or not array.size or (found == STRING and not texts):
        raise TarFault(
            f"{first}: {key} is {kind_of(value)}, which is no array; name a number, a text, or a list of them, of one "
            f"length{', such as ' + key + '.' + next(iter(value)) if isinstance(value, dict) and value else ''}"
        )
    if found == STRING:
        return Feature(name=key, dtype=STRING, shape=array.shape, key=key, encoding="text")
    return Feature(name=key, dtype=dtype or found, shape=array.shape, key=key, encoding="array")
