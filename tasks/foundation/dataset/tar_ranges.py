"""Reads examples from tar files as WebDataset writes them: files of one key, one after another, form an example.

The key is the path up to the first dot of the file's name, what follows is its suffix: `a/0001.jpg` and `a/0001.cls`
are the image and the class of the example `a/0001`. A file of another form, such as a folder or `README`, is skipped.

The headers are parsed here, and not by `tarfile`: what is read again in each epoch must be bounded, needs no file
object, and a link, a sparse file or a damaged header must be an error rather than a missing example. Supported are
v7, ustar, GNU and pax headers (POSIX.1-2017, "pax interchange format"), with long names and sizes.

Values come from files by their last suffix: `jpg`, `jpeg` and `png` are images, `cls` is an integer, `txt` is text,
`npy` is an array without pickled objects, and `json.a.b` is the value at these keys.
"""

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from baton.tasks.foundation.contracts.dataset import Feature, ShardRecord
from baton.tasks.foundation.contracts.home_files import require_readable
from baton.tasks.foundation.dataset.features import MOST_EXAMPLE_BYTES, MOST_NPY_HEADER_BYTES, Array, npy_header
from baton.tasks.foundation.errors import DamagedDataset, FileTooLarge
from baton.tasks.foundation.text import shown

# Returns the next bytes of a file or a range; fewer at its end.
Take = Callable[[int], memoryview]
# Skips the next bytes of a file, and returns how many there were.
Skip = Callable[[int], int]
# What the last suffix of a file says about its content.
KINDS = {"jpg": "image", "jpeg": "image", "png": "image", "json": "json", "cls": "class", "txt": "text", "npy": "array"}
_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_MOST_HEADER_BYTES = 1 << 20  # of long names and pax records of one file
_MOST_ZEROS = 64 << 20  # of the blocks that tapes were written in
_REGULAR = (b"0", b"\0", b"7")
_FOLDER = b"5"
_EXTENSIONS = (b"L", b"K", b"x", b"g")
_REFUSED = {
    b"1": ("a hard link", "write the file itself: tar --hard-dereference"),
    b"2": ("a symbolic link", "write the file itself: tar --dereference"),
    b"S": ("a sparse file", "write the tar without --sparse"),
}
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
_INTEGER = re.compile(rb"\s*[+-]?[0-9]{1,19}\s*")


class TarFault(ValueError):
    """These bytes are no examples; has the place, the problem and the remedy."""


class _FileStart(NamedTuple):
    """Where a file begins, as text only for messages."""

    at: int
    name: str = ""

    def __str__(self) -> str:
        return f"at byte {self.at}" + (f": {shown(repr(self.name))}" if self.name else "")


class Member(NamedTuple):
    """One file of an example."""

    key: str
    suffix: str  # lower case
    content: memoryview  # empty if it is skipped
    begin: int  # offset of its first header
    end: int  # offset of what follows it


class TarExample(NamedTuple):
    """The files of one key."""

    key: str
    files: Mapping[str, memoryview]  # by suffix
    begin: int
    end: int

    def file(self, suffixes: Sequence[str]) -> memoryview:
        """Return the content of the first of these files that it has.

        Raises:
            TarFault: it has none; names those that it has.
        """
        for suffix in suffixes:
            if suffix in self.files:
                return self.files[suffix]
        remedy = "add the file, where files of one key follow each other, or remove the example"
        if self.dotted(suffixes):
            remedy += "; a suffix begins at the first dot of a file's name, so write no other dots into it"
        raise TarFault(f"{self}: has no {' or '.join(suffixes)}, only {shown(', '.join(self.files))}; {remedy}")

    def dotted(self, suffixes: Sequence[str]) -> bool:
        """Whether it has such files by the last dot of their names, but not by the first one."""
        return not {each.rpartition(".")[2] for each in suffixes}.isdisjoint(
            each.rpartition(".")[2] for each in self.files if "." in each and each not in suffixes
        )

    def __str__(self) -> str:
        return f"example {shown(repr(self.key))} at byte {self.begin}"


