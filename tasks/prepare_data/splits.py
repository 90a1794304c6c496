"""Splits a source's records into training and validation, as the run file says.

By default a seeded hash of each index decides (`split.py`). `data.split: last` holds out the last
records, `data.split_by` whole groups of equal values.
"""

from collections.abc import Iterable, Iterator

from tasks.foundation.contracts.data_spec import DataSpec
from tasks.prepare_data import split
from tasks.prepare_data.split import last_of, split_by_group, split_last


def split_records(data: DataSpec, records: Iterable[bytes], *, seed: int) -> Iterator[tuple[bool, bytes]]:
    """Yield (held out, record) for each record. With at least two records and a fraction above 0, both parts get one.

    Args:
        data: the run file's `data`.
        records: in source order, as `shards.encode` returns them.
        seed: the run's seed.

    Raises:
        SourceError: there is a single record or group, which cannot be split, or no feature `data.split_by`.
        StorageError: the temporary folder has too little space.
    """
    fraction = data.validation_fraction
    if data.split_by is not None:
        return split_by_group(records, feature=data.split_by, fraction=fraction, seed=seed)
    if data.split == "last":
        return split_last(records, fraction=fraction)
    return split.split(records, fraction=fraction, seed=seed)


def part_sizes(data: DataSpec, length: int | None, *, seed: int) -> tuple[int, int] | None:
    """Return the sizes of training and validation; None if they are not known before the source is read.

    Args:
        data: the run file's `data`.
        length: number of records of the source; None if it is not known.
        seed: the run's seed.
    """
    if length is None or data.split_by is not None or data.pack is not None:
        return None
    if data.split == "last":
        held_out = last_of(length, fraction=data.validation_fraction)
        return length - held_out, held_out
    return split.part_sizes(length, fraction=data.validation_fraction, seed=seed)


def settings_of_split(data: DataSpec) -> dict[str, str]:
    """Return what names a dataset besides the fraction; nothing for the default, so that its name stays the same."""
    if data.split_by is not None:
        return {"split_by": data.split_by}
    return {} if data.split == "random" else {"split": data.split}
