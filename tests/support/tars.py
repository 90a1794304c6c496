"""Tar files with numbered examples, for tests of the source `tar`."""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tests.support.tfrecords import png


def npy(array: Any) -> bytes:
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def example(number: int) -> dict[str, bytes]:
    """Return the files of an example, whose values all derive from its number."""
    document = {"a": {"b": number}, "weight": number / 4, "box": [number, 0.5], "name": f"n{number}"}
    return {
        "png": png(number),
        "cls": str(number).encode(),
        "txt": f"text {number}".encode(),
        "npy": npy(np.asarray([number, number / 2], np.float32)),
        "json": json.dumps(document).encode(),
    }


def tar_of(files: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT, **headers: Any) -> bytes:
    """Return a tar file of these names and contents; `headers` are attributes of each `TarInfo`."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as opened:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in headers.items():
                setattr(info, key, value)
            opened.addfile(info, io.BytesIO(content))
    return made.getvalue()


def tar(*numbers: int, suffixes: Iterable[str] = (), folder: str = "d", **changed: bytes) -> bytes:
    """Return a tar file with these examples; of all suffixes, or of some; `changed` replaces their contents."""
    chosen = tuple(suffixes)
    return tar_of(
        (f"{folder}/{number:04d}.{suffix}", content)
        for number in numbers
        for suffix, content in {**example(number), **changed}.items()
        if not chosen or suffix in chosen
    )


def members_of(examples: Mapping[str, Mapping[str, bytes]]) -> bytes:
    """Return a tar file with the given files of each key."""
    return tar_of((f"{key}.{suffix}", data) for key, files in examples.items() for suffix, data in files.items())
