"""Saves a run's resolved run file and code in its home, create-only and named by content.

The log's identity names the newest; an accepted change adds another file. So the code of each commit can be found.
"""

import posixpath
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from tasks.foundation.contracts.home_files import refuse_unreadable
from tasks.foundation.contracts.model_summary import ModelSummary
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.saved_code import SAVED_CODE, SavedCode, saved_code_path
from tasks.foundation.errors import FileAlreadyThere, ModelError
from tasks.foundation.messages import message
from tasks.foundation.model.code_digest import files_beside, source_digest
from tasks.foundation.model.git_revision import git_revision
from tasks.foundation.storage.base import Storage

MOST_BYTES: Final = 4 << 20
_FILE_REFERENCE = re.compile(r".+\.py:\w+")


def functions_of(spec: RunSpec) -> tuple[str, ...]:
    """Return the functions that a run file names, as `model.py:build_model` or `package.module:function`."""
    weights = (each.source for each in spec.init.weights if _FILE_REFERENCE.fullmatch(each.source))
    named = [spec.model.build, *spec.data.all_sources, spec.train.callbacks, *spec.data.transforms, *weights]
    return tuple(dict.fromkeys(reference for reference in named if reference is not None and ":" in reference))


def file_references(spec: RunSpec) -> tuple[str, ...]:
    """Return those of `functions_of` that are in files of the run file's folder."""
    return tuple(filter(_FILE_REFERENCE.fullmatch, functions_of(spec)))


def collect_code(spec: RunSpec, folder: Path) -> dict[str, bytes]:
    """Read the files of the functions that a run file names, and what they import from their own folders.

    Args:
        spec: the run file.
        folder: its folder.

    Returns:
        The contents by path, relative to `folder`. A file that does not exist is left out.

    Raises:
        ModelError: they have more than `MOST_BYTES` bytes together, or a file cannot be read.
    """
    files: dict[str, bytes] = {}
    for reference in file_references(spec):
        module = reference.rpartition(":")[0]
        for name, file in files_beside(module, folder).items():
            path = posixpath.normpath(posixpath.join(posixpath.dirname(module), name))
            try:
                files[path] = file.read_bytes()
            except OSError as fault:
                raise ModelError(f"{reference}: {file} cannot be read: {fault.strerror}; check it") from fault
    size = sum(map(len, files.values()))
    if size > MOST_BYTES:
        largest = max(files, key=lambda path: len(files[path]))
        raise ModelError(
            message(
                f"the code of the run file has {size} bytes in {len(files)} files, more than the {MOST_BYTES} that "
                f"are saved in the run's home; the largest is {largest} ({len(files[largest])} bytes)",
                hints=[
                    "keep data in a file that the code reads, or name an installed package: package.module:function"
                ],
            )
        )
    return files


def require_savable(spec: RunSpec, folder: Path) -> None:
    """Refuse a run file and code that are too large to be saved in a home.

    Raises:
        ModelError: see `collect_code`.
        TooLargeToWrite: the run file has too many values.
    """
    data = SavedCode.of(spec, collect_code(spec, folder)).to_json()
    refuse_unreadable(saved_code_path(data), data)


def edited_files(saved: SavedCode, spec: RunSpec, folder: Path) -> tuple[str, ...]:
    """Return the files whose code is not as in saved code, by path; comments and layout do not count.

    Args:
        saved: what a home has.
        spec: the run file.
        folder: its folder.

    Raises:
        ModelError: see `collect_code`.
    """
    now, before = collect_code(spec, folder), {file.path: file.content for file in saved.files}
    digests = [{path: source_digest(data) for path, data in files.items()} for files in (before, now)]
    return tuple(sorted(path for path in before.keys() | now.keys() if digests[0].get(path) != digests[1].get(path)))


def save_code(home: Storage, spec: RunSpec, folder: Path, model: ModelSummary | None = None) -> dict[str, str]:
    """Save the run file and its code, unless the home has them.

    Args:
        home: the run's.
        spec: the run file.
        folder: its folder.
        model: what the code builds.

    Returns:
        What the log's identity records of it.

    Raises:
        ModelError: see `collect_code`.
        StorageError: the store refused or failed.
    """
    files = collect_code(spec, folder)
    data = SavedCode.of(spec, files, git_revision(folder, files), model).to_json()
    path = saved_code_path(data)
    with suppress(FileAlreadyThere):  # it is named after its content
        home.create(path, data)
    return {SAVED_CODE: path}
