"""The source `images`: one folder of images per class.

Decodes one image file, and describes files that cannot be decoded.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from baton.tasks.foundation.contracts.dataset import CLASSES
from baton.tasks.foundation.dataset.features import Array
from baton.tasks.foundation.errors import SourceError
from baton.tasks.foundation.storage.interface import FileStat
from baton.tasks.foundation.storage.transfers import checksum_bytes
from baton.tasks.prepare_data.sources.source import LocatedExample, Options, Source, parse_options
from baton.tasks.prepare_data.sources.source_files import SourceFile, find_files, fingerprint, require_unchanged
from baton.tasks.prepare_data.sources.verified_reads import map_ahead

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_OTHERS = {
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"<svg": "SVG",
    b"<?xml": "SVG or another XML file",
    b"%PDF": "PDF",
}


def decode_image_file(data: bytes, shape: Sequence[int], dtype: str) -> Array:
    """Decode a JPEG or PNG file, as `dataset.images.decode_image` does.

    Args:
        shape: (height, width, channels).
        dtype: uint8 or float32.

    Raises:
        ValueError: the file is damaged or of another kind; says which.
    """
    import tensorflow as tf

    from baton.tasks.foundation.dataset.shards import decode_image

    if problem := _not_an_image(data):
        raise ValueError(problem)
    try:
        image: Array = decode_image(tf.constant(data), shape, dtype).numpy()
    except tf.errors.InvalidArgumentError as fault:
        raise ValueError(f"is a {'PNG' if data.startswith(_PNG) else 'JPEG'} that is truncated or damaged") from fault
    return image


_LARGEST_SIDE, _SIDE_STEP = 224, 8
# Decoding takes up to 15 bytes a pixel, and a small file may say that it has many.
_MOST_PIXELS = 1 << 26
MOST_IMAGE_BYTES = 256 << 20


def size_of_image(data: bytes) -> tuple[int, int, int] | None:
    """Return height, width and channels (1 or 3) of a JPEG or PNG file; None for others."""
    import tensorflow as tf

    if _not_an_image(data):
        return None
    try:
        height, width, channels = tf.io.decode_image(data, expand_animations=False).shape
    except tf.errors.InvalidArgumentError:
        return None
    return height, width, 1 if channels <= 2 else 3  # noqa: PLR2004 - grey, and grey with transparency


def common_size(files: Iterable[bytes]) -> tuple[int, int, int]:
    """Return a size for all images: the median of some, at most 224 pixels, in steps of 8 if they differ.

    Args:
        files: JPEG or PNG files, taken one by one; others are left out.

    Raises:
        ValueError: all are others.
    """
    found: list[tuple[int, int, int]] = []
    problem = ""
    for data in files:
        if (size := size_of_image(data)) is not None:
            found.append(size)
        problem = problem or _not_an_image(data) or ""
    if not found:
        raise ValueError(problem or "is not a JPEG or PNG file that can be decoded")
    heights, widths, channels = (sorted(values) for values in zip(*found, strict=True))
    median = heights[len(found) // 2], widths[len(found) // 2]
    if len(set(found)) > 1 or max(median) > _LARGEST_SIDE:
        scale = min(1.0, _LARGEST_SIDE / max(median))
        median = tuple(max(1, round(side * scale / _SIDE_STEP)) * _SIDE_STEP for side in median)
    return (*median, channels[-1])


def _not_an_image(data: bytes) -> str | None:
    """Detect other kinds by content, because a file's name may be wrong, and pixels without end; None for others."""
    if data.startswith((_PNG, _JPEG)):
        # The chunk that marks an animated PNG comes before the pixels.
        if data.startswith(_PNG) and b"acTL" in data[: max(0, data.find(b"IDAT"))]:
            return "is an animated PNG"
        height, width = _sides(data)
        if height * width > _MOST_PIXELS:
            return f"has {height} x {width} pixels, more than {_MOST_PIXELS}, so it must become smaller"
        return None
    if not data:
        return "is empty"
    if data[8:12] == b"WEBP":
        return "is WebP"
    kind = next((kind for begin, kind in _OTHERS.items() if data.startswith(begin)), None)
    return f"is {kind}" if kind else "is not an image"


def _sides(data: bytes) -> tuple[int, int]:
    """Return height and width as the file's header says them; 0 if it is damaged."""
    import tensorflow as tf

    if data.startswith(_PNG):  # https://www.w3.org/TR/png-3/#11IHDR
        return int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
    try:
        height, width, _ = tf.io.extract_jpeg_shape(data).numpy()
    except tf.errors.InvalidArgumentError:
        return 0, 0
    return int(height), int(width)


_MAX_LISTED = 10


def _of_few_pixels(size: list[int]) -> list[int]:
    if math.prod(size) > _MOST_PIXELS:
        raise ValueError(f"more than {_MOST_PIXELS:,} pixels an image, as many as are decoded")
    return size


_Side = Annotated[int, Field(ge=1, le=2**14)]
# `data.options.size`: [height, width], or one number for both.
ImageSize = Annotated[
    list[_Side],
    Field(min_length=2, max_length=2),
    BeforeValidator(lambda size: [size, size] if type(size) is int else size),
    AfterValidator(_of_few_pixels),
]


