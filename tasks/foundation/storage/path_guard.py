"""Keeps every path inside its store, and tells the user's own files from others'.

Names in a run's home may come from an untrusted author.

Every store checks paths here before it touches a file. The user's own sources (data, weights) may have any names and be
links to anywhere, so their stores are opened with `guarded=False`.
"""

import os
import pwd
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tasks.foundation.errors import ForeignFile, PathRefused
from tasks.foundation.messages import abridged, visible

# Limits of file systems for one name, and of Cloud Storage for a whole path.
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 1024
_SHOWN_CHARS = 120
# Runs share this folder, so it is often a link to a larger disk. Its files are named by their content.
_DATASETS = "datasets"
# Control characters, the backslash (a separator on some systems), and lone surrogates, which no file system accepts.
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\\\ud800-\udfff]")


def is_inside(path: str) -> bool:
    """Whether a path stays below its root, by its text only; "" is the root itself."""
    if not path:
        return True
    parts = path.split("/")
    return (
        not _FORBIDDEN.search(path)
        and not any(part in {"", ".", ".."} for part in parts)
        and len(path.encode()) <= _MAX_PATH_BYTES
        and all(len(part.encode()) <= _MAX_NAME_BYTES for part in parts)
    )


def require_inside(path: str, *, root: str) -> None:
    """Refuse everything but plain relative paths.

    Raises:
        PathRefused: it is absolute, has "..", empty parts, backslashes or control characters, or is too long.
    """
    if not is_inside(path):
        raise PathRefused(
            f"{root}: {abridged(visible(path), _SHOWN_CHARS)!r} is not a path below this folder (absolute, with '..', "
            "'\\', control characters, or too long); Baton did not write the files that name it, or they were changed: "
            "do not use them unless you trust their origin"
        )


def require_links_inside(root: Path, path: str, *, follow_last: bool = True) -> None:
    """Refuse links that leave a local root, and special files such as pipes, whose reads never end.

    The root itself, its parents, and its datasets/ may be links. Other links must stay below the root.

    Args:
        root: a local folder.
        path: relative to it, and inside by its text.
        follow_last: whether to check the last part, too; deleting does not follow it.

    Raises:
        PathRefused: naming the link.
    """
    current = str(root)  # a list of runs checks thousands of paths, and joining `Path`s would take most of its time
    parts = path.split("/") if path else []
    for number, part in enumerate(parts if follow_last else parts[:-1]):
        current = os.path.join(current, part)  # noqa: PTH118 - see above
        if number == 0 and part == _DATASETS:
            root = Path(current)
            continue
        try:
            mode = os.lstat(current).st_mode
        except OSError:  # missing or unreadable: the operation itself reports it
            return
        if stat.S_ISLNK(mode):
            real = Path(os.path.realpath(current))
            if not real.is_relative_to(os.path.realpath(root)):
                raise PathRefused(
                    f"{current} is a link to {abridged(visible(str(real)), _SHOWN_CHARS)}, outside of {root}; only "
                    "links within it are followed. Move the target there, or make the folder itself the link"
                )
        elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise PathRefused(f"{current} is neither a file nor a folder; remove it")


@contextmanager
def opened_own(root: Path, path: str) -> Iterator[IO[bytes]]:
    """Open a file that only this user id (or root) can have written.

    The root, each folder on the way and the file belong to the effective user id. The group may write to the folders,
    as many a umask has it, but nobody else; to the file, only its owner. The bytes come from the open file that was
    looked at, so no other file can be put into its place meanwhile.

    Args:
        root: a local folder; it may be a link.
        path: relative to it; no part of it may be a link.

    Raises:
        ForeignFile: another user owns one of them, or may write to it.
        OSError: one of them does not exist or cannot be read.
    """
    folder = root
    _require_own(folder, folder.stat(), writable_by=stat.S_IWOTH)
    *folders, _ = path.split("/")
    for name in folders:
        folder /= name
        _require_own(folder, folder.lstat(), writable_by=stat.S_IWOTH)
    file = root / path
    _require_own(file, file.lstat(), writable_by=stat.S_IWGRP | stat.S_IWOTH)  # a pipe is not even opened
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        _require_own(file, os.fstat(opened.fileno()), writable_by=stat.S_IWGRP | stat.S_IWOTH)
        yield opened


def _require_own(place: Path, found: os.stat_result, *, writable_by: int) -> None:
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise ForeignFile(f"{place} is neither a file nor a folder, but a link or a device")
    if found.st_uid != os.geteuid():
        raise ForeignFile(f"{place} belongs to {_user(found.st_uid)}, and this process runs as {_user(os.geteuid())}")
    if found.st_mode & writable_by:
        raise ForeignFile(f"other users may write to {place} (mode {stat.S_IMODE(found.st_mode):03o})")


def _user(uid: int) -> str:
    try:
        return f"user {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:  # a container often has no name for it
        return f"user {uid}"
