"""From the run file's `data` to a source."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.foundation.contracts.run_spec import DataSpec
from tasks.foundation.errors import RunFileError
from tasks.prepare_data.sources.base import Source, suggestion
from tasks.prepare_data.sources.csv_files import csv_files
from tasks.prepare_data.sources.digits import digits
from tasks.prepare_data.sources.function import function
from tasks.prepare_data.sources.image_folders import images
from tasks.prepare_data.sources.npz_arrays import npz
from tasks.prepare_data.sources.text_bytes import text
from tasks.prepare_data.sources.tfrecord_files import tfrecord

_BUILT_IN: dict[str, Callable[[Mapping[str, Any], Path], Source]] = {
    "csv": csv_files,
    "digits": digits,
    "images": images,
    "npz": npz,
    "text": text,
    "tfrecord": tfrecord,
}


def open_source(data: DataSpec, code_folder: Path) -> Source:
    """The source that a run file names; looks at its files, but reads no example yet.

    Args:
        data: the run file's `data`.
        code_folder: the run file's folder, which relative paths start from.

    Raises:
        RunFileError: no such source, or an option that it cannot use.
        SourceError: what it should read is missing or empty.
    """
    if ":" in data.source:
        return function(data.source, data.options, code_folder)
    built_in = _BUILT_IN.get(data.source)
    if built_in is None:
        raise RunFileError(
            f"data.source: {data.source!r} is no built-in source; {suggestion(data.source, _BUILT_IN)}; "
            "or name a generator function of your own, as data.py:load"
        )
    return built_in(data.options, code_folder)