def members(take: Take, begin: int = 0, *, skip: Skip | None = None) -> Iterator[Member]:
    """Yield the files of a tar file that have a key and a suffix.

    Args:
        take: returns the next bytes of the file or range.
        begin: the offset of the first, for messages.
        skip: skips content, for an index of a whole file, which must have an end mark; None: this is a range.

    Raises:
        TarFault: a header is damaged or not supported, or the file ends too early.
    """
    at = first = begin
    changed: dict[str, str] = {}  # by pax records and long names: path, size
    while header := bytes(take(_BLOCK)):
        if header == _ZEROS:
            _require_zeros(take, at)
            return
        size = _size(header, at)
        kind = header[156:157]
        where = _FileStart(at)
        at += _BLOCK
        if kind in _EXTENSIONS:
            if (held := at - _BLOCK - first + size) > _MOST_HEADER_BYTES:
                raise TarFault(f"{where}: a header of {held} bytes is too long; shorten the file names")
            changed.update(_changes(kind, bytes(_content(take, None, size, where)), where))
            at += _padded(size)
            continue
        name = changed.get("path") or _name(header)
        size = _decimal(changed["size"], where) if "size" in changed else size
        where = _FileStart(where.at, name)
        _require_file(kind, changed, where)
        content = _content(take, skip, size, where)
        at += _padded(size)
        key, suffix = _split(name)
        if suffix and kind != _FOLDER and not name.endswith("/"):
            yield Member(key, suffix, content, first, at)
        first, changed = at, {}
    if skip is not None or changed:
        raise TarFault(f"at byte {at}: the file ends without its end mark, so it may be cut off; write it again")


def examples(files: Iterator[Member]) -> Iterator[TarExample]:
    """Group files of one key that follow each other.

    Raises:
        TarFault: an example has two files of one suffix, or a file cannot be read.
    """
    group: list[Member] = []
    for member in files:
        if group and member.key != group[0].key:
            yield _example(group)
            group = []
        group.append(member)
        if member.end - group[0].begin > MOST_EXAMPLE_BYTES:
            where = _FileStart(group[0].begin, member.key)
            raise TarFault(f"{where} has files of more than {MOST_EXAMPLE_BYTES} bytes; split it into smaller examples")
    if group:
        yield _example(group)


def taking(body: memoryview) -> Take:
    """Return a function that returns the next bytes of `body`."""
    at = 0

    def take(size: int) -> memoryview:
        nonlocal at
        part = body[at : at + size]
        at += len(part)
        return part

    return take


def read_tar(body: memoryview, head: memoryview, record: ShardRecord, features: Sequence[Feature]) -> dict[str, Array]:
    """Return the values of all features of a range of a tar file, see `columns.read_columns`."""
    del head  # a tar file has none
    try:
        found = list(examples(members(taking(body), record.begin)))
        values = values_of(found, features)
    except TarFault as fault:
        raise DamagedDataset(f"{record.path}: {fault}") from fault
    if len(found) != record.records_held:
        raise DamagedDataset(
            f"{record.path}: {len(found)} examples at byte {record.begin}, but {record.records_held} are listed"
        )
    return values


def values_of(found: Sequence[TarExample], features: Sequence[Feature]) -> dict[str, Array]:
    """Return name -> array [examples, *shape] of the feature's dtype; of text and images, bytes objects.

    Raises:
        TarFault: an example lacks a file, or its content is not what the feature says.
    """
    parsed: dict[tuple[str, ...], list[object]] = {}
    values: dict[str, Array] = {}
    for feature in features:
        suffixes, path = parse_key(feature.record_key)
        contents = [each.file(suffixes) for each in found]
        kind = KINDS[suffixes[0].rpartition(".")[2]]
        if kind == "json":
            if suffixes not in parsed:
                parsed[suffixes] = [document(each, suffixes) for each in found]
            picked = [pick(each, value, path) for each, value in zip(found, parsed[suffixes], strict=True)]
            values[feature.name] = _of_json(found, picked, feature)
        elif kind == "array":
            values[feature.name] = _of_npy(found, contents, feature)
        elif kind == "class":
            values[feature.name] = np.asarray([integer(*pair) for pair in zip(found, contents, strict=True)], np.int64)
        else:
            values[feature.name] = _objects([bytes(content) for content in contents])
            if kind == "text":
                for each, text in zip(found, values[feature.name], strict=True):
                    _require_utf8(each, text)
    return values


