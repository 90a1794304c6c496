"""What layers and transforms keep and is no variable: vocabularies, tables, arrays and files, as the log records them.

A run must go on with the same contents of a vocabulary, a table, an array or a file that a layer keeps, but an entry of
the log stays small. So a record of contents has the number of items, the first of them as they are, and a digest of
each of at most 32 blocks: enough to tell two contents apart, and to say where they differ first. Floats are recorded by
two numbers of each block, and compared with a tolerance: the same formula has other last bits on another processor,
which is no other content.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_MOST_BLOCKS: Final = 32
_DIGITS: Final = 8
_FIRST_CHARACTERS: Final = 4000
_ITEM_CHARACTERS: Final = 60
_TOLERANCE: Final = 1e-5


def block_length(number: int) -> int:
    """Return the number of items of a block: a power of two, so that contents of similar sizes have equal blocks."""
    length = 1
    while length * _MOST_BLOCKS < number:
        length *= 2
    return length


def record_of_items(items: Sequence[str], *, what: str, item: str, start: int = 0) -> dict[str, Any]:
    """Return the record of a sequence of texts.

    Args:
        what: names the content in messages, as "vocabulary of layer `words`".
        item: names one of its items, as "token".
        start: number of the first item, as its users count.
    """
    first: list[str] = []
    left = _FIRST_CHARACTERS
    for each in items:
        short = each if len(each) <= _ITEM_CHARACTERS else f"{each[:_ITEM_CHARACTERS]}..."
        left -= len(short) + 4
        if left < 0:
            break
        first.append(short)
    length = block_length(len(items))
    return {
        "what": what,
        "item": item,
        "start": start,
        "size": len(items),
        "first": first,
        "blocks": [
            hashlib.sha256(json.dumps(items[begin : begin + length]).encode()).hexdigest()[:_DIGITS]
            for begin in range(0, len(items), length)
        ],
    }


def record_of_floats(
    blocks: Sequence[tuple[float, float]], *, what: str, dtype: str, shape: Sequence[int]
) -> dict[str, Any]:
    """Return the record of an array of floats.

    Args:
        blocks: a weighted sum and a norm of each block, see `block_length`.
    """
    return {
        "what": what,
        "dtype": dtype,
        "shape": list(shape),
        "floats": [float(f"{number:.9g}") for block in blocks for number in block],
    }


def content_differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the contents that differ, by their names in the records, each with a sentence that says where."""
    for name in dict.fromkeys([*recorded, *now]):
        before, after = recorded.get(name), now.get(name)
        if not all(each is None or _is_record(each) for each in (before, after)):
            yield name, f"the record of {name} cannot be read"
        elif before is None or after is None:
            present: Any = before or after
            yield name, f"{present['what']} {'is new' if before is None else 'is gone'}"
        elif found := _difference(before, after):
            yield name, f"{after['what']} changed: {found}"


def _is_record(record: Any) -> bool:
    """Whether a record is one of this module; a home may be a stranger's."""
    if not isinstance(record, Mapping) or not isinstance(record.get("what"), str):
        return False
    if "floats" not in record:
        kinds = {"item": str, "start": int, "size": int, "first": list, "blocks": list}
        return all(isinstance(record.get(key), kind) for key, kind in kinds.items())
    return all(
        isinstance(record.get(key), list) and all(isinstance(number, int | float) for number in record[key])
        for key in ("floats", "shape")
    )


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Where two records differ first; "" if they do not."""
    for key in ("dtype", "shape"):
        if before.get(key) != now.get(key):
            return f"its {key} was {before.get(key)}, is {now.get(key)}"
    if {*before} ^ {*now} or len(before.get("floats", ())) != len(now.get("floats", ())):
        return "it is of another kind"
    return _difference_of_floats(before, now) if "floats" in now else _difference_of_items(before, now)


def _difference_of_items(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    item, start = now["item"], now["start"]
    sizes = f"it has {now['size']} {item}s instead of {before['size']}" if now["size"] != before["size"] else ""
    where = ""
    if start != before["start"]:
        where = f"it begins with {item} {start} instead of {before['start']}"
    elif (index := _first(before["first"], now["first"])) is not None:
        where = f"{item} {start + index} was {before['first'][index]}, is {now['first'][index]}"
    elif (index := _first(before["blocks"], now["blocks"])) is not None:
        length = block_length(now["size"])
        if length == block_length(before["size"]):
            where = _among(item, start + index * length, start + min((index + 1) * length, now["size"]) - 1)
    return "; ".join(filter(None, (sizes, where)))


def _difference_of_floats(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    sums: Sequence[tuple[float, float]] = list(zip(before["floats"], now["floats"], strict=True))
    size = math.prod(now["shape"])
    length = block_length(size)
    for index in range(0, len(sums), 2):
        largest = max(sums[index + 1])
        if any(abs(new - old) > _TOLERANCE * largest for old, new in sums[index : index + 2]):
            begin = index // 2 * length
            return _among("value", begin, min(begin + length, size) - 1)
    return ""


def _among(item: str, begin: int, end: int) -> str:
    return f"{item} {begin} differs" if begin == end else f"the first {item} that differs is among {begin} to {end}"


def _first(before: Sequence[Any], now: Sequence[Any]) -> int | None:
    """The first position at which two sequences differ, as far as both go."""
    pairs = enumerate(zip(before, now, strict=False))
    return next((index for index, (old, new) in pairs if old != new), None)
