"""Reads a YAML file and `--set` overrides into a `RunSpec`, or refuses them with a remedy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.foundation.contracts.home_files import MOST_NESTED
from tasks.foundation.contracts.plain_yaml import KeyPath, Place, dotted, nested_too_deeply, parse, shortened, shown
from tasks.foundation.contracts.run_file_errors import SHOWN_ERRORS, explain
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import RunFileError

_LARGEST_FILE_BYTES = 1 << 20

# Keys that may be one text instead of a mapping, and the key in the mapping that the text is for.
_SHORT_FORMS: dict[KeyPath, str] = {("model",): "build", ("data", "validation"): "source", ("data", "test"): "source"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run file that was read and checked."""

    path: Path
    spec: RunSpec

    @property
    def folder(self) -> Path:
        """The folder that user code, data paths and a relative storage address start from."""
        return self.path.parent


def load_run_file(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read a run file. Writes nothing.

    Args:
        path: the YAML file.
        overrides: `a.b=c` each; the value is YAML, and the last override of a key wins.

    Raises:
        RunFileError: it cannot be used; the message has the file or override, the key, the value and the remedy.
    """
    places: dict[KeyPath, Place] = {}
    text = _read_text(path)
    data = parse(text, where=str(path), at=(), places=places)
    if data is None:
        raise RunFileError(f"{path} is empty; a run file is a mapping that starts with a line like  run: my-run")
    if not isinstance(data, dict):
        raise RunFileError(f"{path} holds {shown(data)}, not a mapping; start it with a line like  run: my-run")
    for override in overrides:
        _override(data, override, places)
    try:
        spec = RunSpec.model_validate(data)
    except ValidationError as faults:
        raise RunFileError(explain(faults, data, file=str(path), places=places)) from None
    if spec.train.epoch_examples is not None:
        raise RunFileError(f"{path}: train.epoch_examples is not for run files: it follows from the data; remove it")
    return RunFile(path=path.resolve(), spec=spec)


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise RunFileError(f"{path} is a folder; name the run file in it, such as {path / 'run.yaml'}")
        if not path.is_file():
            raise RunFileError(f"{path} does not exist{_beside(path)}")
        size = path.stat().st_size
        if size > _LARGEST_FILE_BYTES:
            raise RunFileError(f"{path} has {size} bytes, more than a run file's 1048576; is it the right file?")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise RunFileError(f"{path} is not UTF-8 text (byte {fault.start}); save it as UTF-8") from fault
    except OSError as fault:
        raise RunFileError(f"{path} cannot be read: {fault.strerror}; check its name and its permissions") from fault


def _beside(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; its folder {path.parent} does not exist either. Check the path"
    near = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in {".yaml", ".yml"})
    return f"; YAML files beside it: {', '.join(near[:SHOWN_ERRORS]) or 'none'}. Check the path"


def _override(data: dict[str, Any], override: str, places: dict[KeyPath, Place]) -> None:
    """Apply one `a.b=c` to the values of the run file."""
    where = f"--set {shortened(override)}"
    key, separator, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not separator or not all(path):
        raise RunFileError(f"{where} is not an override; write it as --set key=value, such as --set train.steps=1000")
    if len(path) > MOST_NESTED:
        raise RunFileError(f"{where}: {nested_too_deeply(path)}")
    mapping = data
    for depth, part in enumerate(path[:-1], start=1):
        below = mapping.get(part)
        if below is None:
            below = {}
            places[path[:depth]] = Place(where, None)
        elif path[:depth] in _SHORT_FORMS and isinstance(below, str):
            whole = _SHORT_FORMS[path[:depth]]
            below = {whole: below}
            places[*path[:depth], whole] = places[path[:depth]]
        elif not isinstance(below, dict):
            given = dotted(path[:depth])
            raise RunFileError(f"{where}: {given} is {shown(below)}, which has no keys in it; set {given} itself")
        mapping[part] = below
        mapping = below
    for old in [old for old in places if old[: len(path)] == path]:
        del places[old]
    mapping[path[-1]] = parse(text, where=where, at=path, places=places)
    places.setdefault(path, Place(where, None))
