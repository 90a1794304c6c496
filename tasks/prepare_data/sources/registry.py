"""Opens the source that the run file names."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.errors import RunFileError
from baton.tasks.foundation.telemetry.events import Note
from baton.tasks.prepare_data.sources.digits import digits
from baton.tasks.prepare_data.sources.function import function
from baton.tasks.prepare_data.sources.huggingface import HuggingfaceOptions, huggingface
from baton.tasks.prepare_data.sources.image_folders import ImagesOptions, images
from baton.tasks.prepare_data.sources.npz_arrays import NpzOptions, npz
from baton.tasks.prepare_data.sources.source import Options, Source, parse_options, suggestion
from baton.tasks.prepare_data.sources.source_files import require_local_path
from baton.tasks.prepare_data.sources.table import TableOptions, table
from baton.tasks.prepare_data.sources.tar_files import TarOptions, tar
from baton.tasks.prepare_data.sources.text_bytes import TextOptions, text
from baton.tasks.prepare_data.sources.tfds_folders import TfdsOptions, tfds
from baton.tasks.prepare_data.sources.tfrecord_files import TfrecordOptions, tfrecord

_BUILT_IN: dict[str, Callable[[Mapping[str, Any], Path], Source]] = {
    "digits": digits,
    "images": images,
    "npz": npz,
    "tar": tar,
    "text": text,
    "tfds": tfds,
    "tfrecord": tfrecord,
}
# Those whose examples `data.pad` and `data.pack` bring to one length.
_WITH_SEQUENCES: dict[str, Callable[..., Source]] = {"huggingface": huggingface, "table": table}

# The `data.options` of each source.
_OPTIONS: dict[str, type[Options]] = {
    "digits": Options,
    "huggingface": HuggingfaceOptions,
    "images": ImagesOptions,
    "npz": NpzOptions,
    "table": TableOptions,
    "tar": TarOptions,
    "text": TextOptions,
    "tfds": TfdsOptions,
    "tfrecord": TfrecordOptions,
}


def require_source(data: DataSpec, code_folder: Path) -> None:
    """Refuse early what `open_source` would refuse. Checks the run file, and whether one local path exists.

    Args:
        data: the run file's `data`; a built-in source.
        code_folder: the run file's folder; relative paths start there.

    Raises:
        RunFileError: the source is unknown, or an option cannot be used.
        SourceError: the file or folder does not exist.
    """
    _require_known(data.source)
    _require_function_keys_unset(data)
    chosen = parse_options(_OPTIONS[data.source], data.options, source=data.source)
    path = getattr(chosen, "path", None)
    if isinstance(path, str):
        require_local_path(path, code_folder)


def open_source(
    data: DataSpec,
    code_folder: Path,
    seed: int = 0,
    *,
    accepted: bool = False,
    note: Callable[[Note], None] = lambda _: None,
) -> Source:
    """Open the source that the run file names; inspects its files, but reads no example.

    Args:
        data: the run file's `data`.
        code_folder: the run file's folder; relative paths start there.
        seed: `train.seed`; random numbers of a user's function derive from it.
        accepted: the run has begun with these examples, so they are not refused as ambiguous.
        note: receives how a user's function is read, which files are not read, and warnings, for the log.

    Raises:
        RunFileError: the source is unknown, or an option cannot be used.
        SourceError: the data is missing or empty.
    """
    if ":" in data.source:
        return function(data, code_folder, seed=seed, accepted=accepted, note=note)
    _require_known(data.source)
    _require_function_keys_unset(data)
    if data.source in _WITH_SEQUENCES:
        has_sequences = data.pad is not None or data.pack is not None
        source = _WITH_SEQUENCES[data.source](data.options, code_folder, sequences=has_sequences)
    else:
        source = _BUILT_IN[data.source](data.options, code_folder)
    if source.left_out:
        note(Note(text=source.left_out))
    return source


def _require_function_keys_unset(data: DataSpec) -> None:
    """Refuse keys that only a user's function has, and that a built-in source would ignore."""
    given: dict[str, object] = {"examples": data.examples, "batched": data.batched or None}
    if data.pad is not None and data.source not in _WITH_SEQUENCES:
        given["pad"] = {name: rule.length for name, rule in data.pad.items()}
    if data.pack is not None and data.source not in _WITH_SEQUENCES:
        given["pack"] = data.pack.length
    for key, value in given.items():
        if value is not None:
            raise RunFileError(
                f"data.{key}: {value}: the source {data.source} does not use it; remove it, or read the data in your "
                "own data.py:load"
            )


def _require_known(name: str) -> None:
    if name == "csv":
        raise RunFileError(
            "data.source: csv is part of table now; write source: table, with y in place of label, x in place of "
            "features, and stack: true; if x has only columns of integers, types: {column: float64} makes them floats"
        )
    if name not in _OPTIONS:
        raise RunFileError(
            f"data.source: {name!r} is not a built-in source; {suggestion(name, _OPTIONS)}; "
            "or name your own function, such as data.py:load"
        )
