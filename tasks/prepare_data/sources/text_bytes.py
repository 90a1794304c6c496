"""The source `text`: bytes of text files, for language models that predict the next byte."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from baton.tasks.foundation.errors import SourceError
from baton.tasks.prepare_data.sources.source import LocatedExample, Options, Source, parse_options
from baton.tasks.prepare_data.sources.source_files import SourceFile, find_files, fingerprint, require_unchanged


class TextOptions(Options):
    """`data.options` of `text`."""

    path: str = Field(
        min_length=1,
        description="a text file or a folder, relative to the run file or on gs://; {stdlib} is Python's library",
    )
    suffix: str = Field(default="", description="the suffix of the files to take, such as .py")
    length: int = Field(ge=1, description="bytes per example, an integer of at least 1")
    max_bytes: int | None = Field(default=None, ge=2, description="bytes to take in total, an integer of at least 2")


def text(options: Mapping[str, Any], folder: Path) -> Source:
    """Open a source of x: int32 [length], bytes; y: int32 [length], the byte that follows each byte of x.

    The files, sorted by relative path, form one text, which is cut every `length` bytes; an incomplete example at the
    end is dropped.

    Raises:
        RunFileError: an option cannot be used.
        SourceError: there are no files, or too few bytes.
    """
    chosen = parse_options(TextOptions, options, source="text")
    files = find_files(chosen.path, folder, suffix=chosen.suffix)
    found = fingerprint(files, max_bytes=chosen.max_bytes)
    examples = (found.size - 1) // chosen.length
    if examples < 1:
        raise SourceError(
            f"data.options.length: {chosen.length}: {chosen.path} has {found.size} bytes, but an example needs "
            f"{chosen.length + 1}; set a smaller length, or add more text"
        )
    return Source(
        content=found.content,
        settings={"length": chosen.length},
        origin=found.origin,
        length=examples,
        read=lambda: require_unchanged(files, found, _read(files, chosen, examples)),
        files=files,
    )


def _read(files: Sequence[SourceFile], options: TextOptions, examples: int) -> Iterator[LocatedExample]:
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
