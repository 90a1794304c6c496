"""file://: a folder of this machine, with the durability that a commit needs.

A create-only write hard-links a complete, synced temporary file; everything else replaces a file by a rename. `probe`
checks early, in the folders that a run writes to, that the file system can do what a commit does.
"""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from baton.tasks.foundation.contracts.home_files import most_bytes, refuse_unreadable, require_readable, too_large
from baton.tasks.foundation.errors import FileAlreadyThere, FileMissing, PathRefused, StorageError, StoreRefused
from baton.tasks.foundation.storage.interface import FileStat, is_inside, require_inside
from baton.tasks.foundation.storage.local_files import (
    compare_with_buffers,
    copy_durably,
    make_durably,
    opened_own,
    require_links_inside,
    sync_folder,
    temporary_file,
    write_buffers_durably,
    write_durably,
)
from baton.tasks.foundation.storage.transfers import blocks_of, checksum_file, copy_blocks, local_target
from baton.tasks.foundation.text import option

_DELETE_TRIES = 10
# Prefix of unfinished files, which readers ignore.
_UNFINISHED = ".unfinished-"
# Errors of a file system without hard links.
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_PROBLEMS = {
    errno.ENOSPC: "no space left on the disk; free some",
    errno.EDQUOT: "the disk quota is exceeded, although the disk may have space; delete files that count, or have it "
    "raised,",
    errno.EFBIG: "the file is larger than the limit; raise it (ulimit -f)",
    errno.EROFS: "the disk is mounted read-only; make it writable",
}
# What stays as it is until another folder is named.
_LIMITS = {
    errno.EMLINK: "too many links: this file system takes no more links to the file, or folders in the folder; keep "
    "fewer checkpoints (checkpoint.keep_last, checkpoint.keep_every_steps)",
    errno.EXDEV: "invalid cross-device link: the folder is not on one file system (or has several quota projects), and "
    "files cannot be linked or renamed from one to another; put it on one",
    errno.ENAMETOOLONG: "the path is too long for this file system; give the run or a folder above it a shorter name",
}
_FOLDER = option("set", "storage=FOLDER")
_ANOTHER_FOLDER = ", or take another storage folder (" + _FOLDER + ")"
_NO_PERMISSION = {errno.EACCES, errno.EPERM}
# Below it lie committed checkpoints: they never change, and a run may keep many of them.
_CHECKPOINTS = "checkpoints"
_DEEPEST = 2  # as tensorboard/train
# Where the root will be made, names of the store mean nothing, and files of others lie.
_PROBE = ".baton-probe-"


