"""The target of an export: a new local file or folder, written completely or not at all, with its `serving.json`."""

import errno
import importlib.util
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from baton.tasks.foundation.errors import InvalidInput, StorageError
from baton.tasks.foundation.storage.local_files import temporary_folder
from baton.tasks.foundation.text import Words, listed, option

Form = Literal["keras", "weights", "saved_model", "checkpoint", "litert", "onnx", "openvino"]
FORMS: tuple[str, ...] = get_args(Form)
# Those for runtimes other than TensorFlow, and the modules that each needs. Its extra has the same name.
RUNTIMES = {
    "litert": ("ai_edge_litert",),
    "onnx": ("onnx", "onnxruntime", "tf2onnx"),
    "openvino": ("openvino",),
}
# Those that hold variables and no computation.
VALUES = frozenset({"weights", "checkpoint"})
# Largest difference between the model's predictions and those of an export, see `serving.difference`.
TOLERANCE = 1e-3
# Of bfloat16 three decimals are noise, and TensorFlow fuses operations in the graph of a SavedModel; and where Keras
# rounds what it merges.
TOLERANCE_OF_ROUNDED = 0.03
ENDINGS = {"keras": ".keras", "weights": ".weights.h5", "litert": ".tflite", "onnx": ".onnx"}
# In this order, both w.weights.h5 and w.weights become w.
_OTHER_ENDINGS = (".h5", ".hdf5", ".keras", ".weights", ".tflite", ".onnx")
_SERVING = "serving.json"


def form_of(target: Path) -> str:
    """The form that the name of a target says.

    Raises:
        InvalidInput: it says none.
    """
    for form, ending in ENDINGS.items():
        if target.name.endswith(ending):
            return form
    raise InvalidInput(
        _to(target)
        + f": the name does not say the format; let it end in {' or '.join(ENDINGS.values())}, or add "
        + option("format", "saved_model")
        + ", checkpoint or openvino"
    )


def require_runtime(form: str, tolerance: float | None) -> float:
    """Refuse a form whose packages are not installed here, before TensorFlow is imported.

    Args:
        form: one of `FORMS`.
        tolerance: as the user gave it, see `TOLERANCE`.

    Returns:
        The tolerance.

    Raises:
        InvalidInput: a package is missing, or the tolerance is not usable.
    """
    modules = RUNTIMES.get(form, ())
    if tolerance is not None and form in VALUES:
        raise InvalidInput(
            option("tolerance", tolerance)
            + f": a {form} export has no predictions to compare; drop it, or use "
            + option("format", "keras")
            + "".join(f", {form}" for form in FORMS if form not in {"keras", *VALUES})
        )
    if tolerance is not None and not (tolerance >= 0 and math.isfinite(tolerance)):
        words = f" is no difference; use a number from 0 on, such as {TOLERANCE:g}"
        raise InvalidInput(option("tolerance", tolerance) + words)
    missing = [name.replace("_", "-") for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidInput(
            option("format", form)
            + f" needs {listed(missing)}, not installed here; install the extra `{form}` of Baton, or use "
            + option("format", "saved_model")
        )
    return TOLERANCE if tolerance is None else tolerance


def require_free_target(form: str, target: Path) -> None:
    """Refuse a target that cannot be written, before any work.

    Args:
        form: one of `FORMS`.
        target: a file if its form has an ending, else a folder.

    Raises:
        InvalidInput: the form is unknown, the target exists, or its name or folder cannot be used.
    """
    if form not in FORMS:
        raise InvalidInput(option("format", form) + f" is unknown; use one of {', '.join(FORMS)}")
    if "://" in str(target) or str(target).startswith(("gs:/", "memory:/")):
        words = ": exports are written to a local path; name one, and copy the export from there"
        raise InvalidInput(_to(target) + words)
    ending = ENDINGS.get(form, "")
    if not target.name.endswith(ending):
        better = target.with_name(_bare(target.name) + ending)
        raise InvalidInput(_to(target) + f": the name of a {form} export must end in {ending}; use {better}")
    if target.exists() or target.is_symlink():
        raise InvalidInput(_to(target) + " already exists; use another path")
    if not target.absolute().parent.is_dir():
        raise InvalidInput(_to(target) + f": the folder {target.absolute().parent} does not exist; create it first")
    if not os.access(target.absolute().parent, os.W_OK):
        raise InvalidInput(_to(target) + f": {target.absolute().parent} cannot be written to; use another folder")


def _to(target: Path) -> Words:
    return option("to", str(target))


def _bare(name: str) -> str:
    """The name without the ending of another form: `w` for `w.h5`."""
    bare = name
    for ending in _OTHER_ENDINGS:
        bare = bare.removesuffix(ending)
    return bare or name


def serving_path(form: str, target: Path) -> Path:
    """Where an export is described: in its folder, or beside its file."""
    return target.with_name(f"{target.name}.{_SERVING}") if form in ENDINGS else target / _SERVING


@contextmanager
def atomic_target(form: str, target: Path) -> Iterator[Path]:
    """A temporary path with the target's ending. It is moved to the target when the block succeeds.

    It is in the system's folder for temporary files, so a killed process leaves nothing beside the target; on another
    disk than that, only if it is killed during the last copy. The next export removes what is left, there as here.

    The block also writes the description at the path's `serving_path`. A description that no export has is replaced.

    Raises:
        InvalidInput: the target was created meanwhile.
        StorageError: the disk refused or failed.
    """
    beside = target.absolute().parent
    try:
        with temporary_folder("baton-export-") as folder:
            written = folder / f"export{ENDINGS.get(form, '')}"
            yield written
            require_free_target(form, target)
            try:
                _move(form, written, target)
            except OSError as fault:
                if fault.errno != errno.EXDEV:
                    raise
                with temporary_folder(".baton-export-", within=beside) as near:
                    shutil.copytree(folder, near, dirs_exist_ok=True)
                    _move(form, near / written.name, target)
    except OSError as fault:
        raise StorageError(
            _to(target)
            + f": cannot be written: {fault.strerror or fault}; free some space there and in "
            + f"{tempfile.gettempdir()}, or name other folders with "
            + option("to")
            + " and TMPDIR"
        ) from fault


def _move(form: str, written: Path, target: Path) -> None:
    if form in ENDINGS:
        serving_path(form, written).replace(serving_path(form, target))
    written.rename(target)
