"""Splits a source by groups: records with equal values of one feature are held out together."""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from tasks.foundation.dataset.hashing import unit_interval
from tasks.foundation.errors import SourceError

_PURPOSE = "validation"
_KEY = "data.split_by"


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
        seed: the run's seed.

    Raises:
        SourceError: the examples have no such feature, or all of them belong to one group.
    """
    name = ""
    kept: list[bytes] = []
    closest: tuple[float, bytes] | None = None  # hash and value of the group that is kept back
    both_parts = several = False
    for record in records:
        values = _values(record)
        name = name or _feature_name(feature, values)
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


def _feature_name(feature: str, values: dict[str, bytes]) -> str:
    """Return the name of a feature as the examples have it."""
    found = [name for name in (feature, f"x/{feature}", f"y/{feature}") if name in values]
    if len(found) == 1:
        return found[0]
    if found:
        raise SourceError(f"{_KEY}: {feature}: the examples have {' and '.join(found)}; write one of them in full")
    raise SourceError(
        f"{_KEY}: {feature}: the examples have no such feature; they have {', '.join(sorted(values))}. Yield it as one "
        "of the inputs: a dict of arrays"
    )
