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
from tasks.foundation.storage.download import blocks_of, copy_blocks, local_target
from tasks.foundation.storage.local_probe import NO_HARD_LINKS, require_writable
from tasks.foundation.storage.path_guard import is_inside, require_inside, require_no_way_out
from tasks.foundation.storage.temporary_files import temporary_file

# Unfinished files; no reader looks at such a name.
_UNFINISHED = ".unfinished-"


class LocalStorage:
    """Files below a local folder, which is made when the first file is written.

    A folder that was there and is gone, because it was moved or its disk is no longer mounted, is not made again:
    whoever works on it would go on beside the true one. What was seen is shared with the stores made by `at`.
    """

    def __init__(self, root: Path, seen: set[Path] | None = None, *, fenced: bool = True) -> None:
        """Nothing is looked at yet.

        Args:
            root: the folder; it may be a link.
            seen: roots and folders read from that were there, shared with the store that this one is made from.
            fenced: whether links that lead out of the root are refused, see `fence.py`.
        """
        self.root = root
        self._fenced = fenced
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
        if self._fenced:
            require_inside(folder, root=self.uri)
        return LocalStorage(self.root / folder, self._seen, fenced=self._fenced)

    def with_deadline(self, seconds: float) -> "LocalStorage":  # noqa: ARG002
        """A disk is not asked twice."""
        return self

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        with self._errors_of(path):
            place = self._place(path)
            data = place.read_bytes()
            self._seen.add(place.parent)
            return data

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        with self._errors_of(path):
            return self._place(path).is_file()

    def create(self, path: str, data: bytes) -> None:
        """A complete temporary file is hard-linked into place: link refuses an existing name, on NFS too."""
        target = self._place(path)
        with self._errors_of(path), self._unfinished_file(target, again=False) as unfinished:
            _write_durably(unfinished, data)
            try:
                os.link(unfinished, target)
            except FileExistsError as fault:
                raise FileAlreadyThere(f"{target} exists already") from fault
            except OSError as fault:
                if fault.errno in NO_HARD_LINKS:
                    raise StorageError(
                        f"{target.parent} is on a file system without hard links ({fault.strerror}), so a commit "
                        "cannot be made atomic there; use a local disk, NFS or gs://"
                    ) from fault
                raise
            _sync_folder(target.parent)

    def write(self, path: str, data: bytes) -> None:
        """See `Storage.write`."""
        target = self._place(path)
        with self._errors_of(path), self._unfinished_file(target) as unfinished:
            _write_durably(unfinished, data)
            unfinished.replace(target)
            _sync_folder(target.parent)

    def upload(self, source: Path, path: str) -> Stored:
        """See `Storage.upload`."""
        target = self._place(path)
        with self._errors_of(path), self._unfinished_file(target) as unfinished:
            shutil.copyfile(source, unfinished)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(target)
            _sync_folder(target.parent)
        return checksum_file(source)

    def copy(self, path: str, target: str) -> None:
        """A hard link: no file here is ever written to again. Where it cannot be made, a copy of the bytes."""
        source, place = self._in_a_home(path), self._in_a_home(target)
        with self._errors_of(path):
            if not source.is_file():
                raise FileNotFoundError(source)
        with self._errors_of(target), self._unfinished_file(place) as unfinished:
            unfinished.unlink()
            try:
                os.link(source, unfinished)
            except OSError as fault:
                if fault.errno not in {*NO_HARD_LINKS, errno.EXDEV}:
                    raise
                shutil.copyfile(source, unfinished)
                with unfinished.open("rb") as file:
                    os.fsync(file.fileno())
            unfinished.replace(place)
            _sync_folder(place.parent)

    def stat(self, path: str) -> Stored:
        """Reads the file: a local disk keeps no checksum."""
        with self._errors_of(path):
            return checksum_file(self._place(path))

    def checksum(self, path: str, *, begin: int = 0, size: int | None = None) -> Stored:
        """See `Storage.checksum`."""
        with self._errors_of(path), self._place(path).open("rb") as source:
            return copy_blocks(blocks_of(source, begin), None, size, where=self.root / path)

    def local_path(self, path: str) -> Path | None:
        """The file itself."""
        if not self.exists(path):
            raise FileMissing(f"{self.root / path} is not there")
        return self._place(path)

    def download(self, path: str, target: Path, *, begin: int = 0, size: int | None = None) -> Stored:
        """See `Storage.download`."""
        with self._errors_of(path), self._place(path).open("rb") as source, local_target(target) as file:
            return copy_blocks(blocks_of(source, begin), file, size, where=self.root / path)

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        """See `Storage.read_range`."""
        with self._errors_of(path), self._place(path).open("rb") as source:
            source.seek(begin)
            return source.read(size)

    def files(self, folder: str) -> Iterator[str]:
        """See `Storage.files`."""
        for parent, _, names in os.walk(self._place(folder)):
            for name in names:
                path = (Path(parent) / name).relative_to(self.root).as_posix()
                if not name.startswith(_UNFINISHED) and self._lists(path):
                    yield path

    def folders(self, folder: str) -> Iterator[str]:
        """See `Storage.folders`."""
        with self._errors_of(folder):
            target = self._place(folder)
            names = [entry.name for entry in target.iterdir() if entry.is_dir()] if target.is_dir() else []
        yield from filter(self._lists, (f"{folder}/{name}" if folder else name for name in names))

    def delete(self, folder: str) -> None:
        """See `Storage.delete`. Of a link only the link goes, never what it leads to."""
        target = self._place(folder, last=False)
        with self._errors_of(folder), suppress(FileNotFoundError):
            if target.is_dir() and (not folder or not target.is_symlink()):
                self._seen -= {root for root in self._seen if root.is_relative_to(target)}
                shutil.rmtree(target, onerror=_unless_gone)
            else:
                target.unlink()

    def probe(self) -> list[str]:
        """See `Storage.probe`."""
        require_writable(self.root, _UNFINISHED)
        return []

    def _place(self, path: str, *, last: bool = True) -> Path:
        """Where a path lies.

        Raises:
            PathRefused: out of the root.
        """
        if self._fenced:
            require_inside(path, root=self.uri)
            require_no_way_out(self.root, path, last=last)
        return self.root / path

    def _in_a_home(self, path: str) -> Path:
        """`_place` of a file in one of several homes below this root. Each is a root of its own, and may be a link."""
        home, slash, below = path.partition("/")
        return self.at(home)._place(below) if slash else self._place(path)

    def _lists(self, path: str) -> bool:
        """Whether a name that was found is told of: nothing of Baton's has a name that is refused."""
        return not self._fenced or is_inside(path)

    @contextmanager
    def _unfinished_file(self, target: Path, *, again: bool = True) -> Iterator[Path]:
        """A temporary name beside the target, gone afterwards whatever happens (but a kill).

        Args:
            target: whose folder is made.
            again: also if it was there; a log's next entry must not make the folder anew in which the others were.
        """
        if not again:
            self._require(target.parent)
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
        except IsADirectoryError as fault:
            raise FileMissing(f"{where} is not there; a folder has its name") from fault
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
        self._require(self.root)

    def _require(self, folder: Path) -> None:
        if folder in self._seen and not folder.is_dir():
            raise StorageError(
                f"{folder} was there and is gone; see whether it was moved or its disk is no longer mounted, bring "
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
