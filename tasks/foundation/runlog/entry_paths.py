"""Paths of log entries, relative to the run's home: `log/00000000.json` and so on."""

import re

_PATTERN = re.compile(r"log/(\d{8})\.json")


def entry_path(number: int) -> str:
    """Path of the entry with this number, which counts from 0."""
    return f"log/{number:08d}.json"


def entry_number(path: str) -> int | None:
    """Number of the entry at a path; None if the path is not an entry's."""
    match = _PATTERN.fullmatch(path)
    return None if match is None else int(match[1])


FIRST_ENTRY = entry_path(0)
