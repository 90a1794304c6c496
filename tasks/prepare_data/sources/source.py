"""The interface of a source, the parsing of its options, and the files that a user's function opens.

A dataset of a function is named by its code, not by what that reads. So Python's audit events say which files it opens,
and the manifest has them: before the dataset is used again, they are compared. What does not pass through Python's own
`open` is not seen: C++ readers (TensorFlow, pyarrow and so `pandas.read_parquet`, HDF5), other processes, a network.
Files and folders that `data.options` names count as opened, and those that a dataset has as `file_paths`.
"""

import difflib
import hashlib
import os
import stat
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from pydantic import ValidationError

from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.dataset import Feature, OpenedFile, RangeLayout, ShardRecord
from baton.tasks.foundation.dataset.features import Array
from baton.tasks.foundation.errors import RunFileError
from baton.tasks.prepare_data.sources.source_files import SourceFile

# The example's position in the source, for messages, and the example as a user would yield it, or a `Row`.
LocatedExample = tuple[str, object]


@dataclass(frozen=True, slots=True)
class Row:
    """An example that was taken from whole arrays or from a batch: named arrays, as `features.flatten` returns them."""

    arrays: dict[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Consecutive records of a file; all ranges, in order, form the whole source."""

    path: str  # absolute path or address of the file
    begin: int  # offset of the first byte
    size: int  # bytes
    crc32c: str
    records: int
    layout: RangeLayout | None = None  # None: of a TFRecord file

    def as_shard(self, first: int = 0) -> ShardRecord:
        """Return the manifest's entry for it; `first` is the index of its first record in the source."""
        return ShardRecord(
            path=self.path,
            begin=self.begin,
            size=self.size,
            crc32c=self.crc32c,
            first=first,
            records=self.records,
            examples=self.records,
            layout=self.layout,
        )


class ExampleChecker(Protocol):
    """Checks the examples of ranges: `example_checks.Checker`."""

    def check(self, where: str, example: object) -> object:
        """Check one example; `where` is its position in the source."""

    def check_rows(self, where: Callable[[int], str], arrays: Mapping[str, Array], features: Sequence[Feature]) -> None:
        """Check many at once; `where` says the position of one, given its index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """Examples in files, to be read from there and not copied."""

    features: tuple[Feature, ...]  # in the order of the flattened example
    # Reads all files, and checks each example with its first argument. The second argument is the number of records per
    # range; None: about as many bytes as a shard.
    ranges: Callable[[ExampleChecker, int | None], Iterator[Range]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Examples that can be read once, in order, without holding all of them in memory.

    `content` and `settings` together determine every example, so they name the dataset.
    """

    content: str  # sha256 of the data, or a name for data that cannot change
    settings: Mapping[str, Any]  # options that affect the examples
    origin: Mapping[str, str]  # for the manifest: files and their checksums
    length: int | None  # number of examples; None if it is unknown before reading
    # Call it, and take its examples, within `surroundings`.
    read: Callable[[], Iterator[LocatedExample]]
    surroundings: Callable[[], AbstractContextManager[None]] = nullcontext
    in_place: InPlace | None = None
    # Of features that are copied: the texts whose positions are the values.
    vocabularies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # After all examples are read: what a user's function opened; None: all that is read is part of `content`.
    opened: Callable[[], tuple[OpenedFile, ...] | None] = lambda: None
    files: Sequence[SourceFile] = ()  # that are read
    # A sentence about files of the folder that are not read, by their names, for the user. Sources that read or refuse
    # all files, or those that the folder itself lists, have none, nor has `text`, whose suffix is in the run file.
    left_out: str = ""

    def confirm(self) -> None:
        """Check whether the last bytes were damaged in transit. Call this after an example is refused.

        Raises:
            DamagedInTransit: they were.
        """
        for file in self.files:
            file.confirm()


class Options(Contract):
    """`data.options` of a built-in source."""


OptionsT = TypeVar("OptionsT", bound=Options)


def parse_options(model: type[OptionsT], options: Mapping[str, Any], *, source: str) -> OptionsT:
    """Parse the options of a built-in source.

    Args:
        model: the source's options.
        source: its name, for messages.

    Raises:
        RunFileError: an option is unknown, missing or has another type; names the key, the value and the remedy.
    """
    known = {field.alias or name: field for name, field in model.model_fields.items()}
    for key in options:
        if key not in known:
            raise RunFileError(
                f"data.options.{key}: {options[key]!r}: the source {source} does not have this option; "
                f"{suggestion(key, known)}"
            )
    try:
        return model.model_validate(dict(options))
    except ValidationError as fault:
        first = fault.errors()[0]
        if not first["loc"]:  # options that do not go together; the error names them
            raise RunFileError(f"data.options.{first['ctx']['error']}") from fault
        key = str(first["loc"][0])
        remedy = known[key].description
        path, value, missing = _find_option(options, first["loc"])
        if missing:
            raise RunFileError(f"data.options.{path} is missing: the source {source} needs it: {remedy}") from fault
        raise RunFileError(f"data.options.{path}: {value!r}: {first['msg']}; {key} is {remedy}") from fault


def _find_option(options: Mapping[str, Any], loc: tuple[int | str, ...]) -> tuple[str, object, bool]:
    """Return an error's key, the value there, and whether it is missing; `loc` may continue into pydantic's types."""
    keys: list[str] = []
    value: object = options
    for part in loc:
        if not isinstance(value, Mapping):
            break
        keys.append(str(part))
        if part not in value:
            return ".".join(keys), None, True
        value = value[part]
    return ".".join(keys), value, False


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the most similar name, if any, and all known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}available: {', '.join(names) or 'none'}"


