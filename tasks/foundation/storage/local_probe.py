"""Checks early that a local folder supports what a commit does: create, sync, hard-link, delete."""

import errno
import os
from pathlib import Path

from tasks.foundation.errors import StorageError, StoreRefused
from tasks.foundation.storage.temporary_files import temporary_file

# What a file system says that knows no hard links, or has no more of them for this file.
NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}
_NOT_YOURS = {errno.EACCES, errno.EPERM}


def require_writable(folder: Path, prefix: str) -> None:
    """Make, sync, link and delete a small file, as a commit does. Does nothing if the folder does not exist.

    Looking at permission bits is not enough: root passes them all, and they do not show a read-only mount.

    Args:
        folder: where runs are kept.
        prefix: of temporary names that no reader looks at.

    Raises:
        StoreRefused: files cannot be made or linked there.
        StorageError: the disk is full, or fails.
    """
    if not folder.is_dir():
        return
    try:
        with temporary_file(folder, prefix) as file:
            _write(file)
            link = file.with_name(f"{file.name}-link")
            try:
                _link(file, link, folder)
            finally:
                link.unlink(missing_ok=True)
    except OSError as fault:
        raise _refusal(fault, folder) from fault


def _write(file: Path) -> None:
    with file.open("wb") as opened:
        opened.write(b"x")
        opened.flush()
        os.fsync(opened.fileno())


def _link(file: Path, link: Path, folder: Path) -> None:
    try:
        link.hardlink_to(file)
    except OSError as fault:
        if fault.errno not in NO_HARD_LINKS:
            raise
        raise StoreRefused(
            f"{folder} is on a file system without hard links ({fault.strerror}), so a commit cannot be made atomic "
            "there; use a local disk, NFS or gs://"
        ) from fault


def _refusal(fault: OSError, folder: Path) -> StorageError:
    if fault.errno == errno.EROFS:
        return StoreRefused(
            f"{folder}: the disk is mounted read-only; make it writable (mount -o remount,rw), or name another folder "
            "with --set storage=FOLDER"
        )
    if fault.errno in _NOT_YOURS:
        return StoreRefused(
            f"{folder}: you may not make files here ({fault.strerror}); see who owns the folder, or name another one "
            "with --set storage=FOLDER"
        )
    if fault.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageError(f"{folder}: no space left on the disk; free some and run again")
    return StorageError(f"{folder}: {fault.strerror or fault}; see to the disk and run again")
