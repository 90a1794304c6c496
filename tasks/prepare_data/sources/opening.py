"""From the run file's `data` to a source."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.foundation.contracts.run_spec import DataSpec
from tasks.foundation.errors import RunFileError
from tasks.prepare_data.sources.base import Options, Source, parse_options, suggestion
from tasks.prepare_data.sources.csv_files import CsvOptions, csv_files
from tasks.prepare_data.sources.digits import digits
from tasks.prepare_data.sources.files import require_there
from tasks.prepare_data.sources.function import function
from tasks.prepare_data.sources.image_folders import ImagesOptions, images
from tasks.prepare_data.sources.npz_arrays import NpzOptions, npz
from tasks.prepare_data.sources.text_bytes import TextOptions, text
from tasks.prepare_data.sources.tfrecord_files import tfrecord
from tasks.prepare_data.sources.tfrecord_spec import TfrecordOptions

_BUILT_IN: dict[str, Callable[[Mapping[str, Any], Path], Source]] = {
    "csv": csv_files,
    "digits": digits,
    "images": images,
    "npz": npz,
    "text": text,
    "tfrecord": tfrecord,
}


# What `data.options` of each may hold.
_OPTIONS: dict[str, type[Options]] = {
    "csv": CsvOptions,
    "digits": Options,
    "images": ImagesOptions,
    "npz": NpzOptions,
    "text": TextOptions,
    "tfrecord": TfrecordOptions,
}


def require_source(data: DataSpec, code_folder: Path) -> None:
    """Refuse at once what `open_source` would refuse, as far as the run file and a look at one local path tell.

    Args:
        data: the run file's `data`, of a built-in source.
        code_folder: the run file's folder, which relative paths start from.

    Raises:
        RunFileError: no such source, or an option that it cannot use.
        SourceError: the file or folder that it should read is not there.
    """
    _built_in(data.source)
    chosen = parse_options(_OPTIONS[data.source], data.options, source=data.source)
    path = getattr(chosen, "path", None)
    if isinstance(path, str):
        require_there(path, code_folder)


def open_source(data: DataSpec, code_folder: Path, seed: int = 0) -> Source:
    """The source that a run file names; looks at its files, but reads no example yet.

    Args:
        data: the run file's `data`.
        code_folder: the run file's folder, which relative paths start from.
        seed: `train.seed`, from which what a function of the user's draws follows.

    Raises:
        RunFileError: no such source, or an option that it cannot use.
        SourceError: what it should read is missing or empty.
    """
    if ":" in data.source:
        return function(data.source, data.options, code_folder, settled=data.batched is False, seed=seed)
    return _built_in(data.source)(data.options, code_folder)


def _built_in(name: str) -> Callable[[Mapping[str, Any], Path], Source]:
    built_in = _BUILT_IN.get(name)
    if built_in is None:
        raise RunFileError(
            f"data.source: {name!r} is no built-in source; {suggestion(name, _BUILT_IN)}; "
            "or name a generator function of your own, as data.py:load"
        )
    return built_in
