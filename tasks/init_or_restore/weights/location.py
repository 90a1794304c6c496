"""Where initial weights lie, and of what kind they are: looked at without TensorFlow, so typing errors are quick."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.foundation.contracts.run_spec import WeightsSource
from tasks.foundation.errors import ModelError, WeightsError
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.opening import open_storage
from tasks.foundation.user_code import require_function

Kind = Literal["function", "hdf5", "keras", "saved_model", "checkpoint", "run"]

IN_WORDS: dict[Kind, str] = {
    "function": "a function",
    "hdf5": "an HDF5 file of Keras",
    "keras": "a .keras file",
    "saved_model": "a SavedModel",
    "checkpoint": "a TensorFlow checkpoint",
    "run": "a Baton run",
}
_FIRST_ENTRY = "log/00000000.json"
_INDEX = ".index"
_ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://.*", re.DOTALL)
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a source lies.

    Attributes:
        kind: what is there.
        storage: the folder that it is, or that it lies in; of a function, the run file's folder.
        name: the file within, or what the names of a checkpoint's files begin with; empty for a folder.
        uri: its absolute path or its address.
    """

    kind: Kind
    storage: Storage
    name: str
    uri: str


def locate(source: WeightsSource, code_folder: Path) -> Place:
    """Find out what is at the address of a source; reads names only.

    Args:
        source: names a function, or a path that is absolute, relative to `code_folder`, or an address as gs://….
        code_folder: the run file's folder.

    Raises:
        WeightsError: nothing is there, or nothing of a known kind.
        InvalidInput: no store of that kind is known.
    """
    address = source.source
    place = _function(address, code_folder) if names_function(address) else _find(address, code_folder)
    if source.step is not None and place.kind != "run":
        raise WeightsError(
            f"{_where(address)} is {IN_WORDS[place.kind]}, and step: {source.step} is for Baton runs; leave it out"
        )
    return place


def names_function(address: str) -> bool:
    """Whether an address is meant as `file.py:name` or `package.module:name`."""
    return ":" in address and "://" not in address and address.rpartition(":")[2].isidentifier()


def _function(address: str, code_folder: Path) -> Place:
    try:
        require_function(address, code_folder)
    except ModelError as fault:
        raise WeightsError(f"{_where(address)}: {fault}") from fault
    return Place(kind="function", storage=LocalStorage(code_folder), name=address, uri=address)


def _find(address: str, code_folder: Path) -> Place:
    folder, storage, name = _opened(address, code_folder)
    uri = str(code_folder.absolute() / Path(_plain(address)).expanduser()) if _is_local(address) else address
    if storage is not None and storage.exists(name):
        if name.endswith((".h5", ".hdf5")):
            return Place(kind="hdf5", storage=storage, name=name, uri=uri)
        if name.endswith(".keras"):
            return Place(kind="keras", storage=storage, name=name, uri=uri)
        if name.endswith(_INDEX):
            return Place(kind="checkpoint", storage=storage, name=name.removesuffix(_INDEX), uri=uri)
        raise WeightsError(f"{_where(address)}: {uri} is a file of no known kind; name {_KNOWN}")
    if storage is not None and storage.exists(f"{name}{_INDEX}"):
        return Place(kind="checkpoint", storage=storage, name=name, uri=uri)
    if folder is None:
        raise WeightsError(f"{_where(address)}: nothing is at {uri}{_beside(storage)}; name {_KNOWN}")
    return _in_folder(address, folder, uri)


def _in_folder(address: str, folder: Storage, uri: str) -> Place:
    if folder.exists(_FIRST_ENTRY):
        return Place(kind="run", storage=_fenced(folder, uri), name="", uri=uri)
    if folder.exists("saved_model.pb"):
        return Place(kind="saved_model", storage=folder, name="variables/variables", uri=uri)
    if folder.exists("manifest.json") and folder.exists("ckpt.index"):
        raise WeightsError(
            f"{_where(address)}: {uri} is a checkpoint of a Baton run; name the run's home, and its step under step:, "
            "so that its bytes are compared with the log"
        )
    names = sorted(path for path in folder.files("") if path.endswith(_INDEX) and "/" not in path)
    if not names:
        raise WeightsError(f"{_where(address)}: the folder {uri} holds no weights of a known kind; name {_KNOWN}")
    if len(names) > 1:
        # The newest one by its name or by a clock would be a guess, and TensorFlow's `checkpoint` file may lie.
        several = ", ".join(name.removesuffix(_INDEX) for name in names[:_SHOWN])
        raise WeightsError(
            f"{_where(address)}: the folder {uri} holds {len(names)} checkpoints ({several}); name one of them, as "
            f"{address.rstrip('/')}/{names[-1].removesuffix(_INDEX)}"
        )
    return Place(kind="checkpoint", storage=folder, name=names[0].removesuffix(_INDEX), uri=uri)


def _fenced(folder: Storage, uri: str) -> Storage:
    """A run's home, whose files name others: those must lie in it. Weights of other kinds may be links to anywhere."""
    return LocalStorage(folder.root) if isinstance(folder, LocalStorage) else open_storage(uri, relative_to=Path("/"))


def _opened(address: str, code_folder: Path) -> tuple[Storage | None, Storage | None, str]:
    """The address as a folder, None if there is none; the folder above; and the last part of the name."""
    if not _is_local(address):
        above, _, name = address.rstrip("/").rpartition("/")
        parent = open_storage(above, relative_to=code_folder, fenced=False) if not above.endswith((":", ":/")) else None
        remote = open_storage(address, relative_to=code_folder, fenced=False)
        return (remote if next(iter(remote.files("")), None) else None), parent, name
    try:
        path = (code_folder / Path(_plain(address)).expanduser()).resolve()
        folder = LocalStorage(path, fenced=False) if path.is_dir() else None
        parent = LocalStorage(path.parent, fenced=False) if path.parent.is_dir() else None
    except (OSError, ValueError, RuntimeError) as fault:
        raise WeightsError(f"{_where(address)} is no path ({fault}); name {_KNOWN}") from fault
    return folder, parent, path.name


def _is_local(address: str) -> bool:
    return not _ADDRESS.fullmatch(address)


def _plain(address: str) -> str:
    return address.removeprefix("file://")


def _where(address: str) -> str:
    return f"init.weights: {address}"


def _beside(storage: Storage | None) -> str:
    if not isinstance(storage, LocalStorage):
        return ""
    names = sorted(entry.name for entry in storage.root.iterdir())
    return f"; {storage.root} holds {', '.join(names[:_SHOWN]) or 'nothing'}{', …' if len(names) > _SHOWN else ''}"


_KNOWN = (
    "a .weights.h5, .h5 or .keras file, the folder of a SavedModel, a checkpoint of TensorFlow (its name without "
    ".index), the home of a Baton run, or a function, weights.py:load"
)
