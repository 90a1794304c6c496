"""Temporary files and folders, and the removal of those that a killed process left.

What is worked on is locked (`flock`), and the kernel drops the lock when its process dies, however that comes about.
So whoever gets the lock of a temporary file may remove it: no clock, no process id, no host name decides. Where a file
system knows no locks, nothing is ever removed.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Scratch folders of `baton prove` and `baton doctor`, which may be large: what a killed one left goes with the next
# command that makes a temporary folder of any kind. Kept ones (`prove --keep`) have another name.
PROVING, DOCTOR = "baton-proving-", "baton-doctor-"

# One look at a folder is enough for a process: what was left was left before it began, or is for the next one.
_LOOKED_AT: set[tuple[Path, str]] = set()


@contextmanager
def temporary_file(folder: Path, prefix: str) -> Iterator[Path]:
    """An empty file of its own name in `folder`, gone afterwards whatever happens (but a kill)."""
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
    """A folder of its own name, gone afterwards (but after a kill).

    Args:
        prefix: of its name; what dead processes left with this prefix, or of `PROVING` and `DOCTOR`, is removed.
        within: an existing folder; left out: where the system keeps temporary files.
    """
    above = Path(tempfile.gettempdir()) if within is None else within
    for each in {prefix} if within is not None else {prefix, PROVING, DOCTOR}:
        sweep_once(above, each)
    while True:
        # What cannot be removed now (a process that was killed may still write into it) goes with the next sweep.
        with tempfile.TemporaryDirectory(prefix=prefix, dir=above, ignore_cleanup_errors=True) as name:
            try:
                handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # a sweeper came between the making and the opening
                continue
            try:
                if _locked(handle, name):
                    yield Path(name)
                    return
            finally:
                os.close(handle)


def sweep_once(folder: Path, prefix: str) -> None:
    """`sweep`, if this process has not done so before."""
    if (folder, prefix) not in _LOOKED_AT:
        _LOOKED_AT.add((folder, prefix))
        sweep(folder, prefix)


def sweep(folder: Path, prefix: str) -> None:
    """Remove the temporary files and folders of dead processes; what cannot be removed stays, without a word."""
    with suppress(OSError), os.scandir(folder) as found:
        names = [entry.path for entry in found if entry.name.startswith(prefix)]
        for name in names:
            with suppress(OSError):
                _remove_if_free(name)


def _remove_if_free(name: str) -> None:
    folder = Path(name).is_dir()
    # A lock that excludes others needs a file that may be written, on NFS.
    handle = os.open(name, os.O_NOFOLLOW | (os.O_RDONLY if folder else os.O_RDWR))
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder:
            shutil.rmtree(name)
        else:
            Path(name).unlink()
    finally:
        os.close(handle)


def _locked(handle: int, name: str) -> bool:
    """Lock what was just made; False if a sweeper came between the making and the locking, and removed it."""
    with suppress(OSError):  # no locks on this file system
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.fstat(handle), os.stat(name))  # noqa: PTH116 - beside fstat
    except FileNotFoundError:
        return False
