"""Reads a YAML file and `--set` overrides into a `RunSpec`, or refuses them with key, value and remedy.

The YAML has plain values only. Where each was given is recorded, so errors have file and line; what pydantic finds is
said in sentences.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from baton.tasks.foundation.contracts.home_files import MOST_NESTED
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import RunFileError
from baton.tasks.foundation.masking import MASK, names_secret
from baton.tasks.foundation.text import joined, option

_VALUE_CHARACTERS = 60
_MOST_ANCHORS = 100

KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeyPosition:
    """Where a value was given, and its spelling there if it is a plain scalar."""

    where: str
    spelling: str | None


class _Loader(yaml.SafeLoader):
    """Loads plain values only: text, whole numbers, numbers, true and false, null, lists, mappings.

    Differs from PyYAML's YAML 1.1 where that surprises: 1e-3 is a number; 017 (octal), 1:30 (base 60) and dates stay
    text; aliases are refused, because a few lines of them can expand to gigabytes. So are many
    anchors and deeply nested values, before PyYAML has built them.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012 - the attribute that PyYAML looks for; filled below

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        next_event: Callable[[], Any] = self.peek_event
        event, problem = next_event(), ""
        if isinstance(event, yaml.AliasEvent):
            problem, note = f"the alias *{shortened(str(event.anchor))} is not supported", "write the value out"
        elif len(self.anchors) > _MOST_ANCHORS:
            problem, note = f"it has more than {_MOST_ANCHORS} anchors, which nothing uses", "remove them"
        elif self._depth > MOST_NESTED:
            problem, note = f"its values are nested more than {MOST_NESTED} levels deep", "make them flatter"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark, note=note)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_TAG = "tag:yaml.org,2002:"
# Mappings whose keys are classes: whole numbers, read as text, as in JSON.
_CLASS_MAPPINGS = {("train", "class_weight")}
_WHOLE = re.compile(r"0|[1-9][0-9]{0,8}")
_SCALARS = {
    "bool": (r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", "-+0123456789"),
    "float": (
        (
            r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
        ),
        "-+0123456789.",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
}
for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})$"), list(_first))
_KNOWN_TAGS: dict[type[yaml.Node], set[str]] = {
    yaml.ScalarNode: {_TAG + name for name in (*_SCALARS, "str")},
    yaml.SequenceNode: {_TAG + "seq"},
    yaml.MappingNode: {_TAG + "map"},
}
_PLAIN = "write a plain number or word, or text in quotes"


def parse(text: str, *, where: str, at: KeyPath, places: dict[KeyPath, KeyPosition]) -> Any:
    """Parse YAML text into plain values.

    Args:
        text: the YAML.
        where: the file or override, for messages.
        at: the key whose value the text is; empty for a whole file.
        places: receives where each value was given.

    Raises:
        RunFileError: the text cannot be read, or has a value that is not plain.
    """
    # An override has only one line, so its number says nothing.
    lines = not where.startswith("--set ")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            return None if node is None else _YamlReader(loader, where, lines, places).value(node, at)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None and lines else ""
        problem = " ".join(part for part in (fault.context, fault.problem) if part)
        tab = r"'\t'" in problem
        remedy = fault.note or (
            "indent with spaces, not tabs" if tab else "check the brackets, quotes and colons there"
        )
        raise RunFileError(where + f"{place}: not readable as YAML: {problem}; {remedy}") from fault
    except yaml.YAMLError as fault:
        raise RunFileError(where + f": not readable as YAML: {str(fault).splitlines()[0]}; write it again") from fault
    except RecursionError as fault:
        raise RunFileError(where + ": brackets or lists are nested too deeply; close them earlier") from fault


