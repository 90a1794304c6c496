"""Splits a source into training and validation, as the run file says: by a seeded hash, by groups, or by time.

By default a seeded hash of each index decides. With `data.split_by` records with equal values of the group's feature
are held out together. With `data.split: last` the last records are held out, in the order in which the source gives
them.
"""

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import IO, TypeVar

import numpy as np
import numpy.typing as npt

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.contracts.dataset import HeldOut
from baton.tasks.foundation.dataset.manifest import held_out_values
from baton.tasks.foundation.dataset.order import unit_interval
from baton.tasks.foundation.errors import SourceError
from baton.tasks.prepare_data.sequences import feature_named
from baton.tasks.prepare_data.shard_writers import disk_errors, scratch_file, scratch_folder

T = TypeVar("T")
_SMALL_CHUNK = 4096
_CHUNK = 1 << 20
_PURPOSE = "validation"
_KEY = "data.split_by"
_MEMORY_BYTES = 64 << 20
_LENGTH_BYTES = 8
_AT_LEAST = 2


def split(items: Iterable[T], *, fraction: float, seed: int) -> Iterator[tuple[bool, T]]:
    """Yield (held out, item) for each item. With at least two items and fraction > 0, both parts get one.

    An item is held out if its hash is below `fraction`. While all items so far belong to one part, the item whose hash
    is closest to the fraction is kept back; if the items end, it goes to the other part.

    Args:
        items: in source order.
        fraction: fraction that is held out, in [0, 1).

    Raises:
        SourceError: there is a single item, which cannot be split.
    """
    numbered = zip(_endless_values(seed), items, strict=False)
    if fraction == 0:
        yield from ((False, item) for _, item in numbered)
        return
    kept = next(numbered, None)
    if kept is None:
        return
    part = kept[0] < fraction
    alone = True
    for value, item in numbered:
        if (value < fraction) != part:
            yield part, kept[1]
            yield not part, item
            yield from ((value < fraction, item) for value, item in numbered)
            return
        alone = False
        closer = (value < kept[0]) != part
        yield part, kept[1] if closer else item
        kept = (value, item) if closer else kept
    if alone:
        raise _single_example_error(fraction)
    yield not part, kept[1]


def sizes_of_split(length: int, *, fraction: float, seed: int) -> tuple[int, int]:
    """Return the sizes of training and validation for `length` items, at least 2 if fraction > 0; see `split`."""
    if fraction == 0:
        return length, 0
    held_out = sum(int(np.count_nonzero(values < fraction)) for _, values in _chunked_values(length, seed))
    held_out = min(max(held_out, 1), length - 1)
    return length - held_out, held_out


def held_out_rule(length: int, *, fraction: float, seed: int) -> HeldOut | None:
    """Return the rule by which `split` splits `length` items; None if nothing is held out.

    Raises:
        SourceError: there is a single item, which cannot be split.
    """
    if fraction == 0:
        return None
    if length == 1:
        raise _single_example_error(fraction)
    base = HeldOut(fraction=fraction, seed=seed)
    lowest, highest = (2.0, 0), (-1.0, 0)
    for begin, values in _chunked_values(length, seed):
        least, most = int(values.argmin()), int(values.argmax())
        lowest = min(lowest, (float(values[least]), begin + least))
        highest = max(highest, (float(values[most]), begin + most))
    if lowest[0] >= fraction:
        return base.model_copy(update={"exception": lowest[1]})
    if highest[0] < fraction:
        return base.model_copy(update={"exception": highest[1]})
    return base


def _chunked_values(length: int, seed: int) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    for begin in range(0, length, _CHUNK):
        yield begin, held_out_values(seed, begin, min(begin + _CHUNK, length))


def _endless_values(seed: int) -> Iterator[float]:
    begin = 0
    while True:
        yield from held_out_values(seed, begin, begin + _SMALL_CHUNK).tolist()
        begin += _SMALL_CHUNK


def _single_example_error(fraction: float) -> SourceError:
    return SourceError(
        f"data.validation_fraction: {fraction}: the source has a single example, which cannot be split; set it to 0, "
        "or add examples"
    )


def split_by_group(
    records: Iterable[bytes], *, feature: str, fraction: float, seed: int
) -> Iterator[tuple[bool, bytes]]:
    """Yield (held out, record) for each record; all records of a group get the same answer.

    A group is held out if the seeded hash of its value is below `fraction`. So a group keeps its part when others are
    added. While all groups so far belong to one part, the records of the group whose hash is closest to the fraction
    are kept back, in memory; if the records end, that group goes to the other part.

    Args:
        records: in source order, as `shards.encode` returns them.
        feature: name of a feature, `user_id` for `x/user_id` or `y/user_id` too.
        fraction: fraction of the groups that is held out, above 0 and below 1.

    Raises:
        SourceError: the examples have no such feature, or all of them belong to one group.
    """
    name = ""
    kept: list[bytes] = []
    closest: tuple[float, bytes] | None = None  # hash and value of the group that is kept back
    both_parts = several = False
    for record in records:
        values = _values(record)
        name = name or feature_named(feature, sorted(values), key=f"{_KEY}: {feature}")
        value = values[name]
        at = _hash(value, seed)
        held_out = at < fraction
        if both_parts:
            yield held_out, record
        elif closest is None or value == closest[1]:
            closest = (at, value)
            kept.append(record)
        elif held_out != (closest[0] < fraction):
            both_parts = True
            yield from ((not held_out, each) for each in kept)
            kept = []
            yield held_out, record
        else:
            several = True
            if abs(at - fraction) < abs(closest[0] - fraction):
                yield from ((held_out, each) for each in kept)
                closest, kept = (at, value), [record]
            else:
                yield held_out, record
    if closest is None or both_parts:
        return
    if not several:
        raise SourceError(
            f"{_KEY}: {feature}: all {len(kept)} examples have the same value, so they are one group, which cannot be "
            "split; name another feature, or give the validation examples under data.validation"
        )
    yield from ((closest[0] >= fraction, each) for each in kept)


