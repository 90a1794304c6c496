"""The files of a log: an entry as bytes and back, its path, the hint, blocks of entries, and whether all are there.

An entry is one JSON object, which pydantic writes without the defaults. Its size does not depend on the model or on the
length of the run: the identity and the environment stand in the entry that sets them, and the head names that entry by
number and digest. In memory a head has both, so reading an entry may read another one, which the log then remembers.

The last key of the JSON object is the sha256 of all bytes of the file before that key. It is compared before anything
else is believed, so a bit that flips in an entry is found whatever it means. It covers the bytes as they are written
and not the parsed entry, from which a reader drops the keys that it does not know.

`log/HINT` holds a number near the newest entry's; a reader starts there and probes forward. `log/blocks/<first>.json`
holds the bytes of 256 entries, so that reading a long history takes few requests. Both are derived: one that is missing
or wrong costs time, never truth.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import Field
from pydantic_core import from_json

from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.checkpoint import base_in_folder_name
from baton.tasks.foundation.contracts.home_files import require_readable
from baton.tasks.foundation.contracts.identity import digest_of
from baton.tasks.foundation.contracts.log_entry import Entry, Head, SetIn, StoredEntry, StoredHead
from baton.tasks.foundation.errors import FileMissing, FileTooLarge, RunLogError, StorageError
from baton.tasks.foundation.log.fold import unexpected_keys
from baton.tasks.foundation.storage.interface import Storage, best_effort
from baton.tasks.foundation.storage.transfers import parallel_map
from baton.tasks.foundation.text import message

_DIGEST_AT_END = re.compile(rb',"sha256":"([0-9a-f]{64})"}\Z')


@dataclass(frozen=True, slots=True)
class Decoded:
    """An entry, and the bytes of its file."""

    entry: Entry
    size: int


def encode(entry: Entry) -> bytes:
    """Return the bytes of an entry."""
    head, body = entry.head, entry.body
    state = {name: getattr(head, name) for name in StoredHead.model_fields if name in Head.model_fields}
    stored = StoredHead.model_construct(**state | {"identity": head.identity_in, "environment": head.environment_in})
    values: dict[str, Any] = {
        "format": entry.format,
        "number": entry.number,
        "time": entry.time,
        "attempt": entry.attempt,
        "body": {"kind": body.kind, **_without_defaults(body)},
        "head": _without_defaults(stored),
    }
    if entry.totals is not None:
        values["totals"] = _without_defaults(entry.totals)
    return with_digest(json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode())


def _without_defaults(value: Contract) -> dict[str, Any]:
    return value.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def with_digest(data: bytes) -> bytes:
    """Return the JSON object of an entry with the digest of its own bytes as its last key.

    Args:
        data: a JSON object with at least one key, without white space after it.
    """
    before = data[:-1]
    return before + b',"sha256":"%s"}' % hashlib.sha256(before).hexdigest().encode()


def has_its_digest(data: bytes) -> bool:
    """Whether the bytes of an entry have the digest that they end with."""
    found = _DIGEST_AT_END.search(data)
    return found is not None and hashlib.sha256(data[: found.start()]).hexdigest().encode() == found[1]


def stored_entry(data: bytes, *, where: str, number: int) -> StoredEntry:
    """Return what the bytes of an entry say, which is all but the identity and the environment of other entries.

    Args:
        where: the file, for messages.
        number: the number of the entry, from the name of its file.

    Raises:
        RunLogError: the bytes are not an entry, or are not as they were written.
        AnotherVersion: another version of Baton wrote it.
    """
    if not has_its_digest(data):
        if _is_of_the_first_revisions(data):
            StoredEntry.from_json(data, where=where, error=RunLogError)
        raise RunLogError(f"{where} is damaged: its bytes do not have the sha256 that it ends with")
    stored = StoredEntry.from_json(data, where=where, error=RunLogError)
    if stored.number != number:
        raise RunLogError(f"{where} has the number {stored.number}")
    return stored


def decode(data: bytes, *, where: str, number: int, resolve: Callable[[int], Decoded]) -> Decoded:
    """Return the entry that bytes hold; see `stored_entry`.

    Args:
        where: the file, for messages.
        number: the number of the entry, from the name of its file.
        resolve: returns an earlier entry, which set the identity or the environment.

    Raises:
        RunLogError: also if they do not fit the entries that they name.
    """
    stored = stored_entry(data, where=where, number=number)
    values = {name: getattr(stored.head, name) for name in Head.model_fields if name in StoredHead.model_fields}
    for what in ("identity", "environment"):
        at = getattr(stored.head, what)
        found = _set_in(stored, what, at, resolve)
        if found is None:
            raise RunLogError(f"{where}: entry {at.entry} does not have its {what}, which has the digest {at.digest}")
        values |= {what: found, f"{what}_in": at}
    head = Head.model_construct(number=number, **values)
    entry = {name: getattr(stored, name) for name in Entry.model_fields if name != "head"}
    return Decoded(Entry.model_construct(**entry, head=head), len(data))


def _set_in(stored: StoredEntry, what: str, at: SetIn, resolve: Callable[[int], Decoded]) -> Any:
    """The identity or environment that an entry names; None if the named entry does not have it."""
    if at.entry < stored.number:
        head = resolve(at.entry).entry.head
        return getattr(head, what) if getattr(head, f"{what}_in") == at else None
    found = getattr(stored.body, what, None) if at.entry == stored.number else None
    # The digest of an environment may be of keys that a newer version has written, and this one does not know.
    return found if what == "environment" or (found is not None and digest_of(found) == at.digest) else None


def _is_of_the_first_revisions(data: bytes) -> bool:
    """Whether it is a whole entry without a digest, which is not damage."""
    try:
        values = from_json(data)
    except ValueError:
        return False
    return isinstance(values, dict) and "schema_version" in values and not {"format", "sha256"} & values.keys()


_PATTERN = re.compile(r"log/(\d{8})\.json")


def entry_path(number: int) -> str:
    """Path of the entry with this number, which counts from 0."""
    return f"log/{number:08d}.json"


def entry_number(path: str) -> int | None:
    """Number of the entry at a path; None if the path is not an entry's."""
    match = _PATTERN.fullmatch(path)
    return None if match is None else int(match[1])


