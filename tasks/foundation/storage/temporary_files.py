"""Temporary files and folders, and the cleanup of those that killed processes left behind.

Each one is locked with `flock` while in use. The kernel releases the lock when its process dies, so a temporary file
whose lock is free can be removed: no clock, process id or host name is needed. On a file system without locks nothing
is ever removed.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

# Scratch folders of `baton prove` and `baton doctor` may be large, so every command that makes a temporary folder
# removes those that were left behind. Folders kept by `prove --keep` have another name.
PROOF_PREFIX, DOCTOR_PREFIX = "baton-proving-", "baton-doctor-"


@contextmanager
def temporary_file(folder: Path, prefix: str) -> Iterator[Path]:
    """An empty file with a unique name in `folder`, removed on exit unless the process is killed."""
    sweep_once(folder, prefix)
    while True:
        handle, name = tempfile.mkstemp(prefix=prefix, dir=folder)
        if _locked(handle, name):
            break
        os.close(handle)
    try:
        os.fchmod(handle, 0o644)  # mkstemp's 0600 would lock out the group that shares a home
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
        os.close(handle)


@contextmanager
def temporary_folder(prefix: str, *, within: Path | None = None) -> Iterator[Path]:
    """A folder with a unique name, removed on exit unless the process is killed.

    Args:
        prefix: start of its name. Folders that dead processes left with this prefix are removed first; so are those
            with `PROOF_PREFIX` and `DOCTOR_PREFIX` if `within` is left out.
        within: an existing folder; left out: the system's folder for temporary files.
    """
    parent = Path(tempfile.gettempdir()) if within is None else within
    for each in {prefix} if within is not None else {prefix, PROOF_PREFIX, DOCTOR_PREFIX}:
        sweep_once(parent, each)
    while True:
        # A killed process may still write into the folder. What remains is removed by the next sweep.
        with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name:
            try:
                handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # another process swept it before it was opened
                continue
            try:
                if _locked(handle, name):
                    yield Path(name)
                    return
            finally:
                os.close(handle)


@cache
def sweep_once(folder: Path, prefix: str) -> None:
    """Call `sweep` at most once in this process. Files left behind later are removed by the next process."""
    sweep(folder, prefix)


def sweep(folder: Path, prefix: str) -> None:
    """Remove the temporary files and folders of dead processes. Errors are ignored."""
    with suppress(OSError), os.scandir(folder) as found:
        names = [entry.path for entry in found if entry.name.startswith(prefix)]
        for name in names:
            with suppress(OSError):
                _remove_if_free(name)


def _remove_if_free(name: str) -> None:
    is_folder = Path(name).is_dir()
    # On NFS, an exclusive lock needs a file that is open for writing.
    handle = os.open(name, os.O_NOFOLLOW | (os.O_RDONLY if is_folder else os.O_RDWR))
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_folder:
            shutil.rmtree(name)
        else:
            Path(name).unlink()
    finally:
        os.close(handle)


def _locked(handle: int, name: str) -> bool:
    """Lock a new file or folder. False if another process removed it before it was locked."""
    with suppress(OSError):  # no locks on this file system
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.fstat(handle), os.stat(name))  # noqa: PTH116 - beside fstat
    except FileNotFoundError:
        return False