class LocalStorage:
    """Files below a local folder, which is created with the first file.

    A folder that existed and then disappears, because it was moved or its disk is no longer mounted, is not created
    again: a process would continue in a new folder beside the real one. Stores made by `at` share the folders seen.
    """

    def __init__(self, root: Path, seen: set[Path] | None = None, *, guarded: bool = True) -> None:
        """Create the storage without touching the disk.

        Args:
            root: the folder; it may be a link.
            seen: roots, and folders read from, that existed; shared with the store that this one is made from.
            guarded: whether to refuse links that leave the root, see `require_links_inside`.
        """
        self.root = root
        self._guarded = guarded
        self._seen = set() if seen is None else seen

    @property
    def uri(self) -> str:
        """The folder's absolute path."""
        return str(self.root)

    @property
    def transfers(self) -> int:
        """See `Storage.transfers`. Parallel copies do not make one disk faster."""
        return 1

    def at(self, folder: str) -> "LocalStorage":
        """See `Storage.at`."""
        if self._guarded:
            require_inside(folder, root=self.uri)
        return LocalStorage(self.root / folder, self._seen, guarded=self._guarded)

    def with_deadline(self, _seconds: float) -> "LocalStorage":
        """See `Storage.with_deadline`. A local disk is never retried."""
        return self

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        with self._errors_of(path):
            file = self._checked(path)
            with _opened(file) as source:
                data = self._bounded(path, source)
            self._seen.add(file.parent)
            return data

    def read_own(self, path: str) -> bytes:
        """See `Storage.read_own`."""
        with self._errors_of(path):
            self._checked(path)
            with opened_own(self.root, path) as source:
                return self._bounded(path, source)

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        with self._errors_of(path):
            return self._checked(path).is_file()

    def create(self, path: str, data: bytes) -> None:
        """See `Storage.create`. Hard-links a complete temporary file: link refuses an existing name, on NFS too."""
        target = self._checked(path, data)
        with self._errors_of(path), self._unfinished_file(target, recreate_folder=False) as unfinished:
            write_durably(unfinished, data)
            try:
                os.link(unfinished, target)
            except FileExistsError as error:
                raise FileAlreadyThere(f"{target} already exists") from error
            except OSError as error:
                if error.errno in _NO_HARD_LINKS:
                    raise StorageError(_no_hard_links(target.parent, error)) from error
                raise
            sync_folder(target.parent)

    def write(self, path: str, data: bytes) -> None:
        """See `Storage.write`."""
        with self._replacing(path, self._checked(path, data)) as unfinished:
            write_durably(unfinished, data)

    def upload(self, source: Path, path: str) -> FileStat:
        """See `Storage.upload`."""
        with self._replacing(path, self._checked(path)) as unfinished:
            copy_durably(source, unfinished)
        return checksum_file(source)

    def write_buffers(self, path: str, buffers: Sequence[memoryview]) -> FileStat:
        """See `Storage.write_buffers`."""
        with self._replacing(path, self._checked(path)) as unfinished:
            write_buffers_durably(unfinished, buffers)
            return compare_with_buffers(unfinished, buffers)

    def copy(self, path: str, target: str) -> None:
        """See `Storage.copy`. Makes a hard link, since files here never change; copies the bytes where it cannot."""
        source, target_file = self._checked_in_home(path), self._checked_in_home(target)
        with self._errors_of(path), _opened(source) as held, self._replacing(target, target_file) as unfinished:
            with suppress(OSError):  # a sweep takes an unfinished file that nobody has locked
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            try:
                os.link(source, link := unfinished.with_name(f"{unfinished.name}-link"))
                link.replace(unfinished)
            except OSError as error:
                if error.errno not in {*_NO_HARD_LINKS, errno.EXDEV, errno.EMLINK}:
                    raise
                copy_durably(source, unfinished)

    def stat(self, path: str) -> FileStat:
        """See `Storage.stat`. Reads the file, because a local disk keeps no checksum."""
        return self.checksum(path)

    def checksum(self, path: str, *, begin: int = 0, size: int | None = None) -> FileStat:
        """See `Storage.checksum`."""
        with self._errors_of(path), _opened(self._checked(path)) as source:
            return copy_blocks(blocks_of(source, begin), None, size, source=self.root / path)

    def local_path(self, path: str) -> Path | None:
        """See `Storage.local_path`."""
        if not self.exists(path):
            raise FileMissing(f"{self.root / path} does not exist")
        return self._checked(path)

    def download(self, path: str, target: Path, *, begin: int = 0, size: int | None = None) -> FileStat:
        """See `Storage.download`."""
        with self._errors_of(path), _opened(self._checked(path)) as source, local_target(target) as file:
            return copy_blocks(blocks_of(source, begin), file, size, source=self.root / path)

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        """See `Storage.read_range`."""
        with self._errors_of(path), _opened(self._checked(path)) as source:
            source.seek(begin)
            return source.read(size)

    def files(self, folder: str, *, deep: bool = True) -> Iterator[str]:
        """See `Storage.files`."""
        for parent, below, names in os.walk(self._checked(folder)):
            if not deep:
                below.clear()
            for name in names:
                path = (Path(parent) / name).relative_to(self.root).as_posix()
                if not name.startswith(_UNFINISHED) and self._is_listed(path):
                    yield path

    def folders(self, folder: str) -> Iterator[str]:
        """See `Storage.folders`."""
        with self._errors_of(folder):
            target = self._checked(folder)
            names = [entry.name for entry in target.iterdir() if entry.is_dir()] if target.is_dir() else []
        yield from filter(self._is_listed, (f"{folder}/{name}" if folder else name for name in names))

    def delete(self, folder: str, *, files: Sequence[str] | None = None) -> None:  # noqa: ARG002 - for remote stores
        """See `Storage.delete`. Deletes a link itself, never its target."""
        target = self._checked(folder, follow_last=False)
        with self._errors_of(folder), suppress(FileNotFoundError):
            if target.is_dir() and (not folder or not target.is_symlink()):
                self._seen -= {root for root in self._seen if root.is_relative_to(target)}
                _delete_folder(target)
            else:
                target.unlink()

    def remove_empty_folders(self) -> None:
        """Remove this folder with the folders below it, as far as no files are in them."""
        for folder, _, _ in os.walk(self._checked(""), topdown=False):
            with suppress(OSError):  # it has files, or another process has just written one
                os.rmdir(folder)  # noqa: PTH106 - as `os.walk` names it
                self._seen.discard(Path(folder))

    def probe(self, home: str = "") -> list[str]:
        """See `Storage.probe`."""
        _require_writable(self.root)
        if home:
            _require_folders_writable(self.at(home).root)
        return []

    def _bounded(self, path: str, source: IO[bytes]) -> bytes:
        """The bytes of an open file, if they are not too many.

        Raises:
            FileTooLarge: there are more than any file of its kind has.
        """
        if not self._guarded:
            return source.read()
        where = f"{self.root}/{path}"
        most = most_bytes(where)
        if os.fstat(source.fileno()).st_size > most:
            raise too_large(where)
        data = source.read(most + 1)  # the sizes of some files, as those of /proc, are 0
        require_readable(where, data)
        return data

    def _checked(self, path: str, data: bytes | None = None, *, follow_last: bool = True) -> Path:
        """The file or folder at a path.

        Args:
            data: what is going to be written there.
            follow_last: see `require_links_inside`.

        Raises:
            PathRefused: it is outside of the root.
            FileTooLarge: no reader would read the data.
        """
        if self._guarded:
            if data is not None:
                refuse_unreadable(f"{self.root}/{path}", data)
            require_inside(path, root=self.uri)
            require_links_inside(self.root, path, follow_last=follow_last)
        return self.root / path

    def _checked_in_home(self, path: str) -> Path:
        """`_checked` for a file in one of several homes below this root. Each home may be a link."""
        home, slash, below = path.partition("/")
        return self.at(home)._checked(below) if slash else self._checked(path)

    def _is_listed(self, path: str) -> bool:
        """Whether listings include a name. Names that are refused belong to someone else."""
        return not self._guarded or is_inside(path)

    @contextmanager
    def _replacing(self, path: str, target: Path) -> Iterator[Path]:
        """A temporary file to write, which then replaces `target` durably."""
        with self._errors_of(path), self._unfinished_file(target) as unfinished:
            yield unfinished
            unfinished.replace(target)
            sync_folder(target.parent)

    @contextmanager
    def _unfinished_file(self, target: Path, *, recreate_folder: bool = True) -> Iterator[Path]:
        """A temporary file beside the target, removed on exit unless the process is killed.

        Args:
            target: its folder is created if necessary.
            recreate_folder: whether to create a folder that existed before and disappeared. False for log entries: a
                new folder would hide that the earlier entries are lost.
        """
        below = self.root if self.root in self._seen else None
        if not recreate_folder and target.parent in self._seen:
            self._require_still_exists(target.parent)
            below = target.parent
        make_durably(target.parent, below=below)
        with temporary_file(target.parent, _UNFINISHED) as unfinished:
            yield unfinished

    @contextmanager
    def _errors_of(self, path: str) -> Iterator[None]:
        file = self.root / path
        try:
            self._require_still_exists(self.root)
            yield
            if self.root not in self._seen and self.root.is_dir():
                self._seen.add(self.root)
        except FileNotFoundError as error:
            self._require_still_exists(self.root)
            raise FileMissing(f"{file} does not exist") from error
        except IsADirectoryError as error:
            raise FileMissing(f"{file} does not exist; it is a folder") from error
        except (FileExistsError, NotADirectoryError) as error:
            fault = FileMissing if isinstance(error, NotADirectoryError) else StorageError
            raise fault(f"{file}: a file is in place of a folder; move it away") from error
        except PermissionError as error:
            raise StorageError(
                f"{file}: permission denied; check who owns the folder ({error.filename}), and run again"
            ) from error
        except OSError as error:
            raise StorageError(f"{file}: {_disk_problem(error)} and run again") from error

    def _require_still_exists(self, folder: Path) -> None:
        if folder in self._seen and not folder.is_dir():
            raise StorageError(
                f"{folder} existed before and is gone; check whether it was moved or its disk is no longer mounted, "
                "restore it, and run again"
            )


