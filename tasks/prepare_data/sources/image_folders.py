"""`images`: a folder of images for each class."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from tasks.foundation.dataset.features import Array
from tasks.foundation.errors import SourceError
from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.checksum import checksum_bytes
from tasks.prepare_data.sources.base import Located, Options, Source, parse_options
from tasks.prepare_data.sources.files import find_files
from tasks.prepare_data.sources.fingerprint import fingerprint, watched
from tasks.prepare_data.sources.image_decoding import decoded
from tasks.prepare_data.sources.read_ahead import in_order
from tasks.prepare_data.sources.source_file import SourceFile

_TOLD = 10
_Side = Annotated[int, Field(ge=1, le=2**14)]


class ImagesOptions(Options):
    """`data.options` of `images`."""

    path: str = Field(
        min_length=1, description="a folder with one folder for each class, relative to the run file or on gs://"
    )
    size: list[_Side] = Field(
        min_length=2, max_length=2, description="[height, width] of the examples, each a whole number of at least 1"
    )
    channels: Literal[1, 3] = Field(default=3, description="3 for color, 1 for grey")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    file: SourceFile
    label: int
    stored: Stored | None  # what its store said of it


def images(options: Mapping[str, Any], folder: Path) -> Source:
    """x: uint8 [height, width, channels], 0 to 255; y: int64 [], index of the class.

    The classes are the folders' names in sorted order; what lies deeper in a folder is of its class too. JPEG and PNG
    are told by their content; how they are brought to one size is said at `dataset.images.decode_image`. Pixels stay
    bytes, a quarter of what float32 would take: let the model scale them, as with `keras.layers.Rescaling(1 / 255)`.

    Raises:
        RunFileError: an option cannot be used.
        SourceError: there are no class folders, one is empty, or files lie beside them. While reading: files that
            cannot be decoded, the first ten of them named.
    """
    chosen = parse_options(ImagesOptions, options, source="images")
    files = [file for file in find_files(chosen.path, folder) if not _hidden(file.relative)]
    counts = _classes(chosen.path, files)
    found = fingerprint(files)
    labels = [label for label, count in enumerate(counts.values()) for _ in range(count)]
    stats: Sequence[Stored | None] = found.stats or [None] * len(files)
    listed = [
        _Image(file=file, label=label, stored=stored) for file, label, stored in zip(files, labels, stats, strict=True)
    ]
    read = partial(_read, listed, (*chosen.size, chosen.channels))
    return Source(
        content=found.content,
        # With the order of the files, the counts say which image is of which class.
        settings={"classes": counts, "size": chosen.size, "channels": chosen.channels},
        origin={"classes": json.dumps(list(counts)), **found.origin},
        length=len(files),
        # What a store gave is compared with its checksum image by image.
        read=read if found.stats else lambda: watched(files, found, read()),
    )


def _classes(path: str, files: list[SourceFile]) -> dict[str, int]:
    """Class -> number of its images, sorted; the files come to be in that order too."""
    if not files:
        raise SourceError(f"data.options.path: {path!r}: holds hidden files only; name a folder of class folders")
    beside = [file.relative for file in files if "/" not in file.relative]
    if len(beside) == len(files):
        raise SourceError(
            f"data.options.path: {path!r}: holds no folders, but {_some(beside)}; name a folder that has one folder "
            "for each class"
        )
    if beside:
        raise SourceError(
            f"data.options.path: {path!r}: beside the folders of the classes lie {_some(beside)}; move each into the "
            "folder of its class, or away"
        )
    files.sort(key=lambda file: file.relative.split("/"))
    counts = {name: len(list(some)) for name, some in groupby(files, lambda file: file.relative.split("/")[0])}
    empty = sorted({name for name in files[0].storage.folders("") if not _hidden(name)} - counts.keys())
    if empty:
        raise SourceError(
            f"data.options.path: {path!r}: no images in {_some(empty)}; put some there, or remove the folder: each "
            "folder is a class"
        )
    return counts


def _read(images: Sequence[_Image], shape: tuple[int, ...]) -> Iterator[Located]:
    workers = max(os.cpu_count() or 1, images[0].file.storage.transfers)
    faults: list[str] = []
    done = in_order(partial(_decode, shape=shape), images, workers=workers)
    for image, pixels in zip(images, done, strict=True):
        if isinstance(pixels, str):
            faults.append(f"{image.file} {pixels}")
            if len(faults) == _TOLD:
                break
        # After the first fault nothing can come of it; the rest is only looked through for more.
        elif not faults:
            yield str(image.file), (pixels, np.int64(image.label))
    if faults:
        raise SourceError(
            f"{len(faults)}{' or more' if len(faults) == _TOLD else ''} of {len(images)} images cannot be used: "
            f"{'; '.join(faults)}. Write them again as JPEG or PNG, or take them out of the folder"
        )


def _decode(image: _Image, *, shape: tuple[int, ...]) -> Array | str:
    """Its pixels, or what is wrong with it."""
    data = image.file.read()
    if image.stored is not None and checksum_bytes(data) != image.stored:
        raise SourceError(f"{image.file}: changed while it was being read; run again when nobody writes to it")
    try:
        return decoded(data, shape, "uint8")
    except ValueError as fault:
        return str(fault)


def _hidden(relative: str) -> bool:
    return any(part.startswith(".") for part in relative.split("/"))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_TOLD]) + (f" and {len(names) - _TOLD} more" if len(names) > _TOLD else "")