@dataclass(frozen=True, slots=True)
class _YamlReader:
    """Turns YAML nodes into values and records their places; refuses values that are not plain."""

    loader: _Loader
    where: str
    lines: bool
    places: dict[KeyPath, KeyPosition]

    def value(self, node: yaml.Node, at: KeyPath) -> Any:
        here, name = self._place(node), dotted(at) or "the file"
        if len(at) > MOST_NESTED:
            raise RunFileError(here + f": {nested_too_deeply(at)}")
        if node.tag not in _KNOWN_TAGS[type(node)]:
            raise RunFileError(here + f": {name}: the tag {node.tag.replace(_TAG, '!!')} is not supported; {_PLAIN}")
        value: Any
        if isinstance(node, yaml.MappingNode):
            value = self._mapping(node, at)
        elif isinstance(node, yaml.SequenceNode):
            value = [self.value(item, (*at, str(index))) for index, item in enumerate(node.value)]
        else:
            try:
                value = self.loader.construct_object(node)
                str(value).encode()
            except (ValueError, LookupError) as fault:
                text = shortened(json.dumps(node.value))
                raise RunFileError(here + f": {name} is {text}, which cannot be read; {_PLAIN}") from fault
        written = isinstance(node, yaml.ScalarNode) and node.style is None and node.value
        self.places[at] = KeyPosition(here, shortened(node.value) if written else None)
        return value

    def _mapping(self, node: yaml.MappingNode, at: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            here = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode) or not (
                key_node.tag == _TAG + "str" or (at in _CLASS_MAPPINGS and _WHOLE.fullmatch(key_node.value))
            ):
                key = shortened(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "[…]"
                within = f" in {dotted(at)}" if at else ""
                raise RunFileError(here + f": the key {key}{within} is not text; put it in quotes or rename it")
            path = (*at, key_node.value)
            if key_node.value in result:
                first = f": {dotted(path)} was given twice, first {shown(result[key_node.value])} at "
                raise RunFileError(here + first + self.places[path].where + "; keep one of the two")
            result[key_node.value] = self.value(value_node, path)
        return result

    def _place(self, node: yaml.Node) -> str:
        return f"{self.where}, line {node.start_mark.line + 1}" if self.lines else self.where


def nested_too_deeply(path: KeyPath) -> str:
    """Why a value at this path is refused."""
    return f"{dotted(path[:2])} has values nested more than {MOST_NESTED} levels deep; make them flatter"


def dotted(path: KeyPath) -> str:
    """A key path with dots; unusual keys in quotes, long ones abridged."""
    return ".".join(shortened(part if re.fullmatch(r"[\w-]+", part) else json.dumps(part)) for part in path)


def shown(value: Any) -> str:
    """A value as it could be written in the file, on one line."""
    return "empty (null)" if value is None else shortened(json.dumps(value, ensure_ascii=False))


def shortened(text: str) -> str:
    """One line of at most 60 characters."""
    text = " ".join(text.split())
    return text if len(text) <= _VALUE_CHARACTERS else text[: _VALUE_CHARACTERS - 1] + "…"


SHOWN_ERRORS = 5
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


def explain(faults: ValidationError, data: dict[str, Any], *, file: str, places: dict[KeyPath, KeyPosition]) -> str:
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
    return joined("\n", [*shown, f"{file}: and {more} more"] if more else shown)


def _sentence(
    fault: ErrorDetails, path: KeyPath, data: dict[str, Any], *, file: str, places: dict[KeyPath, KeyPosition]
) -> str:
    name = dotted(path)
    if fault["type"] == "missing":
        return f"{file}: {name} is missing; add it: {_description(path)}"
    value = _at(data, path)
    place = places.get(path, KeyPosition(file, None))
    spelled = place.spelling or shown(value)
    if path and names_secret(path[-1], value):
        spelled = MASK
    if fault["type"] == "extra_forbidden":
        words = place.where + f": {name} (here {spelled}) is not a known key; "
        return words + _did_you_mean(path, is_override=place.where.startswith("--set "))
    if fault["type"] == "value_error":
        text = str(fault["ctx"]["error"])
        if not isinstance(value, dict):
            return place.where + f": {name} is {spelled}: " + text
        keys = _mentioned(text, value) or [()]
        full = [(*path, *key) for key in keys]
        given = ", ".join(f"{dotted(at)}: {shown(_at(data, at))}" for at in full)
        sources = [found.where for at, found in places.items() if any(at[: len(key)] == key for key in full)]
        sources.sort(key=lambda where: not where.startswith("--set "))  # an override is the likelier mistake
        return (sources[0] if sources else file) + ": " + text + f" (given: {given})"
    return place.where + f": {name} is {spelled}, which is {_problem(fault, value)}; {_description(path)}"


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


def _did_you_mean(path: KeyPath, *, is_override: bool) -> str:
    def question(known: KeyPath) -> str:
        return "did you mean " + (option("", dotted(known)) if is_override else dotted(known)) + "?"

    siblings = [known for known in _known_paths(RunSpec) if known[:-1] == path[:-1]]
    near = get_close_matches(path[-1], [known[-1] for known in siblings], n=1)
    same = [known for known in _known_paths(RunSpec) if known[-1] == path[-1]]
    if near and not same:
        return question((*path[:-1], near[0]))
    candidates = same or [
        known for known in _known_paths(RunSpec) if known[-1] in get_close_matches(path[-1], [known[-1]])
    ]
    if candidates:
        return question(candidates[0])
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
    places: dict[KeyPath, KeyPosition] = {}
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


def _override(data: dict[str, Any], override: str, places: dict[KeyPath, KeyPosition]) -> None:
    """Apply one `a.b=c` to the values of the run file."""
    where = option("set", shortened(override))
    key, separator, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not separator or not all(path):
        such, as_this = option("set", "key=value"), option("set", "train.steps=1000")
        raise RunFileError(where + " is not an override; write it as " + such + ", such as " + as_this)
    if len(path) > MOST_NESTED:
        raise RunFileError(where + f": {nested_too_deeply(path)}")
    mapping = data
    for depth, part in enumerate(path[:-1], start=1):
        below = mapping.get(part)
        if below is None:
            below = {}
            places[path[:depth]] = KeyPosition(where, None)
        elif path[:depth] in _SHORT_FORMS and isinstance(below, str):
            whole = _SHORT_FORMS[path[:depth]]
            below = {whole: below}
            places[*path[:depth], whole] = places[path[:depth]]
        elif not isinstance(below, dict):
            given = dotted(path[:depth])
            raise RunFileError(where + f": {given} is {shown(below)}, which has no keys in it; set {given} itself")
        mapping[part] = below
        mapping = below
    for old in [old for old in places if old[: len(path)] == path]:
        del places[old]
    mapping[path[-1]] = parse(text, where=where, at=path, places=places)
    places.setdefault(path, KeyPosition(where, None))
