"""Reads YAML of plain values only and records where each value was given; errors have file, line and remedy."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from tasks.foundation.contracts.home_files import MOST_NESTED
from tasks.foundation.errors import RunFileError

_VALUE_CHARACTERS = 60

KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was given, and its spelling there if it is a plain scalar."""

    where: str
    spelling: str | None


class _Loader(yaml.SafeLoader):
    """Loads plain values only: text, whole numbers, numbers, true and false, null, lists, mappings.

    Differs from PyYAML's YAML 1.1 where that surprises: 1e-3 is a number; 017 (octal), 1:30 (base 60) and dates stay
    text; aliases are refused, because a few lines of them can expand to gigabytes.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012 - the attribute that PyYAML looks for; filled below

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            next_event: Callable[[], Any] = self.get_event
            event = next_event()
            raise yaml.MarkedYAMLError(
                problem=f"the alias *{event.anchor} is not supported",
                problem_mark=event.start_mark,
                note="write the value out",
            )
        return super().compose_node(parent, index)


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


def parse(text: str, *, where: str, at: KeyPath, places: dict[KeyPath, Place]) -> Any:
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
            return None if node is None else _Reader(loader, where, lines, places).value(node, at)
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
        raise RunFileError(f"{where}{place}: not readable as YAML: {problem}; {remedy}") from fault
    except yaml.YAMLError as fault:
        raise RunFileError(f"{where}: not readable as YAML: {str(fault).splitlines()[0]}; write it again") from fault
    except RecursionError as fault:
        raise RunFileError(f"{where}: brackets or lists are nested too deeply; close them earlier") from fault


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns YAML nodes into values and records their places; refuses values that are not plain."""

    loader: _Loader
    where: str
    lines: bool
    places: dict[KeyPath, Place]

    def value(self, node: yaml.Node, at: KeyPath) -> Any:
        here, name = self._place(node), dotted(at) or "the file"
        if len(at) > MOST_NESTED:
            raise RunFileError(f"{here}: {nested_too_deeply(at)}")
        if node.tag not in _KNOWN_TAGS[type(node)]:
            raise RunFileError(f"{here}: {name}: the tag {node.tag.replace(_TAG, '!!')} is not supported; {_PLAIN}")
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
                raise RunFileError(f"{here}: {name} is {text}, which cannot be read; {_PLAIN}") from fault
        written = isinstance(node, yaml.ScalarNode) and node.style is None and node.value
        self.places[at] = Place(here, shortened(node.value) if written else None)
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
                raise RunFileError(f"{here}: the key {key}{within} is not text; put it in quotes or rename it")
            path = (*at, key_node.value)
            if key_node.value in result:
                first = f"{shown(result[key_node.value])} at {self.places[path].where}"
                raise RunFileError(f"{here}: {dotted(path)} was given twice, first {first}; keep one of the two")
            result[key_node.value] = self.value(value_node, path)
        return result

    def _place(self, node: yaml.Node) -> str:
        return f"{self.where}, line {node.start_mark.line + 1}" if self.lines else self.where


def nested_too_deeply(path: KeyPath) -> str:
    """Why a value at this path is refused."""
    return f"{dotted(path[:2])} has values nested more than {MOST_NESTED} levels deep; make them flatter"


def dotted(path: KeyPath) -> str:
    """A key path with dots; unusual keys in quotes."""
    return ".".join(part if re.fullmatch(r"[\w-]+", part) else shortened(json.dumps(part)) for part in path)


def shown(value: Any) -> str:
    """A value as it could be written in the file, on one line."""
    return "empty (null)" if value is None else shortened(json.dumps(value, ensure_ascii=False))


def shortened(text: str) -> str:
    """One line of at most 60 characters."""
    text = " ".join(text.split())
    return text if len(text) <= _VALUE_CHARACTERS else text[: _VALUE_CHARACTERS - 1] + "…"