def _opened(file: Path) -> IO[bytes]:
    """Open a regular file. Others, such as pipes and devices, may block, never end, or do something when read.

    Raises:
        PathRefused: it is none.
        OSError: it cannot be opened.
    """
    _require_regular(file, file.stat().st_mode)  # before, because opening a device may do something
    opened = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _require_regular(file, os.fstat(opened.fileno()).st_mode)  # it may have been exchanged
    except BaseException:
        opened.close()
        raise
    return opened


def _require_regular(file: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(file)
    if not stat.S_ISREG(mode):
        raise PathRefused(f"{file} is not a regular file, but a pipe or a device; name a file")


def _disk_problem(error: OSError) -> str:
    if (limit := _LIMITS.get(error.errno or 0)) is not None:
        return limit + _ANOTHER_FOLDER + ","
    return _PROBLEMS.get(error.errno or 0, f"{error.strerror or error}; check the disk")


def _delete_folder(folder: Path) -> None:
    """Delete a folder, also if another writer adds files to it meanwhile; one that never stops ends in an error."""
    for _ in range(_DELETE_TRIES - 1):
        try:
            shutil.rmtree(folder, onerror=_ignore_missing)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
        else:
            return
    shutil.rmtree(folder, onerror=_ignore_missing)


def _ignore_missing(_function: object, _path: str, error: tuple[type[BaseException], BaseException, object]) -> None:
    """Error handler of rmtree: another process may delete the same folder at the same time."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def _require_writable(folder: Path) -> None:
    """Create, sync, link and delete a small file, as a commit does.

    Checking permission bits is not enough: root passes them all, and they do not show a read-only mount.

    Args:
        folder: the root of the store. If it does not exist, the nearest one above is tried: it will be made there.

    Raises:
        StoreRefused: files cannot be created or linked there.
        StorageError: the disk is full, or fails.
    """
    root = folder
    try:
        folder = next(place for place in (folder, *folder.parents) if place.is_dir())
        with temporary_file(folder, _UNFINISHED if folder == root else _PROBE) as file:
            write_durably(file, b"x")
            link = file.with_name(f"{file.name}-link")
            try:
                _link(file, link, folder)
            finally:
                link.unlink(missing_ok=True)
    except OSError as error:
        raise _refusal(error, folder) from error


def _require_folders_writable(home: Path) -> None:
    """Create and delete a file in each folder that a run writes to, as far as it exists.

    Raises:
        StoreRefused: files cannot be created in one of them.
        StorageError: the disk is full, or fails.
    """
    for folder in _folders_of(home):
        try:
            with temporary_file(folder, _UNFINISHED):
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


def _no_hard_links(folder: Path, error: OSError) -> str:
    """The message for a folder where a create-only write cannot be atomic."""
    return (
        f"{folder}: this file system has no hard links ({error.strerror}), so commits cannot be atomic; use a local "
        "disk, NFS or gs://"
    )


def _link(file: Path, link: Path, folder: Path) -> None:
    try:
        link.hardlink_to(file)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        raise StoreRefused(_no_hard_links(folder, error)) from error


def _refusal(error: OSError, folder: Path) -> StorageError:
    if error.errno == errno.EROFS:
        return StoreRefused(
            f"{folder}: the disk is mounted read-only; make it writable (mount -o remount,rw), or name another folder "
            "with " + _FOLDER
        )
    if error.errno in _NO_PERMISSION:
        return StoreRefused(
            f"{folder}: no permission to create files ({error.strerror}); check who owns the folder" + _ANOTHER_FOLDER
        )
    if error.errno in _LIMITS:
        return StoreRefused(f"{folder}: {_LIMITS[error.errno]}" + _ANOTHER_FOLDER)
    return StorageError(f"{folder}: " + _disk_problem(error) + " and run again")
