"""`text`: bytes of text files, for language models that predict the next byte."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from tasks.foundation.errors import SourceError
from tasks.prepare_data.sources.base import Located, Options, Source, parse_options
from tasks.prepare_data.sources.files import find_files
from tasks.prepare_data.sources.fingerprint import confirmed, fingerprint, watched
from tasks.prepare_data.sources.source_file import SourceFile


class TextOptions(Options):
    """`data.options` of `text`."""

    path: str = Field(
        min_length=1,
        description="a text file or a folder, relative to the run file or on gs://; {stdlib} is Python's own sources",
    )
    suffix: str = Field(default="", description="the ending of the file names to take, such as .py")
    length: int = Field(ge=1, description="bytes in an example, a whole number of at least 1")
    max_bytes: int | None = Field(default=None, ge=2, description="bytes to take in all, a whole number of at least 2")


def text(options: Mapping[str, Any], folder: Path) -> Source:
    """x: int32 [length], bytes; y: int32 [length], at each place the byte that follows.

    The files, in the order of their relative paths, are one text, which is cut every `length` bytes; what is left at
    the end is dropped.

    Raises:
        RunFileError: an option cannot be used.
        SourceError: there are no files, or too few bytes in them.
    """
    chosen = parse_options(TextOptions, options, source="text")
    files = find_files(chosen.path, folder, suffix=chosen.suffix)
    found = fingerprint(files, max_bytes=chosen.max_bytes)
    examples = (found.size - 1) // chosen.length
    if examples < 1:
        raise SourceError(
            f"data.options.length: {chosen.length}: {chosen.path} gives {found.size} bytes and an example needs "
            f"{chosen.length + 1}; set a smaller length, or name more text"
        )
    return Source(
        content=found.content,
        settings={"length": chosen.length},
        origin=found.origin,
        length=examples,
        read=lambda: watched(files, found, _read(files, chosen, examples)),
        confirm=partial(confirmed, files),
    )


def _read(files: Sequence[SourceFile], options: TextOptions, examples: int) -> Iterator[Located]:
    rest, index = b"", 0
    for file in files:
        with file.reading() as blocks:
            for block in blocks:
                rest += block
                begin = 0
                while index < examples and begin + options.length < len(rest):
                    sequence = np.frombuffer(rest, np.uint8, options.length + 1, begin).astype(np.int32)
                    yield f"{file}, example {index}", (sequence[:-1], sequence[1:])
                    begin += options.length
                    index += 1
                if index == examples:
                    return
                rest = rest[begin:]