NOT_SEEN: Final = (
    "not seen is what TensorFlow, pyarrow (pandas.read_parquet), HDF5, other processes or a network read: name such "
    "files in data.options, or raise data.version with them"
)
_MOST_OPENED: Final = 10_000
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_LISTING: Final = ("os.listdir", "os.scandir")
_CODE: Final = (".py", ".pyc", ".pyi", ".so")
_PACKAGES: Final = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_SYSTEM: Final = (*_PACKAGES, "/dev/", "/etc/", "/proc/", "/run/", "/sys/", "/usr/")
# Where packages keep data that they download. What else is hidden is settings and secrets, as these names are.
_SEEN: Final = ("..", ".cache", ".keras")
_SETTINGS: Final = ("keras.json", "token")
# Modules that call the user's code. What others of Baton open while it is read is not the user's.
_BATON: Final = "baton."
_CALLERS: Final = (
    *(f"{__package__}.{name}" for name in ("function", "read_once", "refused_forms", "returned_arrays")),
    *(f"baton.tasks.foundation.{name}" for name in ("user_functions", "child_imports", "seeding")),
)
_watching: list["OpenedFiles"] = []


class OpenedFiles:
    """Watches which files the user's code opens for reading, within `with`; it may be entered several times.

    Code, installed packages, hidden files, and what the code writes itself are no data.
    """

    def __init__(self, folder: Path) -> None:
        """Watch code whose relative paths start at `folder`, the run file's."""
        self._folder = _absolute(folder)
        self._began = time.time_ns()
        self._found: dict[Path, int] = {}  # path -> when it had changed, in nanoseconds
        self._written: set[Path] = set()
        self._listed: set[Path] = set()

    def __enter__(self) -> None:
        _add_hook()
        _watching.append(self)

    def __exit__(self, *_: object) -> None:
        _watching.remove(self)

    def include(self, other: "OpenedFiles") -> None:
        """Add what another one has seen."""
        self._found.update(other._found)
        self._listed |= other._listed

    def add(self, values: Iterable[object]) -> None:
        """Add files that are read, whether or not Python opens them, and all files below folders; no other value."""
        for value in values:
            if isinstance(value, list | tuple):
                self.add(value)
            elif isinstance(value, str):
                path = _absolute(self._folder / value)
                self._note(path)
                for folder, _, names in () if self._folder.is_relative_to(path) else os.walk(path):
                    self._listed.add(Path(folder))
                    for name in names:
                        self._note(Path(folder, name))
                    if len(self._found) >= _MOST_OPENED:
                        break

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        """Look at an audit event."""
        if not isinstance(args[0], str | bytes | os.PathLike):
            return  # a descriptor
        path = _absolute(os.fsdecode(args[0]))
        if event in _LISTING:
            self._listed.add(path)
        elif event == "open" and isinstance(args[2], int) and args[2] & _WRITING:
            self._written.add(path)
        else:
            self._note(path)

    def _note(self, path: Path) -> None:
        own = path.is_relative_to(self._folder)
        parts = Path(self._name_of(path)).parts
        if path.suffix in _CODE or "site-packages" in parts or (not own and str(path).startswith(_SYSTEM)):
            return
        if path.name in _SETTINGS or any(part[0] == "." and part not in _SEEN for part in parts):
            return
        with suppress(OSError, ValueError):  # it is not there, or no file can have this name
            found = path.stat()
            # Not one that it has just written.
            if stat.S_ISREG(found.st_mode) and found.st_ctime_ns < self._began and len(self._found) < _MOST_OPENED:
                self._found.setdefault(path, found.st_ctime_ns)

    def files(self) -> tuple[OpenedFile, ...]:
        """Return what was opened, as it is now, and the folders of it that were listed."""
        read = sorted(self._found.keys() - self._written)
        suffixes = tuple(sorted({path.suffix for path in read} - {""}))
        above = {folder for path in read for folder in path.parents} if suffixes else set()
        files = [_state(self._name_of(path), path, changed=self._found[path]) for path in read]
        files += [_state(self._name_of(path), path, suffixes) for path in sorted(self._listed & above)]
        return tuple(each for each in files if each is not None)

    def _name_of(self, path: Path) -> str:
        """Return a name that means the same where the project has moved."""
        beside = self._folder.parent != Path("/") and path.is_relative_to(self._folder.parent)
        return os.path.relpath(path, self._folder) if beside else str(path)


