"""Checks early that a local folder supports what a commit does: create, sync, hard-link, delete."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tasks.foundation.errors import StorageError, StoreRefused
from tasks.foundation.storage.durable_files import write_durably
from tasks.foundation.storage.temporary_files import temporary_file

# Errors of a file system without hard links, or with too many of them for one file.
NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}
NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NO_PERMISSION = {errno.EACCES, errno.EPERM}
# Below it lie committed checkpoints: they never change, and a run may keep many of them.
_CHECKPOINTS = "checkpoints"
_DEEPEST = 2  # as tensorboard/train
# Where the root will be made, names of the store mean nothing, and files of others lie.
_PROBE = ".baton-probe-"


def require_writable(folder: Path, prefix: str) -> None:
    """Create, sync, link and delete a small file, as a commit does.

    Checking permission bits is not enough: root passes them all, and they do not show a read-only mount.

    Args:
        folder: the root of the store. If it does not exist, the nearest one above is tried: it will be made there.
        prefix: of temporary names, which readers ignore.

    Raises:
        StoreRefused: files cannot be created or linked there.
        StorageError: the disk is full, or fails.
    """
    root, folder = folder, next(place for place in (folder, *folder.parents) if place.is_dir())
    try:
        with temporary_file(folder, prefix if folder == root else _PROBE) as file:
            write_durably(file, b"x")
            link = file.with_name(f"{file.name}-link")
            try:
                _link(file, link, folder)
            finally:
                link.unlink(missing_ok=True)
    except OSError as error:
        raise _refusal(error, folder) from error


def require_folders_writable(home: Path, prefix: str) -> None:
    """Create and delete a file in each folder that a run writes to, as far as it exists.

    Args:
        home: the run's folder.
        prefix: of temporary names, which readers ignore.

    Raises:
        StoreRefused: files cannot be created in one of them.
        StorageError: the disk is full, or fails.
    """
    for folder in _folders_of(home):
        try:
            with temporary_file(folder, prefix):
                pass
        except FileNotFoundError:  # another process has just deleted it
            continue
        except OSError as error:
            raise _refusal(error, folder) from error


def _folders_of(home: Path) -> Iterator[Path]:
    """The home, the folders in it and those in these. Links are left out: whatever uses them checks where they lead."""
    if home.is_dir():
        yield home
    for parent, names, _ in os.walk(home):
        depth = len(Path(parent).relative_to(home).parts)
        if depth == _DEEPEST or (depth == 1 and Path(parent).name == _CHECKPOINTS):
            names.clear()
        yield from (folder for folder in (Path(parent, name) for name in names) if not folder.is_symlink())


def no_hard_links(folder: Path, error: OSError) -> str:
    """The message for a folder where a create-only write cannot be atomic."""
    return (
        f"{folder}: this file system has no hard links ({error.strerror}), so commits cannot be atomic; use a local "
        "disk, NFS or gs://"
    )


def _link(file: Path, link: Path, folder: Path) -> None:
    try:
        link.hardlink_to(file)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        raise StoreRefused(no_hard_links(folder, error)) from error


def _refusal(error: OSError, folder: Path) -> StorageError:
    if error.errno == errno.EROFS:
        return StoreRefused(
            f"{folder}: the disk is mounted read-only; make it writable (mount -o remount,rw), or name another folder "
            "with --set storage=FOLDER"
        )
    if error.errno in _NO_PERMISSION:
        return StoreRefused(
            f"{folder}: no permission to create files ({error.strerror}); check who owns the folder, or take another "
            "storage folder (--set storage=FOLDER)"
        )
    if error.errno in NO_SPACE:
        return StorageError(f"{folder}: no space left on the disk; free some and run again")
    return StorageError(f"{folder}: {error.strerror or error}; check the disk and run again")
