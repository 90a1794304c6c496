"""Where an export goes: a new file or folder of this machine, there as a whole or not at all."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from tasks.foundation.errors import InvalidInput, StorageError

Form = Literal["keras", "weights", "saved_model", "checkpoint"]
FORMS: tuple[str, ...] = get_args(Form)
_ENDINGS = {"keras": ".keras", "weights": ".weights.h5"}
# In this order: of w.weights.h5 and w.weights only w is left.
_OTHER_ENDINGS = (".h5", ".hdf5", ".keras", ".weights")


def require_free_target(form: str, target: Path) -> None:
    """Refuse what cannot be written, before anything is waited for.

    Args:
        form: one of `FORMS`.
        target: .keras and .weights.h5 are files, saved_model and checkpoint folders.

    Raises:
        InvalidInput: no such form, something is there already, or the name or its folder will not do.
    """
    if form not in FORMS:
        raise InvalidInput(f"--format {form} is unknown; say one of {', '.join(FORMS)}")
    if "://" in str(target) or str(target).startswith(("gs:/", "memory:/")):
        raise InvalidInput(f"--to {target}: an export is written on this machine; name a path, and copy it from there")
    ending = _ENDINGS.get(form, "")
    if not target.name.endswith(ending):
        better = target.with_name(_bare(target.name) + ending)
        raise InvalidInput(f"--to {target}: the name of a {form} export ends in {ending}; name {better}")
    if target.exists() or target.is_symlink():
        raise InvalidInput(f"--to {target} is there already, and nothing is overwritten; name another path")
    if not target.absolute().parent.is_dir():
        raise InvalidInput(f"--to {target}: the folder {target.absolute().parent} is not there; make it first")


def _bare(name: str) -> str:
    """The name without what another form's name ends in: w of w.h5."""
    bare = name
    for ending in _OTHER_ENDINGS:
        bare = bare.removesuffix(ending)
    return bare or name


@contextmanager
def made_whole(form: str, target: Path) -> Iterator[Path]:
    """A path beside the target to write to, with its ending; moved to the target if nothing goes wrong.

    Raises:
        InvalidInput: meanwhile somebody else wrote there.
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
            f"--to {target}: cannot be written: {fault.strerror or fault}; free some space there, or name another path"
        ) from fault
