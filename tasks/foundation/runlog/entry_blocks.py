"""Blocks of entries: a derived index, so that reading a long history takes few requests.

`log/blocks/<first>.json` holds the bytes of a fixed number of entries, which never change. A block is written by a
process that had to read its entries one by one, and only once. Nothing depends on it: one that is missing, damaged or
of another log is passed over, and the entries are read. What decides anything reads the entries themselves.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

from pydantic import Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.home_files import require_readable
from tasks.foundation.contracts.log_entry import Entry
from tasks.foundation.errors import FileMissing, FileTooLarge, RunLogError, StorageError
from tasks.foundation.runlog.entry_paths import entry_path
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.transfers import parallel_map

_LOGGER = logging.getLogger(__name__)
# Entries of a block. Up to as many newest entries are in none.
BLOCK_ENTRIES: Final = 256


class BlockHeader(Contract):
    """The first line of a block; the bytes of its entries follow without gaps."""

    format: Literal[1] = 1
    first: int = Field(ge=0, description="number of the first entry")
    sizes: tuple[int, ...] = Field(description="bytes of each entry")
    sha256: str = Field(description="of the bytes of all entries")


def block_path(first: int) -> str:
    """Path of the block that begins with this entry."""
    return f"log/blocks/{first:08d}.json"


def entries_of_block(
    home: Storage,
    first: int,
    *,
    decode: Callable[[bytes, int], Entry],
    read: Callable[[], list[Entry]],
    write: bool,
) -> list[Entry]:
    """Return the entries of a block, from the block or one by one.

    Args:
        home: the run's.
        first: number of the first entry, a multiple of `BLOCK_ENTRIES`.
        decode: returns the entry that bytes hold, by its number.
        read: reads the entries one by one.
        write: whether to write the block if it is missing.

    Raises:
        RunLogError: an entry is missing or cannot be read.
    """
    found = read_block(home, first)
    if found is not None:
        try:
            return [decode(data, number) for number, data in enumerate(found, start=first)]
        except RunLogError as fault:  # the entries in the log say what is wrong, if anything is
            _LOGGER.debug("reading the entries one by one: %s", fault)
    entries = read()
    if write and found is None:
        write_block(home, first, read_entries(home, range(first, first + BLOCK_ENTRIES)))
    return entries


def read_block(home: Storage, first: int) -> list[bytes] | None:
    """Return the bytes of the entries of a block; None if it cannot be used.

    It is compared with the newest of its entries in the log, so that a block of another log is found.
    """
    path = block_path(first)
    try:
        found = _parsed(home.read(path), first, where=f"{home.uri}/{path}")
    except FileMissing:
        return None
    except (RunLogError, StorageError) as fault:
        _LOGGER.debug("reading the entries one by one: %s", fault)
        return None
    try:
        last = home.read(entry_path(first + BLOCK_ENTRIES - 1))
    except FileMissing:
        return None
    return found if found[-1] == last else None


def write_block(home: Storage, first: int, entries: Sequence[bytes]) -> None:
    """Write the block of these entries, in place of one that cannot be used. Best effort: a home may be read-only.

    Args:
        home: the run's.
        first: number of the first entry, a multiple of `BLOCK_ENTRIES`.
        entries: the bytes of `BLOCK_ENTRIES` entries, as they are in the log.
    """
    data = b"".join(entries)
    header = BlockHeader(first=first, sizes=tuple(map(len, entries)), sha256=hashlib.sha256(data).hexdigest())
    line = header.model_dump_json().encode()
    try:
        home.write(block_path(first), line + b"\n" + data)
    except StorageError as fault:
        _LOGGER.debug("%s/%s: not written: %s", home.uri, block_path(first), fault)


def read_entries(home: Storage, numbers: range) -> list[bytes]:
    """Return the bytes of entries, read one by one, side by side in a remote store.

    Raises:
        FileMissing: one does not exist.
    """
    return parallel_map(lambda number: home.read(entry_path(number)), numbers, workers=home.transfers)


def false_blocks(home: Storage, entries: int) -> Iterator[str]:
    """Yield the path of each block that does not hold the entries of the log.

    A block whose entries are not all there is passed over: what lacks them is the log.

    Args:
        home: the run's.
        entries: how many entries the log has.

    Raises:
        StorageError: the store refused a request or failed.
    """
    for first in range(0, entries - BLOCK_ENTRIES + 1, BLOCK_ENTRIES):
        path = block_path(first)
        try:
            data = home.read(path)
            found = _parsed(data, first, where=path)
        except FileMissing:
            continue
        except (FileTooLarge, RunLogError):
            yield path
            continue
        try:
            entries_of_log = read_entries(home, range(first, first + BLOCK_ENTRIES))
        except FileMissing:
            continue
        if found != entries_of_log:
            yield path


def _parsed(data: bytes, first: int, *, where: str) -> list[bytes]:
    line, _, rest = data.partition(b"\n")
    header = BlockHeader.from_json(line, where=where, error=RunLogError)
    whole = (header.first, len(header.sizes), sum(header.sizes)) == (first, BLOCK_ENTRIES, len(rest))
    if not whole or hashlib.sha256(rest).hexdigest() != header.sha256:
        raise RunLogError(f"{where}: not the block of these entries")
    found, begin = [], 0
    for number, size in enumerate(header.sizes, start=first):
        found.append(rest[begin : begin + size])
        begin += size
        require_readable(entry_path(number), found[-1])
    return found