def _hash(value: bytes, seed: int) -> float:
    """Return a number in [0, 1); the same for equal values in every process."""
    word = int.from_bytes(hashlib.sha256(f"{_PURPOSE}/{seed}/".encode() + value).digest()[:8], "little")
    return float(unit_interval(np.array([word], np.uint64))[0])


def _values(record: bytes) -> dict[str, bytes]:
    """Return the bytes of each feature of a record."""
    from tensorflow.core.example.example_pb2 import Example

    features = Example.FromString(record).features.feature
    return {name: features[name].SerializeToString(deterministic=True) for name in features}


def last_of(length: int, *, fraction: float) -> int:
    """Return how many of `length` records are held out: the rounded fraction, at least 1, and not all of them."""
    return min(max(math.floor(length * fraction + 0.5), 1), length - 1)


def split_last(records: Iterable[bytes], *, fraction: float) -> Iterator[tuple[bool, bytes]]:
    """Yield (held out, record) for each record, in source order; the last ones are held out.

    The number of records need not be known: as many as would be held out if the source ended here wait in a queue.

    Args:
        records: in source order.
        fraction: fraction that is held out, above 0 and below 1.

    Raises:
        SourceError: there is a single record.
        StorageError: the temporary folder has too little space.
    """
    count = 0
    with ExitStack() as stack:
        waiting = _Queue(stack)
        for count, record in enumerate(records, start=1):
            waiting.append(record)
            while len(waiting) > last_of(count, fraction=fraction):
                yield False, waiting.popleft()
        if 0 < count < _AT_LEAST:
            raise SourceError(
                "data.split: last: the source has a single example, which cannot be split; set "
                "data.validation_fraction to 0, or add examples"
            )
        while len(waiting):
            yield True, waiting.popleft()


class _Queue:
    """Records, first in, first out: in memory up to a size, then in a temporary file."""

    def __init__(self, stack: ExitStack) -> None:
        """Create an empty queue; `stack` closes its file, if it needs one."""
        self._stack = stack
        self._recent: deque[bytes] = deque()
        self._memory_bytes = 0
        self._file: IO[bytes] | None = None
        self._in_file = self._begin = self._end = 0

    def __len__(self) -> int:
        return len(self._recent) + self._in_file

    def append(self, record: bytes) -> None:
        """Add a record. While the file has some, later ones go there too, because they come later."""
        if not self._in_file and self._memory_bytes + len(record) <= _MEMORY_BYTES:
            self._recent.append(record)
            self._memory_bytes += len(record)
            return
        if self._file is None:
            self._file = self._stack.enter_context(scratch_file())
        with disk_errors(scratch_folder()):
            self._file.seek(self._end)
            data = memoryview(len(record).to_bytes(_LENGTH_BYTES, "little") + record)
            while data:
                written = self._file.write(data)
                data, self._end = data[written:], self._end + written
        self._in_file += 1

    def popleft(self) -> bytes:
        """Take the first record."""
        if self._recent:
            record = self._recent.popleft()
            self._memory_bytes -= len(record)
            return record
        if self._file is None:
            raise IndexError("the queue is empty")
        with disk_errors(scratch_folder()):
            self._file.seek(self._begin)
            length = int.from_bytes(self._read(self._file, _LENGTH_BYTES), "little")
            record = self._read(self._file, length)
            self._begin += _LENGTH_BYTES + length
            self._in_file -= 1
            if not self._in_file:
                self._begin = self._end = 0
                self._file.truncate(0)
        return record

    @staticmethod
    def _read(file: IO[bytes], size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = file.read(size - len(parts))
            if not part:
                raise OSError(f"a temporary file ends {size - len(parts)} bytes early")
            parts += part
        return bytes(parts)


def split_records(data: DataSpec, records: Iterable[bytes], *, seed: int) -> Iterator[tuple[bool, bytes]]:
    """Yield (held out, record) for each record. With at least two records and a fraction above 0, both parts get one.

    Args:
        data: the run file's `data`.
        records: in source order, as `shards.encode` returns them.

    Raises:
        SourceError: there is a single record or group, which cannot be split, or no feature `data.split_by`.
        StorageError: the temporary folder has too little space.
    """
    fraction = data.validation_fraction
    if data.split_by is not None:
        return split_by_group(records, feature=data.split_by, fraction=fraction, seed=seed)
    if data.split == "last":
        return split_last(records, fraction=fraction)
    return split(records, fraction=fraction, seed=seed)


def part_sizes(data: DataSpec, length: int | None, *, seed: int) -> tuple[int, int] | None:
    """Return the sizes of training and validation; None if they are not known before the source is read.

    Args:
        data: the run file's `data`.
        length: number of records of the source; None if it is not known.
    """
    if length is None or data.split_by is not None or data.pack is not None:
        return None
    if data.split == "last":
        held_out = last_of(length, fraction=data.validation_fraction)
        return length - held_out, held_out
    return sizes_of_split(length, fraction=data.validation_fraction, seed=seed)


def settings_of_split(data: DataSpec) -> dict[str, str]:
    """Return what names a dataset besides the fraction; nothing for the default, so that its name stays the same."""
    if data.split_by is not None:
        return {"split_by": data.split_by}
    return {} if data.split == "random" else {"split": data.split}
