"""Reads ranges of external files that are no TFRecord files: Parquet, Arrow, tar, ArrayRecord.

A range is a stretch of bytes with whole examples, listed in the manifest with its checksum. A reader gets these bytes,
verified, and returns the arrays that `shards.extract` would return, so that what follows, decoding and order, is the
same code for all sources. Readers run in threads ahead of the training, and hold the interpreter lock as little as
they can.
"""

from collections.abc import Callable, Sequence

from tasks.foundation.contracts.dataset import Feature, ShardRecord
from tasks.foundation.dataset.features import Array

# Called with the bytes of the range, those of its head (see `RangeLayout`), the range and the features. Returns for
# each feature an array [records_held, *shape] of its dtype, or, of text and images, of bytes objects.
Reader = Callable[[memoryview, memoryview, ShardRecord, Sequence[Feature]], dict[str, Array]]


def read_columns(
    body: memoryview, head: memoryview, record: ShardRecord, features: Sequence[Feature]
) -> dict[str, Array]:
    """Return the values of all features of a range, by name.

    Args:
        body: the bytes of the range, verified.
        head: its footer or schema, verified.
        record: the range.
        features: what is read of it.

    Raises:
        DamagedDataset: the bytes are not what `record` says.
    """
    if record.layout is None:
        raise ValueError(f"{record.path} is a TFRecord file")
    return _reader(record.layout.form)(body, head, record, features)


def _reader(form: str) -> Reader:
    raise NotImplementedError(form)
