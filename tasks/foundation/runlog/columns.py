"""Rows of an entry as columns: `[{"step": 5, "metrics": {...}}, ...]` as `{"step": [5, ...], "metrics": {...}}`.

Metric rows and statistics of hosts have the same keys in each row. In columns they take half of the bytes.
"""

import json
from typing import Any

_PARTS = ("body", "totals")
_LISTS = ("history", "workers")


def with_columns(part: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a part of an entry with its rows as columns; rows that differ in their keys stay."""
    return {key: _columns(value) if key in _LISTS else value for key, value in part.items()}


def with_rows(data: bytes, whole: dict[str, Any]) -> bytes:
    """Return the bytes of an entry with its columns as rows.

    Args:
        data: the bytes.
        whole: their JSON.
    """
    parts = {name: _part_with_rows(whole.get(name)) for name in _PARTS}
    changed = {name: part for name, part in parts.items() if part is not None}
    return json.dumps({**whole, **changed}).encode() if changed else data


def _part_with_rows(part: Any) -> dict[str, Any] | None:
    """A part of an entry with rows; None if it has no columns."""
    if not isinstance(part, dict) or not any(isinstance(part.get(key), dict) for key in _LISTS):
        return None
    return {**part, **{key: _rows(part[key]) for key in _LISTS if isinstance(part.get(key), dict)}}


def _columns(rows: list[dict[str, Any]]) -> Any:
    if len(rows) < 2 or not _same_keys(rows):  # noqa: PLR2004 - one row is as short
        return rows
    columns: dict[str, Any] = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        if all(isinstance(value, dict) for value in values):
            if not _same_keys(values):
                return rows
            columns[key] = {name: [value[name] for value in values] for name in values[0]}
        else:
            columns[key] = values
    return columns


def _same_keys(rows: list[dict[str, Any]]) -> bool:
    return all(list(row) == list(rows[0]) for row in rows)


def _rows(columns: dict[str, Any]) -> Any:
    """Return columns as rows; what are no columns of one length stays, and its reader says so."""
    leaves = [one for group in columns.values() for one in (group.values() if isinstance(group, dict) else [group])]
    if not all(isinstance(leaf, list) and len(leaf) == len(leaves[0]) for leaf in leaves):
        return columns
    count = len(leaves[0]) if leaves else 0
    return [{key: _item(values, index) for key, values in columns.items()} for index in range(count)]


def _item(values: Any, index: int) -> Any:
    return {name: one[index] for name, one in values.items()} if isinstance(values, dict) else values[index]
