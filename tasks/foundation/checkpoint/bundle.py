"""TensorFlow's checkpoint format ("tensor bundle"), written from memory.

A checkpoint is `<prefix>.data-0000i-of-0000n`, the tensors' bytes, and `<prefix>.index`, which says where each is. See
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/util/tensor_bundle/tensor_bundle.h. TensorFlow's
own writer needs live tensors and a local file, copies through the page cache, and reads nothing back.
"""

import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import google_crc32c
from tensorflow.core.framework.tensor_shape_pb2 import TensorShapeProto
from tensorflow.core.protobuf.tensor_bundle_pb2 import BundleEntryProto, BundleHeaderProto

from tasks.foundation.checkpoint.bundle_table import table_of, varint
from tasks.foundation.storage.transfers import mask_crc32c

PREFIX = "ckpt"
_VERSION = 1
# Tensors begin at multiples of this, so that a processor reads their numbers fast. TensorFlow reads any gaps.
_TENSOR_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleEntry:
    """One tensor of a checkpoint.

    Attributes:
        name: its key in the index.
        dtype: a number of TensorFlow's enum `DataType`.
        shape: its shape.
        shard: index of its data file.
        offset: where it begins there, in bytes.
        size: in bytes.
        crc32c: of its bytes; of a string see `string_tensor`.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a tensor is: index of the data file, offset in bytes."""

    shard: int
    offset: int


def locate(sizes: Sequence[int], *, shard_bytes: int, borders: Collection[int] = ()) -> list[Location]:
    """Distribute tensors to data files, in their order.

    Args:
        sizes: of the tensors, in bytes.
        shard_bytes: the size of a file is at most this; a larger tensor has a file of its own.
        borders: indices of tensors that begin a file.
    """
    found: list[Location] = []
    shard = end = 0
    for index, size in enumerate(sizes):
        offset = -(-end // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT
        if offset and (offset + size > shard_bytes or index in borders):
            shard, offset = shard + 1, 0
        found.append(Location(shard=shard, offset=offset))
        end = offset + size
    return found


def data_file(shard: int, shards: int) -> str:
    """The name of a data file."""
    return f"{PREFIX}.data-{shard:05d}-of-{shards:05d}"


def index_of(entries: Iterable[BundleEntry], *, shards: int) -> bytes:
    """The index file of a checkpoint.

    Args:
        entries: in any order.
        shards: number of data files.
    """
    header = BundleHeaderProto(num_shards=shards, endianness=BundleHeaderProto.LITTLE)
    header.version.producer = _VERSION
    items = [(entry.name.encode(), _proto(entry).SerializeToString()) for entry in entries]
    return table_of([(b"", header.SerializeToString()), *sorted(items)])


def string_tensor(value: bytes) -> tuple[bytes, int]:
    """A scalar string as it is in a data file, and its crc32c.

    The checksum is over the length as uint32, its own masked checksum, and the string.
    """
    crc = google_crc32c.value(struct.pack("<I", len(value)))
    check = struct.pack("<I", mask_crc32c(crc))
    return varint(len(value)) + check + value, google_crc32c.extend(google_crc32c.extend(crc, check), value)


def _proto(entry: BundleEntry) -> BundleEntryProto:
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in entry.shape])
    return BundleEntryProto(
        dtype=entry.dtype,
        shape=shape,
        shard_id=entry.shard,
        offset=entry.offset,
        size=entry.size,
        crc32c=mask_crc32c(entry.crc32c),
    )