def parse_key(key: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the suffixes that a key names, any of which will do, and the keys within a JSON file.

    `jpg;png` is (("jpg", "png"), ()), `seg.png` is (("seg.png",), ()), `meta.json.a.b` is (("meta.json",), ("a", "b")).
    """
    parts = key.split(".")
    if ";" not in key and "json" in parts:
        end = parts.index("json") + 1
        return (".".join(parts[:end]).lower(),), tuple(parts[end:])
    return tuple(key.lower().split(";")), ()


def integer(example: TarExample, content: memoryview) -> int:
    """Return the integer in a file such as 0001.cls.

    Raises:
        TarFault: it has something else.
    """
    text = bytes(content[:_BLOCK])
    if not _INTEGER.fullmatch(text) or len(content) > _BLOCK or not -(2**63) <= int(text) < 2**63:
        raise TarFault(
            f"{example}: its class is {shown(repr(text[:40]))}, which is no integer of 64 bits; write it as digits"
        )
    return int(text)


def document(example: TarExample, suffixes: Sequence[str]) -> object:
    """Return the content of a JSON file.

    Raises:
        TarFault: it is no JSON.
    """
    try:
        data = bytes(example.file(suffixes))
        require_readable("document.json", data)
        return json.loads(data)
    except (ValueError, RecursionError, FileTooLarge) as fault:
        if isinstance(fault, TarFault):
            raise
        raise TarFault(f"{example}: its {suffixes[0]} is not JSON ({shown(str(fault))}); correct the file") from fault


def pick(example: TarExample, value: object, path: Sequence[str]) -> object:
    """Return the value at nested keys of a JSON object.

    Raises:
        TarFault: there is no such key, or its value is null.
    """
    for depth, key in enumerate(path):
        at = ".".join(["json", *path[: depth + 1]])
        if not isinstance(value, dict) or key not in value:
            has = f"keys {', '.join(map(str, value)) or 'none'}" if isinstance(value, dict) else f"{kind_of(value)}"
            raise TarFault(f"{example}: has no {at}, only {shown(has)}; add it, or name another key")
        value = value[key]
    if value is None:
        raise TarFault(f"{example}: {'.'.join(['json', *path])} is null; write a value, or remove the example")
    return value


def kind_of(value: object) -> str:
    """Return the JSON type of a value, for messages, and a short one itself."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "an integer", float: "a number"}
    name = names.get(type(value), "null")
    if isinstance(value, list):
        try:
            return f"a list of shape {list(np.shape(value))}"
        except ValueError:
            return "a ragged list"
    return name if isinstance(value, dict) or value is None else f"{name} ({shown(json.dumps(value), 40)})"


def npy_of(example: TarExample, content: memoryview) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """Return dtype, shape, whether the array is in Fortran's order, and the offset of its bytes.

    Raises:
        TarFault: it is no .npy file, or one of pickled objects.
    """
    try:
        dtype, shape, fortran, offset = npy_header(io.BytesIO(content[:MOST_NPY_HEADER_BYTES]), len(content))
    except ValueError as fault:
        raise TarFault(f"{example}: its npy {fault}") from fault
    if dtype.kind not in "biufc":
        raise TarFault(f"{example}: its npy has the dtype {dtype}; save an array of numbers, such as float32")
    return dtype, shape, fortran, offset


def _example(group: Sequence[Member]) -> TarExample:
    files: dict[str, memoryview] = {}
    found = TarExample(group[0].key, files, group[0].begin, group[-1].end)
    for member in group:
        if member.suffix in files:
            raise TarFault(
                f"{found}: has two files {shown(member.suffix)}; give each example a key of its own: what comes before "
                "the first dot of the names of its files"
            )
        files[member.suffix] = member.content
    return found


def _of_json(found: Sequence[TarExample], picked: list[object], feature: Feature) -> Array:
    convert = _texts if feature.encoding == "text" else _numbers
    together = convert(picked, feature)
    if together is not None:
        return together
    alone = []
    for each, value in zip(found, picked, strict=True):
        one = convert([value], feature)
        if one is None:
            raise TarFault(
                f"{each}: {feature.record_key} is {kind_of(value)}, not {feature.dtype}{list(feature.shape)} as in the "
                f"first example; correct it, or set data.options.dtypes: {{{feature.record_key}: float32}} if it is a "
                "number of another kind"
            )
        alone.append(one)
    return np.concatenate(alone)


def _numbers(values: list[object], feature: Feature) -> Array | None:
    """Return JSON values as numbers of the feature's dtype; None if they are not, or do not fit."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        return None
    kinds = {"b": "b", "i": "iu", "u": "iu"}.get(np.dtype(feature.dtype).kind, "iuf")
    if array.dtype.kind not in kinds or array.shape != (len(values), *feature.shape):
        return None
    with np.errstate(over="ignore"):  # becomes infinity, which is refused later
        cast = array.astype(feature.dtype)
    if cast.dtype.kind in "iu" and not ((cast == array) & ((cast < 0) == (array < 0))).all():
        return None
    return cast


def _texts(values: list[object], feature: Feature) -> Array | None:
    rows = [value if feature.shape else [value] for value in values]
    count = feature.shape[0] if feature.shape else 1
    if not all(
        isinstance(row, list) and len(row) == count and all(isinstance(one, str) for one in row) for row in rows
    ):
        return None
    flat = [text.encode("utf-8", "surrogatepass") for row in rows for text in row]  # type: ignore[attr-defined]
    return _objects(flat).reshape(len(values), *feature.shape)


def _of_npy(found: Sequence[TarExample], contents: Sequence[memoryview], feature: Feature) -> Array:
    array = np.empty((len(found), *feature.shape), feature.dtype)
    known, offset, dtype, fortran = b"", 0, np.dtype(feature.dtype), False
    for index, (each, content) in enumerate(zip(found, contents, strict=True)):
        # Files of one shape have one header; parsing it takes longer than copying a small array.
        if not known or content[:offset] != known or len(content) != len(contents[0]):
            dtype, shape, fortran, offset = npy_of(each, content)
            if (dtype.newbyteorder("<").name, shape) != (feature.dtype, feature.shape):
                raise TarFault(
                    f"{each}: {feature.record_key} is {dtype}{list(shape)}, not {feature.dtype}{list(feature.shape)} "
                    "as in the first example; save all arrays with one dtype and shape"
                )
            known = bytes(content[:offset])
        values = np.frombuffer(content[offset:], dtype)
        array[index] = values.reshape(feature.shape, order="F" if fortran else "C")
    return array


def _objects(values: Sequence[bytes]) -> Array:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _require_utf8(example: TarExample, text: bytes) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as fault:
        raise TarFault(f"{example}: its text is not UTF-8 ({fault.reason}); save it as UTF-8") from fault


def _split(name: str) -> tuple[str, str]:
    """Return key and suffix of a file; the suffix is empty if it belongs to no example."""
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return f"{folder}{slash}{stem}", suffix.lower() if stem else ""


def _size(header: bytes, at: int) -> int:
    """Return the size that a header says, once its checksum is compared."""
    if len(header) < _BLOCK:
        if at:
            raise TarFault(f"at byte {at}: the file ends inside of a header; write it again")
        raise TarFault(_no_tar(header))
    expected = _octal(header[148:156])
    if expected != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        if at:
            raise TarFault(f"at byte {at}: the checksum of a header does not match; write the file again")
        raise TarFault(_no_tar(header))
    field = header[124:136]
    # GNU writes sizes of 8 GiB and more as binary numbers.
    size = int.from_bytes(field[1:], "big") if field[0] == 0x80 else _octal(field)  # noqa: PLR2004
    if size is None:
        raise TarFault(f"at byte {at}: the size in a header is {shown(repr(field))}; write the file again")
    return size


def _no_tar(begin: bytes) -> str:
    for magic, (kind, command) in _COMPRESSED.items():
        if begin.startswith(magic):
            return f"is compressed ({kind}), so examples cannot be read in place; decompress it once: {command}"
    return "is not a tar file; exclude it from data.options.path, with a pattern such as *.tar"


def _octal(field: bytes) -> int | None:
    text = field.strip(b" \0")
    if not text:
        return 0
    return int(text, 8) if not text.strip(b"01234567") else None


def _decimal(text: str, where: _FileStart) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 19:  # noqa: PLR2004 - digits of 64 bits
        raise TarFault(f"{where}: the size in a header is {shown(repr(text))}; write the file again")
    return int(text)


def _name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return _text(prefix + b"/" + name if prefix else name)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _changes(kind: bytes, content: bytes, where: _FileStart) -> dict[str, str]:
    """Return what a header says about the file after it."""
    if kind == b"L":
        return {"path": _text(content.partition(b"\0")[0])}
    if kind == b"K":  # of a link's target
        return {}
    found: dict[str, str] = {}
    while content:
        digits = content.partition(b" ")[0]
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0  # noqa: PLR2004
        key, equals, value = content[len(digits) + 1 : length].partition(b"=")
        if not equals or not value.endswith(b"\n") or length > len(content):
            raise TarFault(f"{where}: a pax header is damaged; write the file again")
        found[_text(key)] = _text(value[:-1])
        content = content[length:]
    if kind == b"g":  # of all files after it; Git, for one, writes its commit there
        if wrong := sorted(key for key in found if key in {"path", "size"} or key.startswith("GNU.sparse")):
            raise TarFault(f"{where}: a global pax header sets {wrong[0]}; write the tar without it")
        return {}
    return found


def _require_file(kind: bytes, changed: Mapping[str, str], where: _FileStart) -> None:
    if any(key.startswith("GNU.sparse") for key in changed):
        kind = b"S"
    if kind not in (*_REGULAR, _FOLDER):
        what, remedy = _REFUSED.get(kind, (f"of type {shown(repr(kind))}", "put only files into the tar"))
        raise TarFault(f"{where} is {what}, which has no content here; {remedy}")


def _content(take: Take, skip: Skip | None, size: int, where: _FileStart) -> memoryview:
    if size > MOST_EXAMPLE_BYTES:
        raise TarFault(f"{where} has {size} bytes, more than {MOST_EXAMPLE_BYTES}; split it into smaller files")
    content = memoryview(b"") if skip is not None else take(_padded(size))
    found = skip(_padded(size)) if skip is not None else len(content)
    if found < size:
        raise TarFault(f"{where}: the file ends inside of it, after {found} of {size} bytes; write it again")
    return content[:size]


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _require_zeros(take: Take, at: int) -> None:
    """Refuse files after the end mark, which other tools skip silently, and zeros without end."""
    for _ in range(_MOST_ZEROS // _MOST_HEADER_BYTES):
        if not (rest := take(_MOST_HEADER_BYTES)):
            return
        if np.frombuffer(rest, np.uint8).any():
            raise TarFault(
                f"at byte {at}: files follow the end mark, as when tars are concatenated by cat; use tar --concatenate"
            )
    raise TarFault(f"at byte {at}: more than {_MOST_ZEROS} bytes of zeros follow the end mark; write the file again")
