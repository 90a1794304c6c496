"""Files of a local disk: durable, past the page cache, temporary, and of whom.

- A file survives a power cut once it and the folders above it are synced.
- A checkpoint is larger than anything else that is written, and nobody reads it soon. Through the page cache it would
  be copied once more, and push out the training data; so it is written past the cache, and read back from the disk to
  compare every byte. Where a file system refuses direct access, the same calls go through the page cache.
- Each temporary file or folder is locked with `flock` while in use. The kernel releases the lock when its process
  dies, so one whose lock is free can be removed: no clock, process id or host name is needed. On a file system
  without locks nothing is ever removed.
- Links must stay below the root; code that runs must be a file that only this user can have written.
"""

import errno
import fcntl
import mmap
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

import google_crc32c

from baton.tasks.foundation.errors import ForeignFile, PathRefused, StorageError
from baton.tasks.foundation.storage.interface import FileStat
from baton.tasks.foundation.storage.transfers import as_array
from baton.tasks.foundation.text import abridged, visible

# Direct access wants addresses, offsets and sizes to be multiples of the disk's block size; no disk has larger ones.
ALIGNMENT = 4096
_READ_BYTES = 4 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
# Scratch folders of `baton prove` and `baton doctor` may be large, so every command that makes a temporary folder
# removes those that were left behind. Folders kept by `prove --keep` have another name.
PROOF_PREFIX, DOCTOR_PREFIX = "baton-proving-", "baton-doctor-"
# Runs share this folder, so it is often a link to a larger disk. Its files are named by their content.
_DATASETS = "datasets"
_SHOWN_CHARS = 120


def write_durably(file: Path, data: bytes) -> None:
    """Write a file and sync it."""
    with file.open("wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file and sync the copy."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def make_durably(folder: Path, *, below: Path | None = None) -> None:
    """Create a folder and its parents, and sync each: a file is no safer than the folders above it.

    Args:
        folder: may exist.
        below: is not created. A check beforehand could not tell: a home may be moved away at any moment.

    Raises:
        FileNotFoundError: `below` does not exist.
    """
    if not folder.is_dir():
        if folder == below:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(folder))
        make_durably(folder.parent, below=below)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder: a file's name is durable only after this."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_buffers_durably(file: Path, buffers: Sequence[memoryview]) -> None:
    """Replace the content of a file with that of `buffers`, and sync it.

    Args:
        file: exists.
        buffers: contiguous bytes. They are written without a copy if the first begins at a multiple of `ALIGNMENT` in
            memory, and so does each after it in memory and in the file.
    """
    direct = all(_address(buffer) % ALIGNMENT == 0 for buffer in buffers if buffer.nbytes) and all(
        buffer.nbytes % ALIGNMENT == 0 for buffer in buffers[:-1]
    )
    with _opened(file, os.O_WRONLY | os.O_TRUNC, direct=direct) as handle:
        offset = 0
        for buffer in buffers:
            offset = _write(handle, buffer, offset)
        os.fsync(handle)


def compare_with_buffers(file: Path, buffers: Sequence[memoryview]) -> FileStat:
    """Read a file from the disk and compare it with what was written.

    Returns:
        Its size and crc32c.

    Raises:
        StorageError: the disk holds other bytes.
    """
    crc, offset = 0, 0
    block = mmap.mmap(-1, _READ_BYTES)
    with _opened(file, os.O_RDONLY, direct=True) as handle:
        found = os.fstat(handle).st_size
        for buffer in buffers:
            for begin in range(0, buffer.nbytes, _READ_BYTES):
                expected = as_array(buffer[begin : begin + _READ_BYTES])
                size = _read(handle, memoryview(block), expected.nbytes, offset)
                if size != expected.nbytes or not (as_array(memoryview(block)[:size]) == expected).all():
                    raise _other_bytes(file, offset)
                crc = google_crc32c.extend(crc, expected)
                offset += size
    if found != offset:
        raise _other_bytes(file, min(found, offset))
    return FileStat(size=offset, crc32c=f"{crc:08x}")


def _other_bytes(file: Path, offset: int) -> StorageError:
    return StorageError(
        f"{file}: the disk returned other bytes than were written, after byte {offset}; check the disk and this "
        "machine's memory, and run again"
    )


def _address(buffer: memoryview) -> int:
    address: int = as_array(buffer).ctypes.data
    return address


def _write(handle: int, buffer: memoryview, offset: int) -> int:
    """Write a buffer at an offset. Returns the offset after it."""
    end = offset + buffer.nbytes
    while offset < end:
        rest = buffer[buffer.nbytes - (end - offset) :]
        whole = len(rest) // ALIGNMENT * ALIGNMENT
        if not whole or offset % ALIGNMENT:
            _use_page_cache(handle)
            whole = len(rest)
        try:
            offset += os.pwrite(handle, rest[:whole], offset)
        except OSError as refused:
            if refused.errno not in _REFUSED or not _use_page_cache(handle):
                raise
    return end


def _read(handle: int, block: memoryview, size: int, offset: int) -> int:
    """Read up to `size` bytes at an offset into a block. Returns the number of bytes, smaller at the file's end."""
    done = 0
    while done < size:
        if done % ALIGNMENT or offset % ALIGNMENT:
            _use_page_cache(handle)
        try:
            count = os.preadv(handle, [block[done : done + -(-(size - done) // ALIGNMENT) * ALIGNMENT]], offset + done)
        except OSError as refused:
            if refused.errno not in _REFUSED or not _use_page_cache(handle):
                raise
            continue
        if not count:
            break
        done += count
    return min(done, size)


@contextmanager
def _opened(file: Path, flags: int, *, direct: bool) -> Iterator[int]:
    handle = -1
    if direct and _DIRECT:
        with suppress(OSError):  # some file systems refuse it; any other error comes again
            handle = os.open(file, flags | _DIRECT)
    if handle < 0:
        handle = os.open(file, flags)
    try:
        yield handle
    finally:
        os.close(handle)


def _use_page_cache(handle: int) -> bool:
    """Go on through the page cache. False if the handle already did."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    if not flags & _DIRECT:
        return False
    fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~_DIRECT)
    return True


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
