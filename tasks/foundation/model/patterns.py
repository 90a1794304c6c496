"""Patterns that match paths of layers and variables."""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches_path(patterns: Iterable[str], path: str) -> bool:
    """Whether a pattern matches a path or one of its parents: `encoder` matches everything below it too.

    Args:
        patterns: as in `fnmatch`; `*` also matches slashes.
        path: names joined by slashes.
    """
    parts = path.split("/")
    beginnings = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(beginning, pattern) for pattern in patterns for beginning in beginnings)