FIRST_ENTRY = entry_path(0)


_LOGGER = logging.getLogger(__name__)
_PATH = "log/HINT"
_SECONDS = 2.0
_MOST_DIGITS = 12


class Hint:
    """`log/HINT`: a number near the newest entry's. Best effort: a missing or wrong one costs time, never truth."""

    def __init__(self, home: Storage) -> None:
        """Read nothing yet."""
        self._home = home
        self._written = -1

    def read(self) -> int:
        """Return the number in the file; 0 if there is none."""
        try:
            text = self._home.with_deadline(_SECONDS).read(_PATH).decode("ascii", errors="replace")
        except StorageError:
            return 0  # without a hint, finding the newest entry only takes longer
        return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else 0

    def write(self, number: int) -> None:
        """Write the number of the newest entry, unless this hint has written it or a later one."""
        if number <= self._written:
            return
        with best_effort(self._home, f"{_PATH} could not be written", then="the newest entry is found more slowly"):
            self._home.with_deadline(_SECONDS).write(_PATH, str(number).encode())
            self._written = number


def last_from(home: Storage, low: int) -> int:
    """Return the number of the last entry, probing forward from `low`, which need not exist.

    Entries have no gaps, so an existing entry proves that all before it exist. The number of probes is logarithmic in
    the distance.
    """
    stride = reach = 1
    while home.exists(entry_path(low + stride)):
        low += stride
        # 1, 1, 2, 4, ...: a hint is often right, and often one entry behind.
        stride, reach = reach, reach * 2
    high = low + stride
    while high - low > 1:
        middle = (low + high) // 2
        if home.exists(entry_path(middle)):
            low = middle
        else:
            high = middle
    return low


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
        first: number of the first entry, a multiple of `BLOCK_ENTRIES`.
        decode: returns the entry that bytes hold, by its number.
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


# Describes the fork that a home without a log is about to become; see checkpoint/fork.py.
UNFINISHED_FORK = "fork.json"


def require_whole(home: Storage) -> None:
    """Check that no entry of the log in `home` is missing, and that nothing else stands where an entry belongs.

    Raises:
        RunLogError: an entry is missing, or the whole log of a run that has checkpoints.
    """
    for path in folders_in_log(home):
        raise folder_as_entry(home, path)
    listed = _listed(home)
    if not listed:
        _require_no_checkpoints(home)
    for number in range(max(listed, default=0)):
        # A listing may lag behind, so check a missing name directly.
        if number not in listed and not home.exists(entry_path(number)):
            raise missing_entry(f"{home.uri}/{entry_path(number)}")


