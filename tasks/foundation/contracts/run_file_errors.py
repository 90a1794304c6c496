"""Why a run file is refused: pydantic's findings as sentences with key, value and remedy."""

import re
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tasks.foundation.contracts.plain_yaml import KeyPath, Place, dotted, shortened, shown
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.masking import MASK, names_secret

SHOWN_ERRORS = 5
_NO_OTHER_TPU = "Baton uses the TPU of the machine that it runs on; drop the key and run baton on the TPU VM itself"
_REMOVED_KEYS: dict[KeyPath, str] = {
    (*prefix, "accelerator", key): _NO_OTHER_TPU
    for prefix in ((), ("stages", "evaluate"))
    for key in ("zone", "project")
}

# Pydantic's error types, as words that follow `which is`.
_PROBLEMS = {
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


def explain(faults: ValidationError, data: dict[str, Any], *, file: str, places: dict[KeyPath, Place]) -> str:
    """One line for each error, the first few of them.

    Args:
        faults: what pydantic found.
        data: the values of the run file, overrides applied.
        file: the run file's name, for the messages.
        places: where each value was given.
    """
    lines: dict[KeyPath, str] = {}
    # A mistyped key is also missing; the message about the wrong name says more, so it comes first.
    for fault in sorted(faults.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden"):
        path = tuple(str(part) for part in fault["loc"])
        while path and fault["type"] != "missing" and path not in places:
            path = path[:-1]  # `model: x` is checked as model.build, and the members of a union as keys
        if path not in lines:  # a sentence looks through all known keys, so there are only those that are shown
            is_shown = len(lines) < SHOWN_ERRORS
            lines[path] = _sentence(fault, path, data, file=file, places=places) if is_shown else ""
    shown = list(lines.values())[:SHOWN_ERRORS]
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
    if path and names_secret(path[-1], value):
        spelled = MASK
    if path in _REMOVED_KEYS:
        return f"{place.where}: {name} (here {spelled}) was removed; {_REMOVED_KEYS[path]}"
    if fault["type"] == "extra_forbidden":
        return f"{place.where}: {name} (here {spelled}) is not a known key; {_did_you_mean(path)}"
    if fault["type"] == "value_error":
        text = str(fault["ctx"]["error"])
        if not isinstance(value, dict):
            return f"{place.where}: {name} is {spelled}: {text}"
        keys = _mentioned(text, value) or [()]
        full = [(*path, *key) for key in keys]
        given = ", ".join(f"{dotted(at)}: {shown(_at(data, at))}" for at in full)
        sources = [found.where for at, found in places.items() if any(at[: len(key)] == key for key in full)]
        sources.sort(key=lambda where: not where.startswith("--set "))  # an override is the likelier mistake
        return f"{sources[0] if sources else file}: {text} (given: {given})"
    return f"{place.where}: {name} is {spelled}, which is {_problem(fault, value)}; {_description(path)}"


def _problem(fault: ErrorDetails, value: Any) -> str:
    """Why a value is wrong, as words that follow `which is`."""
    kind = fault["type"]
    if kind in {"int_type", "int_from_float"} and isinstance(value, float) and value.is_integer():
        return f"not spelled as a whole number, write {shortened(str(int(value)))}"
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "not text, put it in quotes"
    return _PROBLEMS.get(kind, "not accepted").format_map(fault.get("ctx", {}))


def _mentioned(text: str, values: dict[str, Any]) -> list[KeyPath]:
    """The keys that a message names and that have a value."""
    words = dict.fromkeys(re.findall(r"[a-z_]+(?:\.[a-z_]+)*", text))
    return [path for path in (tuple(word.split(".")) for word in words) if _at(values, path) is not None]


def _did_you_mean(path: KeyPath) -> str:
    siblings = [known for known in _known_paths(RunSpec) if known[:-1] == path[:-1]]
    near = get_close_matches(path[-1], [known[-1] for known in siblings], n=1)
    same = [known for known in _known_paths(RunSpec) if known[-1] == path[-1]]
    if near and not same:
        return f"did you mean {dotted((*path[:-1], near[0]))}?"
    candidates = same or [
        known for known in _known_paths(RunSpec) if known[-1] in get_close_matches(path[-1], [known[-1]])
    ]
    if candidates:
        return f"did you mean {dotted(candidates[0])}?"
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
    """The contract of a field of type `Contract` or `Contract | None`."""
    options = get_args(annotation) if get_origin(annotation) in {Union, UnionType} else (annotation,)
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def _description(path: KeyPath) -> str:
    """The description of the field at `path`, which says what the value should be."""
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
