"""Patterns over the paths of layers and variables."""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def selects(patterns: Iterable[str], path: str) -> bool:
    """Whether a pattern matches a path, or the beginning of one: `encoder` selects all that is below it too.

    Args:
        patterns: as `fnmatch` has them; `*` goes beyond slashes.
        path: parts between slashes.
    """
    parts = path.split("/")
    beginnings = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(beginning, pattern) for pattern in patterns for beginning in beginnings)