class ImagesOptions(Options):
    """`data.options` of `images`."""

    path: str = Field(
        min_length=1, description="a folder with one folder per class, relative to the run file or on gs://"
    )
    size: ImageSize = Field(
        description="[height, width] of the examples, each an integer of at least 1, or one integer for both"
    )
    classes: list[str] = Field(
        default_factory=list,
        description="the folders in the order of their labels; others follow, sorted; left out: all sorted, and in "
        "an own set or a mixture first the classes of the (other) training examples",
    )
    channels: Literal[1, 3] = Field(default=3, description="3 for color, 1 for grey")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    file: SourceFile
    label: int
    stored: FileStat | None  # size and checksum in its store


def images(options: Mapping[str, Any], folder: Path) -> Source:
    """Open a source of x: uint8 [height, width, channels], 0 to 255; y: int64 [], index of the class.

    The classes are the folder names in sorted order, after those that `classes` names; nested folders belong to the
    same class. The content of a file decides whether it is JPEG or PNG. `dataset.images.decode_image` describes the
    resizing. Pixels stay uint8, a quarter of the size of float32: scale them in the model, for example with
    `keras.layers.Rescaling(1 / 255)`.

    Raises:
        RunFileError: an option cannot be used.
        SourceError: there are no class folders, one is empty, or files are next to them. While reading: files that
            cannot be decoded; names the first ten.
    """
    chosen = parse_options(ImagesOptions, options, source="images")
    files = [file for file in find_files(chosen.path, folder) if not _hidden(file.relative)]
    counts = _classes(chosen.path, files)
    found = fingerprint(files)
    names = [*chosen.classes, *(name for name in counts if name not in chosen.classes)]
    labels = [names.index(name) for name, count in counts.items() for _ in range(count)]
    stats: Sequence[FileStat | None] = found.stats or [None] * len(files)
    listed = [
        _Image(file=file, label=label, stored=stored) for file, label, stored in zip(files, labels, stats, strict=True)
    ]
    read = partial(_read, listed, (*chosen.size, chosen.channels))
    return Source(
        content=found.content,
        # Together with the order of the files, the counts determine each image's class.
        settings={
            "classes": counts,
            "size": chosen.size,
            "channels": chosen.channels,
            # Only where they are not numbered as sorted folders are, so that no other dataset has another name.
            **({} if names[: len(counts)] == list(counts) else {"labels": names}),
        },
        origin={CLASSES: json.dumps(names), **found.origin},
        length=len(files),
        # For images in a store, each image's checksum is compared while reading.
        read=read if found.stats else lambda: require_unchanged(files, found, read()),
    )


def _classes(path: str, files: list[SourceFile]) -> dict[str, int]:
    """Return class -> number of images, sorted; also sorts the files in this order."""
    if not files:
        raise SourceError(f"data.options.path: {path!r}: contains only hidden files; name a folder of class folders")
    beside = [file.relative for file in files if "/" not in file.relative]
    if len(beside) == len(files):
        raise SourceError(
            f"data.options.path: {path!r}: contains no folders, but {_abridged(beside)}; name a folder with one folder "
            "per class"
        )
    if beside:
        raise SourceError(
            f"data.options.path: {path!r}: files lie next to the class folders: {_abridged(beside)}; move each into "
            "the folder of its class, or elsewhere"
        )
    files.sort(key=lambda file: file.relative.split("/"))
    counts = {name: len(list(some)) for name, some in groupby(files, lambda file: file.relative.split("/")[0])}
    empty = sorted({name for name in files[0].storage.folders("") if not _hidden(name)} - counts.keys())
    if empty:
        raise SourceError(
            f"data.options.path: {path!r}: no images in {_abridged(empty)}; add images, or remove the folder: each "
            "folder is a class"
        )
    return counts


def _read(images: Sequence[_Image], shape: tuple[int, ...]) -> Iterator[LocatedExample]:
    workers = max(os.cpu_count() or 1, images[0].file.storage.transfers)
    faults: list[str] = []
    done = map_ahead(partial(_decode, shape=shape), images, workers=workers)
    for image, pixels in zip(images, done, strict=True):
        if isinstance(pixels, str):
            faults.append(f"{image.file} {pixels}")
            if len(faults) == _MAX_LISTED:
                break
        # After the first error the source is refused; the rest is only searched for more errors.
        elif not faults:
            yield str(image.file), (pixels, np.int64(image.label))
    if faults:
        raise SourceError(
            f"{len(faults)}{' or more' if len(faults) == _MAX_LISTED else ''} of {len(images)} images cannot be used: "
            f"{'; '.join(faults)}. Save them as JPEG or PNG, or remove them from the folder"
        )


def _decode(image: _Image, *, shape: tuple[int, ...]) -> Array | str:
    """Return an image's pixels, or the reason why it cannot be decoded."""
    data = image.file.read(MOST_IMAGE_BYTES)
    if image.stored is not None and checksum_bytes(data) != image.stored:
        raise SourceError(f"{image.file}: changed while it was being read; run again when no process writes to it")
    try:
        return decode_image_file(data, shape, "uint8")
    except ValueError as fault:
        return str(fault)


def _hidden(relative: str) -> bool:
    return any(part.startswith(".") for part in relative.split("/"))


def _abridged(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