def changed_since(opened: Iterable[OpenedFile], folder: Path) -> tuple[OpenedFile, ...]:
    """Return the files and folders that are others by now, as they are; what is not there is not compared.

    Args:
        opened: as a manifest has them.
    """
    now = [(each, _state(each.path, folder.absolute() / each.path, each.suffixes, known=each)) for each in opened]
    return tuple(found for each, found in now if found and (found.sha256 != each.sha256 or not found.sha256))


def _absolute(path: str | Path) -> Path:
    return Path(os.path.normpath(Path(path).absolute()))


def _state(
    name: str, path: Path, suffixes: tuple[str, ...] = (), *, changed: int = 0, known: OpenedFile | None = None
) -> OpenedFile | None:
    """Return a file as it is now, or the files of a folder by their names; None if it is not there.

    `suffixes` are those of the files in a folder that count. A file may have `changed` last before it was read, in
    nanoseconds, and what a manifest knows of one that has the same size and time is not read again.
    """
    try:
        found = path.stat()
        if suffixes:
            below = bool(name.strip("./"))  # beside the run file are homes and the like
            names = [each.name for each in path.iterdir() if each.suffix in suffixes or (below and each.is_dir())]
            names = sorted(each for each in names if each[0] not in "._")
            digest = hashlib.sha256("\0".join(names).encode()).hexdigest()
            return OpenedFile(path=name, size=len(names), sha256=digest, suffixes=suffixes)
        if known is not None and (known.size, known.modified_ns) == (found.st_size, found.st_mtime_ns):
            return known
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
    if changed not in {0, found.st_ctime_ns}:
        digest = ""  # nobody knows which bytes were read
    return OpenedFile(path=name, size=found.st_size, modified_ns=found.st_mtime_ns, sha256=digest)


@cache
def _add_hook() -> None:
    sys.addaudithook(_audit)  # nothing removes one


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Hand the events of the user's code to who watches. An error of this function would be one of the user's code."""
    if not _watching or event not in {"open", "sqlite3.connect", *_LISTING}:
        return
    frame, modules = sys._getframe().f_back, [""]
    while frame is not None and not modules[-1].startswith(_BATON):
        modules.append(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    of_baton = modules[-1].startswith(_BATON)
    if (of_baton and modules[-1] not in _CALLERS) or "".join(modules[:2]).startswith("importlib"):
        return
    # A thread of the user's or of TensorFlow has no frame of Baton, and does not say for whom it reads.
    for each in _watching[-1:] if of_baton else tuple(_watching):
        with suppress(OSError, ValueError):  # no working folder, or a name that no file can have
            each.see(event, args)
