"""Keeps every path inside its store. Names in a home come from whoever wrote it, who may be a stranger.

All stores ask here before they touch a file. The user's own sources (data, weights) have any names and may be links to
anywhere, so they are opened without the fence.
"""

import os
import re
import stat
from pathlib import Path

from tasks.foundation.errors import PathRefused
from tasks.foundation.messages import abridged, visible

# What file systems take: of one name, and of a whole path on Cloud Storage.
_NAME_BYTES, _PATH_BYTES = 255, 1024
_SHOWN = 120
# Named by their content and shared by runs, so this folder is often a link to a larger disk.
_MAY_LEAD_OUT = "datasets"
# Control characters, a backslash (a separator elsewhere), and halves of characters that no file system takes.
_REFUSED = re.compile(r"[\x00-\x1f\x7f-\x9f\\\ud800-\udfff]")


def is_inside(path: str) -> bool:
    """Whether a path, by its text alone, stays below the root that it is relative to; "" is the root itself."""
    if not path:
        return True
    parts = path.split("/")
    return (
        not _REFUSED.search(path)
        and not any(part in {"", ".", ".."} for part in parts)
        and len(path.encode()) <= _PATH_BYTES
        and all(len(part.encode()) <= _NAME_BYTES for part in parts)
    )


def require_inside(path: str, *, root: str) -> None:
    """Refuse what is no plain relative path.

    Raises:
        PathRefused: it is absolute, has "..", empty parts, backslashes or control characters, or is too long.
    """
    if not is_inside(path):
        raise PathRefused(
            f"{root}: {abridged(visible(path), _SHOWN)!r} is no path below this folder (absolute, with '..', '\\', "
            "control characters, or too long); the files that name it were not written by Baton, or were changed: do "
            "not use them unless you trust where they are from"
        )


def require_no_way_out(root: Path, path: str, *, last: bool = True) -> None:
    """Refuse links that lead out of a local root, and what is neither file nor folder (reading a pipe never ends).

    The root itself, what is above it, and its datasets/ may be links. So may all the rest, as long as they stay below.

    Args:
        root: a local folder.
        path: relative to it, and inside by its text.
        last: whether the last part is followed too; deleting does not follow it.

    Raises:
        PathRefused: naming the link.
    """
    place = root
    parts = path.split("/") if path else []
    for number, part in enumerate(parts if last else parts[:-1]):
        place = place / part
        if number == 0 and part == _MAY_LEAD_OUT:
            root = place
            continue
        try:
            mode = os.lstat(place).st_mode
        except OSError:  # not there, or not to be looked at: the operation itself says so
            return
        if stat.S_ISLNK(mode):
            real = Path(os.path.realpath(place))
            if not real.is_relative_to(os.path.realpath(root)):
                raise PathRefused(
                    f"{place} is a link to {abridged(visible(str(real)), _SHOWN)}, out of {root}; links are followed "
                    "only within it. Move what it points to there, or make the folder itself the link"
                )
        elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise PathRefused(f"{place} is neither a file nor a folder; remove it")
