"""The target of an export: a new local file or folder, written completely or not at all."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from tasks.foundation.errors import InvalidInput, StorageError

Form = Literal["keras", "weights", "saved_model", "checkpoint"]
FORMS: tuple[str, ...] = get_args(Form)
_ENDINGS = {"keras": ".keras", "weights": ".weights.h5"}
# In this order, both w.weights.h5 and w.weights become w.
_OTHER_ENDINGS = (".h5", ".hdf5", ".keras", ".weights")


def form_of(target: Path) -> str:
    """The form that the name of a target says.

    Raises:
        InvalidInput: it says none.
    """
    for form, ending in _ENDINGS.items():
        if target.name.endswith(ending):
            return form
    raise InvalidInput(
        f"--to {target}: the name does not say the format; let it end in {' or '.join(_ENDINGS.values())}, or add "
        "--format saved_model or --format checkpoint"
    )


def require_free_target(form: str, target: Path) -> None:
    """Refuse a target that cannot be written, before any work.

    Args:
        form: one of `FORMS`.
        target: a file for keras and weights, a folder for saved_model and checkpoint.

    Raises:
        InvalidInput: the form is unknown, the target exists, or its name or folder cannot be used.
    """
    if form not in FORMS:
        raise InvalidInput(f"--format {form} is unknown; use one of {', '.join(FORMS)}")
    if "://" in str(target) or str(target).startswith(("gs:/", "memory:/")):
        raise InvalidInput(
            f"--to {target}: exports are written to a local path; name one, and copy the export from there"
        )
    ending = _ENDINGS.get(form, "")
    if not target.name.endswith(ending):
        better = target.with_name(_bare(target.name) + ending)
        raise InvalidInput(f"--to {target}: the name of a {form} export must end in {ending}; use {better}")
    if target.exists() or target.is_symlink():
        raise InvalidInput(f"--to {target} already exists; use another path")
    if not target.absolute().parent.is_dir():
        raise InvalidInput(f"--to {target}: the folder {target.absolute().parent} does not exist; create it first")


def _bare(name: str) -> str:
    """The name without the ending of another form: `w` for `w.h5`."""
    bare = name
    for ending in _OTHER_ENDINGS:
        bare = bare.removesuffix(ending)
    return bare or name


@contextmanager
def atomic_target(form: str, target: Path) -> Iterator[Path]:
    """A temporary path beside the target, with its ending. It is moved to the target when the block succeeds.

    Raises:
        InvalidInput: the target was created meanwhile.
        StorageError: the disk refused or failed.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".baton-export-", dir=target.absolute().parent) as folder:
            written = Path(folder) / f"export{_ENDINGS.get(form, '')}"
            yield written
            require_free_target(form, target)
            written.rename(target)
    except OSError as fault:
        raise StorageError(
            f"--to {target}: cannot be written: {fault.strerror or fault}; free some space there, or use another path"
        ) from fault