def folders_in_log(home: Storage) -> list[str]:
    """Paths of the folders that stand where an entry belongs. Object stores can have both."""
    if home.transfers > 1:
        return []
    return sorted(path for path in home.folders("log") if entry_number(path) is not None)


def folder_as_entry(home: Storage, path: str) -> RunLogError:
    """The error for a folder that stands where an entry belongs, so that the log seems to end before it."""
    return RunLogError(
        message(
            f"{home.uri}/{path} is a folder, where an entry of the log belongs",
            hints=["move it away, and restore the file from a backup if the entry has been written"],
        )
    )


def require_entry(home: Storage, number: int) -> None:
    """Check that an entry exists, without reading it.

    Raises:
        RunLogError: it does not.
    """
    if not home.exists(entry_path(number)):
        raise missing_entry(f"{home.uri}/{entry_path(number)}")


def missing_entry(where: str) -> RunLogError:
    """The error for a file that must be there."""
    return RunLogError(
        f"{where} is missing: the log has lost an entry; restore it from a backup, or check that its disk is still "
        "mounted"
    )


def _require_no_checkpoints(home: Storage) -> None:
    """Refuse a home with checkpoints but without a log: the origin is written before any checkpoint.

    The log is looked at again after the checkpoints, because another process may have begun the run meanwhile.
    """
    staged = sorted(home.folders("checkpoints"))
    # The order matters: a fork in progress writes its origin first, and only then deletes its note.
    if not staged or _is_unfinished_fork(home, staged) or home.exists(entry_path(0)):
        return
    if any(home.folders("checkpoints")):
        raise RunLogError(
            f"{home.uri} has checkpoints ({staged[0]}) but no log; restore log/ from a backup, or move the folder "
            "away to start a new run"
        )


def _is_unfinished_fork(home: Storage, staged: Sequence[str]) -> bool:
    """Whether a fork is in progress: all checkpoints are copies (base 0), and there is no origin yet."""
    return all(base_in_folder_name(folder) == 0 for folder in staged) and home.exists(UNFINISHED_FORK)


def _listed(home: Storage) -> set[int]:
    return {number for path in home.files("log") if (number := entry_number(path)) is not None}


def disappeared_log(home: Storage) -> RunLogError:
    """The error for a log that this process has read before, and that is gone."""
    return RunLogError(f"{home.uri}: the log has disappeared; check that its disk is still mounted")


def unreadable_entry(home: Storage, number: int, error: RunLogError) -> RunLogError:
    """The error for an entry that cannot be read or believed, with the remedy.

    Args:
        error: why it cannot be read.
    """
    hints = ["restore the file from a backup"]
    if home.exists(entry_path(number + 1)):
        hints.append(f"without a backup, start a run of another name with init.weights: {home.uri}")
    elif number == 0:
        hints.append(f"without a backup, move {home.uri} away and start the run again: nothing was committed")
    else:
        hints.append(without_newest(home, number))
    return RunLogError(message(str(error), hints=hints))


def require_follows(home: Storage, before: Head | None, entry: Entry) -> None:
    """Check that the state in an entry follows from the state before it.

    Raises:
        RunLogError: it does not follow, or a page that it names cannot be read.
    """
    where, number = f"{home.uri}/{entry_path(entry.number)}", entry.number
    try:
        keys = unexpected_keys(before, entry)
    except RunLogError as fault:
        raise RunLogError(f"{where} does not follow from the entries before it: {fault}") from fault
    if keys:
        hints = [f"one of the two files was changed: restore {entry_path(number)} or the one before it from a backup"]
        if number and not home.exists(entry_path(number + 1)):
            hints.append(without_newest(home, number))
        problem = f"{where} records a state that does not follow from the entries before it ({', '.join(keys)})"
        raise RunLogError(message(problem, hints=hints))


def without_newest(home: Storage, number: int) -> str:
    """How a run goes on if its newest entry is lost.

    The entry before it has a whole state. What the lost one retired still has its files, because they are deleted two
    commits later, and work that is lost with it is done again.
    """
    return (
        f"without a backup, stop all processes of this run and move {entry_path(number)} out of {home.uri}/log: only "
        f"this entry is lost, and the run continues from entry {number - 1}"
    )
