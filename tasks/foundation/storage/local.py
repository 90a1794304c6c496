"""file://: a folder of this machine, with the durability that a commit needs."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasks.foundation.errors import FileAlreadyThere, FileMissing, StorageError
from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.checksum import checksum_file
from tasks.foundation.storage.copying import blocks_of, copy_blocks, local_target
from tasks.foundation.storage.leftovers import temporary_file

# Unfinished files; no reader looks at such a name.
_UNFINISHED = ".unfinished-"
# What a file system says that knows no hard links, or has no more of them for this file.
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}


class LocalStorage:
    """Files below a local folder, which is made when the first file is written.

    A folder that was there and is gone, because it was moved or its disk is no longer mounted, is not made again:
    whoever works on it would go on beside the true one. What was seen is shared with the stores made by `at`.
    """

    def __init__(self, root: Path, seen: set[Path] | None = None) -> None:
        self.root = root
        self._seen = set() if seen is None else seen

    @property
    def uri(self) -> str:
        """The folder's absolute path: what a person would type."""
        return str(self.root)

    @property
    def transfers(self) -> int:
        """One disk is not faster for being asked twice."""
        return 1

    def at(self, folder: str) -> "LocalStorage":
        """The same, one folder down."""
        return LocalStorage(self.root / folder, self._seen)

    def hurried(self, seconds: float) -> "LocalStorage":  # noqa: ARG002
        """A disk is not asked twice."""
        return self

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
                if fault.errno in _NO_HARD_LINKS:
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

    def copy(self, path: str, target: str) -> None:
        """A hard link: no file here is ever written to again. Where it cannot be made, a copy of the bytes."""
        source, place = self.root / path, self.root / target
        with self._errors_of(path):
            if not source.is_file():
                raise FileNotFoundError(source)
        with self._errors_of(target), self._unfinished_file(place) as unfinished:
            unfinished.unlink()
            try:
                os.link(source, unfinished)
            except OSError as fault:
                if fault.errno not in {*_NO_HARD_LINKS, errno.EXDEV}:
                    raise
                shutil.copyfile(source, unfinished)
                with unfinished.open("rb") as file:
                    os.fsync(file.fileno())
            unfinished.replace(place)
            _sync_folder(place.parent)

    def stat(self, path: str) -> Stored:
        """Reads the file: a local disk keeps no checksum."""
        with self._errors_of(path):
            return checksum_file(self.root / path)

    def checksum(self, path: str, *, begin: int = 0, size: int | None = None) -> Stored:
        """See `Storage.checksum`."""
        with self._errors_of(path), (self.root / path).open("rb") as source:
            return copy_blocks(blocks_of(source, begin), None, size, where=self.root / path)

    def local_path(self, path: str) -> Path | None:
        """The file itself."""
        if not self.exists(path):
            raise FileMissing(f"{self.root / path} is not there")
        return self.root / path

    def download(self, path: str, target: Path, *, begin: int = 0, size: int | None = None) -> Stored:
        """See `Storage.download`."""
        with self._errors_of(path), (self.root / path).open("rb") as source, local_target(target) as file:
            return copy_blocks(blocks_of(source, begin), file, size, where=self.root / path)

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        """See `Storage.read_range`."""
        with self._errors_of(path), (self.root / path).open("rb") as source:
            source.seek(begin)
            return source.read(size)

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
                self._seen -= {root for root in self._seen if root.is_relative_to(target)}
                shutil.rmtree(target, onerror=_unless_gone)
            else:
                target.unlink()

    def probe(self) -> list[str]:
        """Nothing to ask: the first write tells."""
        return []

    @contextmanager
    def _unfinished_file(self, target: Path) -> Iterator[Path]:
        """A temporary name beside the target, gone afterwards whatever happens (but a kill)."""
        _make_durably(target.parent)
        with temporary_file(target.parent, _UNFINISHED) as unfinished:
            yield unfinished

    @contextmanager
    def _errors_of(self, path: str) -> Iterator[None]:
        where = self.root / path
        try:
            self._require_root()
            yield
            if self.root.is_dir():
                self._seen.add(self.root)
        except FileNotFoundError as fault:
            self._require_root()
            raise FileMissing(f"{where} is not there") from fault
        except (FileExistsError, NotADirectoryError) as fault:
            raise StorageError(f"{where}: a file stands where a folder is needed; move it away") from fault
        except PermissionError as fault:
            raise StorageError(
                f"{where}: permission denied; see who owns the folder ({fault.filename}), and run again"
            ) from fault
        except OSError as fault:
            if fault.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise StorageError(f"{where}: no space left on the disk; free some and run again") from fault
            if fault.errno == errno.EFBIG:
                raise StorageError(
                    f"{where}: larger than a file may be here; raise the limit (ulimit -f) and run again"
                ) from fault
            if fault.errno == errno.EROFS:
                raise StorageError(f"{where}: the disk is mounted read-only; make it writable and run again") from fault
            raise StorageError(f"{where}: {fault.strerror or fault}; see to the disk and run again") from fault

    def _require_root(self) -> None:
        if self.root in self._seen and not self.root.is_dir():
            raise StorageError(
                f"{self.root} was there and is gone; see whether it was moved or its disk is no longer mounted, bring "
                "it back and run again"
            )


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
