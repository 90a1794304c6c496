"""From a YAML file and `--set` overrides to a `RunSpec`, or one paragraph that says what to change."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tasks.foundation.contracts.plain_yaml import KeyPath, Place, dotted, parse, shortened, shown
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import RunFileError

_LARGEST_FILE_BYTES = 1 << 20
_FAULTS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run file that was read and found good."""

    path: Path
    spec: RunSpec

    @property
    def folder(self) -> Path:
        """User code, data paths and a relative storage are relative to it."""
        return self.path.parent


def load_run_file(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read a run file. Writes nothing.

    Args:
        path: the YAML file.
        overrides: `a.b=c` each; the value is YAML, the last one of a key wins.

    Raises:
        RunFileError: naming the file or the override, the key, the value and the remedy.
    """
    places: dict[KeyPath, Place] = {}
    text = _read_text(path)
    data = parse(text, where=str(path), at=(), places=places)
    if data is None:
        raise RunFileError(f"{path} is empty; a run file is a mapping that begins like  run: my-run")
    if not isinstance(data, dict):
        raise RunFileError(f"{path} holds {shown(data)}, not a mapping; begin it like  run: my-run")
    for override in overrides:
        _override(data, override, places)
    try:
        spec = RunSpec.model_validate(data)
    except ValidationError as faults:
        raise RunFileError(_explain(faults, data, file=str(path), places=places)) from None
    return RunFile(path=path.resolve(), spec=spec)


# Pydantic's kinds of faults, in words that go on after `which is`.
_WRONG = {
    "int_type": "not a whole number",
    "int_from_float": "not a whole number",
    "float_type": "not a number",
    "bool_type": "neither true nor false",
    "string_type": "not text",
    "dict_type": "not a mapping of keys",
    "model_type": "not a mapping of keys",
    "literal_error": "not {expected}",
    "string_too_short": "too short",
    "greater_than_equal": "not at least {ge}",
    "greater_than": "not above {gt}",
    "less_than_equal": "not at most {le}",
    "less_than": "not below {lt}",
    "finite_number": "not finite",
}


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise RunFileError(f"{path} is a folder; name the run file in it, such as {path / 'run.yaml'}")
        if not path.is_file():
            raise RunFileError(f"{path} is not there{_beside(path)}")
        size = path.stat().st_size
        if size > _LARGEST_FILE_BYTES:
            raise RunFileError(f"{path} has {size} bytes, more than a run file's 1048576; is it the right file?")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise RunFileError(f"{path} is not UTF-8 text (byte {fault.start}); save it as UTF-8") from fault
    except OSError as fault:
        raise RunFileError(f"{path} cannot be read: {fault.strerror}; check its name and who may read it") from fault


def _beside(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; neither is its folder {path.parent}. Check the path"
    near = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in {".yaml", ".yml"})
    return f"; beside it: {', '.join(near[:_FAULTS_SHOWN]) or 'no YAML files'}. Check the path"


def _override(data: dict[str, Any], override: str, places: dict[KeyPath, Place]) -> None:
    """Put one `a.b=c` into the run file's values."""
    where = f"--set {shortened(override)}"
    key, separator, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not separator or not all(path):
        raise RunFileError(f"{where} is not an override; write it as --set key=value, such as --set train.steps=1000")
    mapping = data
    for depth, part in enumerate(path[:-1], start=1):
        below = mapping.get(part)
        if below is None:
            below = {}
            places[path[:depth]] = Place(where, None)
        elif path[:depth] == ("model",) and isinstance(below, str):
            below = {"build": below}  # the short form of the key
            places["model", "build"] = places["model",]
        elif not isinstance(below, dict):
            given = dotted(path[:depth])
            raise RunFileError(f"{where}: {given} is {shown(below)}, which has no keys in it; set {given} itself")
        mapping[part] = below
        mapping = below
    for old in [old for old in places if old[: len(path)] == path]:
        del places[old]
    mapping[path[-1]] = parse(text, where=where, at=path, places=places)
    places.setdefault(path, Place(where, None))


def _explain(faults: ValidationError, data: dict[str, Any], *, file: str, places: dict[KeyPath, Place]) -> str:
    """Pydantic's findings in Baton's words: one line each, the first few."""
    lines: dict[KeyPath, str] = {}
    # A key that is mistyped is missing too, and under its wrong name it is found.
    for fault in sorted(faults.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden"):
        path = tuple(str(part) for part in fault["loc"])
        while path and fault["type"] != "missing" and path not in places:
            path = path[:-1]  # model: x is checked as model.build, a union's branches as keys of their own
        lines.setdefault(path, _sentence(fault, path, data, file=file, places=places))
    shown = list(lines.values())[:_FAULTS_SHOWN]
    more = len(lines) - len(shown)
    return "\n".join([*shown, f"{file}: and {more} more"] if more else shown)


def _sentence(
    fault: ErrorDetails, path: KeyPath, data: dict[str, Any], *, file: str, places: dict[KeyPath, Place]
) -> str:
    name = dotted(path)
    if fault["type"] == "missing":
        return f"{file}: {name} is missing; add it: {_description(path)}"
    value = _at(data, path)
    place = places.get(path, Place(file, None))
    spelled = place.spelling or shown(value)
    if fault["type"] == "extra_forbidden":
        return f"{place.where}: {name} (here {spelled}) is not a known key; {_did_you_mean(path)}"
    if fault["type"] == "value_error":
        text = str(fault["ctx"]["error"])
        if not isinstance(value, dict):
            return f"{place.where}: {name} is {spelled}: {text}"
        keys = _mentioned(text, value) or [()]
        full = [(*path, *key) for key in keys]
        given = ", ".join(f"{dotted(at)}: {shown(_at(data, at))}" for at in full)
        wheres = [found.where for at, found in places.items() if any(at[: len(key)] == key for key in full)]
        wheres.sort(key=lambda where: not where.startswith("--set "))  # what was asked for last is looked at first
        return f"{wheres[0] if wheres else file}: {text} (given: {given})"
    return f"{place.where}: {name} is {spelled}, which is {_wrong(fault, value)}; {_description(path)}"


def _wrong(fault: ErrorDetails, value: Any) -> str:
    """What is wrong with a value, after the words `which is`."""
    kind = fault["type"]
    if kind in {"int_type", "int_from_float"} and isinstance(value, float) and value.is_integer():
        return f"not spelled as a whole number, write {shortened(str(int(value)))}"
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "not text, put it in quotes"
    return _WRONG.get(kind, "not accepted").format_map(fault.get("ctx", {}))


def _mentioned(text: str, values: dict[str, Any]) -> list[KeyPath]:
    """The keys that a message speaks of and that have a value."""
    words = dict.fromkeys(re.findall(r"[a-z_]+(?:\.[a-z_]+)*", text))
    return [path for path in (tuple(word.split(".")) for word in words) if _at(values, path) is not None]


def _did_you_mean(path: KeyPath) -> str:
    siblings = [known for known in _known_paths(RunSpec) if known[:-1] == path[:-1]]
    near = get_close_matches(path[-1], [known[-1] for known in siblings], n=1)
    same = [known for known in _known_paths(RunSpec) if known[-1] == path[-1]]
    if near and not same:
        return f"did you mean {dotted((*path[:-1], near[0]))}?"
    elsewhere = same or [
        known for known in _known_paths(RunSpec) if known[-1] in get_close_matches(path[-1], [known[-1]])
    ]
    if elsewhere:
        return f"did you mean {dotted(elsewhere[0])}?"
    within = f" in {dotted(path[:-1])}" if path[:-1] else ""
    return f"the keys{within} are {', '.join(known[-1] for known in siblings)}"


def _known_paths(model: type[BaseModel], above: KeyPath = ()) -> list[KeyPath]:
    paths: list[KeyPath] = []
    for name, field in model.model_fields.items():
        paths.append((*above, name))
        below = _model_in(field.annotation)
        if below is not None:
            paths += _known_paths(below, (*above, name))
    return paths


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The contract that a field holds, also as `Contract | None`."""
    options = get_args(annotation) if get_origin(annotation) in {Union, UnionType} else (annotation,)
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def _description(path: KeyPath) -> str:
    """The description of the field at `path`: it says what the value should be."""
    model: type[BaseModel] | None = RunSpec
    text = "see the run file's description"
    for part in path:
        if model is None or part not in model.model_fields:
            break
        field = model.model_fields[part]
        text = field.description or text
        model = _model_in(field.annotation)
    return text


def _at(values: Any, path: KeyPath) -> Any:
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return None
        values = values[part]
    return values
