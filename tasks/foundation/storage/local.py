"""file://: a folder of this machine, with the durability that a commit needs."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasks.foundation.errors import FileAlreadyThere, FileMissing, StorageError
from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.checksum import checksum_file

# Unfinished files; no reader looks at such a name.
_UNFINISHED = ".unfinished-"


class LocalStorage:
    """Files below a local folder, which is made when the first file is written."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def uri(self) -> str:
        """The folder's absolute path: what a person would type."""
        return str(self.root)

    def at(self, folder: str) -> "LocalStorage":
        """The same, one folder down."""
        return LocalStorage(self.root / folder)

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        with self._errors_of(path):
            return (self.root / path).read_bytes()

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        with self._errors_of(path):
            return (self.root / path).is_file()

    def create(self, path: str, data: bytes) -> None:
        """A complete temporary file is hard-linked into place: link refuses an existing name, on NFS too."""
        target = self.root / path
        with self._errors_of(path), self._unfinished_file(target) as unfinished:
            _write_durably(unfinished, data)
            try:
                os.link(unfinished, target)
            except FileExistsError as fault:
                raise FileAlreadyThere(f"{target} exists already") from fault
            except OSError as fault:
                if fault.errno in {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}:
                    raise StorageError(
                        f"{target.parent} is on a file system without hard links ({fault.strerror}), so a commit "
                        "cannot be made atomic there; use a local disk, NFS or gs://"
                    ) from fault
                raise
            _sync_folder(target.parent)

    def write(self, path: str, data: bytes) -> None:
        """See `Storage.write`."""
        target = self.root / path
        with self._errors_of(path), self._unfinished_file(target) as unfinished:
            _write_durably(unfinished, data)
            unfinished.replace(target)
            _sync_folder(target.parent)

    def upload(self, source: Path, path: str) -> Stored:
        """See `Storage.upload`."""
        target = self.root / path
        with self._errors_of(path), self._unfinished_file(target) as unfinished:
            shutil.copyfile(source, unfinished)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(target)
            _sync_folder(target.parent)
        return checksum_file(source)

    def stat(self, path: str) -> Stored:
        """Reads the file: a local disk keeps no checksum."""
        with self._errors_of(path):
            return checksum_file(self.root / path)

    @contextmanager
    def local_file(self, path: str) -> Iterator[Path]:
        """The file itself."""
        if not self.exists(path):
            raise FileMissing(f"{self.root / path} is not there")
        yield self.root / path

    def files(self, folder: str) -> Iterator[str]:
        """See `Storage.files`."""
        for parent, _, names in os.walk(self.root / folder):
            for name in names:
                if not name.startswith(_UNFINISHED):
                    yield (Path(parent) / name).relative_to(self.root).as_posix()

    def folders(self, folder: str) -> Iterator[str]:
        """See `Storage.folders`."""
        with self._errors_of(folder):
            target = self.root / folder
            below = [entry.name for entry in target.iterdir() if entry.is_dir()] if target.is_dir() else []
        yield from (f"{folder}/{name}" if folder else name for name in below)

    def delete(self, folder: str) -> None:
        """See `Storage.delete`."""
        target = self.root / folder
        with self._errors_of(folder), suppress(FileNotFoundError):
            if target.is_dir():
                shutil.rmtree(target, onerror=_unless_gone)
            else:
                target.unlink()

    @contextmanager
    def _unfinished_file(self, target: Path) -> Iterator[Path]:
        """A temporary name beside the target, gone afterwards whatever happens (but a kill)."""
        _make_durably(target.parent)
        handle, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=target.parent)
        os.fchmod(handle, 0o644)  # mkstemp's 0600 would lock out the group that shares a home
        os.close(handle)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    @contextmanager
    def _errors_of(self, path: str) -> Iterator[None]:
        where = self.root / path
        try:
            yield
        except FileNotFoundError as fault:
            raise FileMissing(f"{where} is not there") from fault
        except (FileExistsError, NotADirectoryError) as fault:
            raise StorageError(f"{where}: a file stands where a folder is needed; move it away") from fault
        except PermissionError as fault:
            raise StorageError(f"{where}: permission denied; see who owns the folder ({fault.filename})") from fault
        except OSError as fault:
            if fault.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise StorageError(f"{where}: no space left on the disk; free some and run again") from fault
            raise StorageError(f"{where}: {fault.strerror or fault}") from fault


def _unless_gone(_function: object, _path: str, fault: tuple[type[BaseException], BaseException, object]) -> None:
    """Two may clear the same folder away: what the other deleted first is no fault, and the rest is still to do."""
    if not isinstance(fault[1], FileNotFoundError):
        raise fault[1]


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _make_durably(folder: Path) -> None:
    """Make a folder and those above it, each safe from a power cut: a file is no safer than the folders above it."""
    if not folder.is_dir():
        _make_durably(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """A file's name is durable only once its folder is."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
