"""How large the files of a home and of a dataset may be: no larger one is written, and none is read beyond its limit.

A home may come from a stranger, or be damaged. A file of some gigabytes in the place of a small one must not fill the
memory of whoever lists the runs of a folder. So every store asks here before it reads a whole file, and again before it
writes one: nothing is written that a reader refuses. What is read in pieces (checkpoints, shards) has no limit, nor has
what is only written (reports, curves).

Bytes alone do not bound memory: `[],` has three, and takes hundreds once it is parsed. So the lists, mappings and
values of JSON are counted too. The parser bounds how deeply they are nested; `MOST_NESTED` is the bound for what people
nest in a run file, which other files repeat within their own levels.
"""

import re
from typing import Final

from tasks.foundation.errors import FileTooLarge, TooLargeToWrite

_KB, _MB = 1 << 10, 1 << 20

# Path below a home or a storage root -> largest number of bytes.
_LIMITS: Final = {
    r"log/HINT": _KB,
    r"log/\d+\.json": 16 * _MB,
    r"log/retained/[^/]+\.json": 16 * _MB,
    r"log/blocks/[^/]+\.json": 64 * _MB,
    r"checkpoints/[^/]+/manifest\.json": 32 * _MB,
    r"datasets/[^/]+/manifest\.json": 32 * _MB,
    r"code/[^/]+\.json": 32 * _MB,
    r"attempts/closed/[^/]+\.json": 32 * _MB,
    r"attempts/[^/]+\.json": _MB,
    r"answers/[^/]+\.json": 32 * _MB,
    r"(?:audits|proofs)/[^/]+\.json": 4 * _MB,
    r"confusion/[^/]+\.json": _MB,
    r"fork\.json": _MB,
}
_OTHER_BYTES: Final = 32 * _MB
_MOST_LISTS, _MOST_VALUES = 200_000, 1_000_000
MOST_NESTED: Final = 64

_BLOCK: Final = re.compile(r"(?:.*/)?log/blocks/[^/]+")
_KNOWN: Final = re.compile("|".join(rf"((?:^|.*/){path})" for path in _LIMITS))
_BYTES: Final = tuple(_LIMITS.values())
# Possessive, so that a file of backslashes takes no memory.
_TEXT: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def most_bytes(path: str) -> int:
    """Return the largest number of bytes that a file may have to be read whole, by its path or address."""
    known = _known(path)
    return _OTHER_BYTES if known is None else known


def require_readable(path: str, data: bytes) -> None:
    """Check what was read of a file, at most one byte more than its limit.

    Args:
        path: the file's path or address.
        data: its bytes.

    Raises:
        FileTooLarge: they are more than its kind may have, or JSON of more lists or values than is read.
    """
    excess = _excess(path, data)
    if excess:
        raise FileTooLarge(f"{path} has {excess} than such a file may have; it is damaged, or was made to do harm")


def refuse_unreadable(path: str, data: bytes) -> None:
    """Check a file of a known kind before it is written.

    Raises:
        TooLargeToWrite: no reader would read it.
    """
    excess = _excess(path, data) if _known(path) is not None else ""
    if excess:
        raise TooLargeToWrite(
            f"{path} would have {excess} than such a file may have ({len(data)} bytes); make smaller what goes "
            "into it: options in the run file, variables of the model, metrics and logged rows, or shards of the data"
        )


def too_large(path: str) -> FileTooLarge:
    """Return the error for a file with more bytes than its kind may have, of which not all were read."""
    return FileTooLarge(
        f"{path} has more than {most_bytes(path)} bytes, which no such file has; it is damaged, or was made to do harm"
    )


def _excess(path: str, data: bytes) -> str:
    """What there is too much of, as words before `than`; empty if there is not."""
    if len(data) > most_bytes(path):
        return f"more than {most_bytes(path)} bytes, more"
    if not path.endswith(".json") or _BLOCK.fullmatch(path):  # a block's entries are checked one by one
        return ""
    # Counted quickly first; brackets and commas in texts, such as saved code, do not count.
    if not _is_full(data) or not _is_full(_TEXT.sub(b"", data)):
        return ""
    return f"more than {_MOST_LISTS} lists or {_MOST_VALUES} values, more"


def _is_full(data: bytes) -> bool:
    return data.count(b"[") + data.count(b"{") > _MOST_LISTS or data.count(b",") > _MOST_VALUES


def _known(path: str) -> int | None:
    found = _KNOWN.fullmatch(path)
    return None if found is None or found.lastindex is None else _BYTES[found.lastindex - 1]
