"""Finds initial weights and their kind, without TensorFlow, so that a wrong address is reported quickly."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.tasks.foundation.contracts.run_spec import WeightsSource
from baton.tasks.foundation.errors import ModelError, WeightsError
from baton.tasks.foundation.log.files import FIRST_ENTRY
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.opening import open_storage
from baton.tasks.foundation.user_functions import require_function

Kind = Literal["function", "hdf5", "keras", "preset", "saved_model", "checkpoint", "run"]

KIND_NAMES: dict[Kind, str] = {
    "function": "a function",
    "hdf5": "an HDF5 file of Keras",
    "keras": "a .keras file",
    "preset": "a preset of KerasHub",
    "saved_model": "a SavedModel",
    "checkpoint": "a TensorFlow checkpoint",
    "run": "a Baton run",
}
PRESET_CONFIG, PRESET_WEIGHTS = "config.json", "model.weights.h5"
_INDEX = ".index"
_ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://.*", re.DOTALL)
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLocation:
    """Where a source of weights is.

    Attributes:
        kind: the kind of source.
        storage: the folder, or the folder that holds the file; for a function, the run file's folder.
        name: the file's name, or the prefix of a checkpoint's files; empty for a folder.
        uri: absolute path or address.
    """

    kind: Kind
    storage: Storage
    name: str
    uri: str


def locate_weights(source: WeightsSource, code_folder: Path) -> WeightsLocation:
    """Find the kind of a source from file names only.

    Args:
        source: names a function, an absolute path, a path relative to `code_folder`, or an address such as gs://….

    Raises:
        WeightsError: there is nothing, or nothing of a known kind.
        InvalidInput: the address has an unknown scheme.
    """
    address = source.source
    location = _function(address, code_folder) if names_function(address) else _find(address, code_folder)
    if source.step is not None and location.kind != "run":
        raise WeightsError(
            f"{_where(address)} is {KIND_NAMES[location.kind]}, but step: {source.step} is for Baton runs; remove it"
        )
    return location


def names_function(address: str) -> bool:
    """Whether an address is `file.py:name` or `package.module:name`."""
    return ":" in address and "://" not in address and address.rpartition(":")[2].isidentifier()


def _function(address: str, code_folder: Path) -> WeightsLocation:
    try:
        require_function(address, code_folder)
    except ModelError as fault:
        raise WeightsError(f"{_where(address)}: {fault}") from fault
    return WeightsLocation(kind="function", storage=LocalStorage(code_folder), name=address, uri=address)


def _find(address: str, code_folder: Path) -> WeightsLocation:
    folder, storage, name = _opened(address, code_folder)
    uri = str(code_folder.absolute() / Path(_plain(address)).expanduser()) if _is_local(address) else address
    if storage is not None and storage.exists(name):
        if name.endswith((".h5", ".hdf5")):
            return WeightsLocation(kind="hdf5", storage=storage, name=name, uri=uri)
        if name.endswith(".keras"):
            return WeightsLocation(kind="keras", storage=storage, name=name, uri=uri)
        if name.endswith(_INDEX):
            return WeightsLocation(kind="checkpoint", storage=storage, name=name.removesuffix(_INDEX), uri=uri)
        raise WeightsError(f"{_where(address)}: the kind of the file {uri} is unknown; name {_KNOWN_KINDS}")
    if storage is not None and storage.exists(f"{name}{_INDEX}"):
        return WeightsLocation(kind="checkpoint", storage=storage, name=name, uri=uri)
    if folder is None:
        raise WeightsError(f"{_where(address)}: {uri} does not exist{_beside(storage)}; name {_KNOWN_KINDS}")
    return _in_folder(address, folder, uri)


def _in_folder(address: str, folder: Storage, uri: str) -> WeightsLocation:
    if folder.exists(FIRST_ENTRY):
        return WeightsLocation(kind="run", storage=_guarded_home(folder, uri), name="", uri=uri)
    if folder.exists("saved_model.pb"):
        return WeightsLocation(kind="saved_model", storage=folder, name="variables/variables", uri=uri)
    if folder.exists("manifest.json") and folder.exists("ckpt.index"):
        raise WeightsError(
            f"{_where(address)}: {uri} is a checkpoint of a Baton run; name the run's home, and set step: to the "
            "checkpoint's step, so that its bytes are compared with the log"
        )
    if folder.exists(PRESET_CONFIG) and folder.exists(PRESET_WEIGHTS):
        return WeightsLocation(kind="preset", storage=folder, name="", uri=uri)
    for name, remedy in _OTHER_PRESETS.items():
        if folder.exists(name):
            raise WeightsError(f"{_where(address)}: {uri} has {name} in place of {PRESET_WEIGHTS}; {remedy}")
    names = sorted(path for path in folder.files("", deep=False) if path.endswith(_INDEX))
    if not names:
        raise WeightsError(f"{_where(address)}: the folder {uri} holds no weights of a known kind; name {_KNOWN_KINDS}")
    if len(names) > 1:
        # Choosing the newest by name or time would be a guess, and TensorFlow's `checkpoint` file may be wrong.
        several = ", ".join(name.removesuffix(_INDEX) for name in names[:_SHOWN])
        raise WeightsError(
            f"{_where(address)}: the folder {uri} holds {len(names)} checkpoints ({several}); name one of them, such "
            f"as {address.rstrip('/')}/{names[-1].removesuffix(_INDEX)}"
        )
    return WeightsLocation(kind="checkpoint", storage=folder, name=names[0].removesuffix(_INDEX), uri=uri)


def _guarded_home(folder: Storage, uri: str) -> Storage:
    """Return a run's home as a store whose files must be inside it; other kinds of weights may link anywhere."""
    return LocalStorage(folder.root) if isinstance(folder, LocalStorage) else open_storage(uri, relative_to=Path("/"))


def _opened(address: str, code_folder: Path) -> tuple[Storage | None, Storage | None, str]:
    """Return the folder at the address, or None; its parent folder; and the last part of its name."""
    if not _is_local(address):
        above, _, name = address.rstrip("/").rpartition("/")
        parent = (
            open_storage(above, relative_to=code_folder, guarded=False) if not above.endswith((":", ":/")) else None
        )
        remote = open_storage(address, relative_to=code_folder, guarded=False)
        return (remote if next(iter(remote.files("")), None) else None), parent, name
    try:
        path = (code_folder / Path(_plain(address)).expanduser()).resolve()
        folder = LocalStorage(path, guarded=False) if path.is_dir() else None
        parent = LocalStorage(path.parent, guarded=False) if path.parent.is_dir() else None
    except (OSError, ValueError, RuntimeError) as fault:
        raise WeightsError(f"{_where(address)} is not a path ({fault}); name {_KNOWN_KINDS}") from fault
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


_KNOWN_KINDS = (
    "a .weights.h5, .h5 or .keras file, the folder of a SavedModel or of a KerasHub preset, a TensorFlow checkpoint "
    "(its name without .index), the home of a Baton run, or a function such as weights.py:load"
)
_CONVERT = "convert it once: keras_hub.models.Backbone.from_preset(folder).save_to_preset(another folder)"
_OTHER_PRESETS = {
    "model.weights.json": "save the preset with save_to_preset(folder, max_shard_size=None), which writes one file",
    "model.safetensors": _CONVERT,
    "model.safetensors.index.json": _CONVERT,
}
