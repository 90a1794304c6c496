"""The files of a checkpoint, in TensorFlow's format ("tensor bundle"), written from memory.

A checkpoint is `<prefix>.data-0000i-of-0000n`, the tensors' bytes, and `<prefix>.index`, which says where each is. See
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/util/tensor_bundle/tensor_bundle.h. TensorFlow's
own writer needs live tensors and a local file, copies through the page cache, and reads nothing back. The index is a
sorted table of keys and values in the format of LevelDB, without compression, see
https://github.com/google/leveldb/blob/main/doc/table_format.md.

Files whose bytes stay are not written again (`write.py`), so values that do not change have data files of their own. Of
several hosts that save together, each has files of its own.
TensorFlow reads the files; `bundle_errors` explains what it raises when it cannot.
"""

import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import google_crc32c
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework.tensor_shape_pb2 import TensorShapeProto
from tensorflow.core.protobuf.tensor_bundle_pb2 import BundleEntryProto, BundleHeaderProto

from baton.tasks.foundation.contracts.checkpoint import replica_key
from baton.tasks.foundation.errors import DamagedCheckpoint
from baton.tasks.foundation.model.variables import Leaf
from baton.tasks.foundation.state.digest import OBJECT_GRAPH
from baton.tasks.foundation.storage.transfers import mask_crc32c, masked_crc32c
from baton.tasks.foundation.text import message

_BLOCK_BYTES = 256 << 10
# Every 16th key is stored whole, the ones between as the difference from the key before.
_RESTART_INTERVAL = 16
_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 40
_UNCOMPRESSED = b"\x00"


def table_of(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A whole table.

    Args:
        items: key and value, in ascending order of the keys, each key once.
    """
    file, index, block = bytearray(), _Block(), _Block()
    last = b""
    for key, value in items:
        if len(block) >= _BLOCK_BYTES:
            index.add(last, _append(file, block))
            block = _Block()
        block.add(key, value)
        last = key
    index.add(last, _append(file, block))
    footer = _append(file, _Block()) + _append(file, index)
    return bytes(file) + footer.ljust(_FOOTER_BYTES, b"\x00") + struct.pack("<Q", _MAGIC)


def varint(value: int) -> bytes:
    """A number in base 128, the lowest digits first; every byte but the last has its highest bit set."""
    digits = bytearray()
    while value >= 1 << 7:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


class _Block:
    def __init__(self) -> None:
        self._data = bytearray()
        self._restarts = [0]
        self._count = 0
        self._last = b""

    def __len__(self) -> int:
        return len(self._data)

    def add(self, key: bytes, value: bytes) -> None:
        shared = 0
        if self._count == _RESTART_INTERVAL:
            self._restarts.append(len(self._data))
            self._count = 0
        else:
            shared = _shared_prefix(self._last, key)
        self._data += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        self._count += 1
        self._last = key

    def to_bytes(self) -> bytes:
        return bytes(self._data) + struct.pack(f"<{len(self._restarts) + 1}I", *self._restarts, len(self._restarts))


def _append(file: bytearray, block: _Block) -> bytes:
    """Append a block to a file. Returns where it is: offset and size as varints."""
    content = block.to_bytes()
    place = varint(len(file)) + varint(len(content))
    content += _UNCOMPRESSED
    file += content + struct.pack("<I", masked_crc32c(content))
    return place


def _shared_prefix(one: bytes, other: bytes) -> int:
    most = min(len(one), len(other))
    return next((index for index in range(most) if one[index] != other[index]), most)


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


def locate(sizes: Sequence[int], *, shard_bytes: int, borders: Collection[int] = (), shard: int = 0) -> list[Location]:
    """Distribute tensors to data files, in their order.

    Args:
        shard_bytes: the size of a file is at most this; a larger tensor has a file of its own.
        borders: indices of tensors that begin a file.
        shard: index of the first file.
    """
    found: list[Location] = []
    end = 0
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


# Data files of at most this size are uploaded and downloaded side by side.
SHARD_BYTES = 64 << 20
# Smaller values that training does not update are statistics or seeds, or not worth a file.
_LEAST_RESTING_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """Where each value is in the data files.

    Attributes:
        locations: of each value, by key, in the order of the files; TensorFlow's graph is one of them.
        files_of: indices of the files that each host writes.
        resting_files: indices of the files that hold only values that training does not update.
    """

    locations: Mapping[str, Location]
    files_of: tuple[range, ...]
    resting_files: frozenset[int]

    @property
    def files(self) -> int:
        """Number of data files."""
        return self.files_of[-1].stop


def arrange(
    sizes: Mapping[str, int],
    *,
    graph_bytes: int,
    resting: Collection[str],
    owners: Mapping[str, int] | None = None,
    hosts: int = 1,
) -> FileLayout:
    """Arrange values in files: those that training may change come first, each part sorted by key.

    A value of at least half a file has one of its own: an embedding that no batch touches changes alone, or not.

    The files of one host do not depend on what only another one knows. So with several hosts, values without an owner,
    whose sizes only the chief knows, are one file together with TensorFlow's graph.

    Args:
        sizes: bytes of each value, by key.
        graph_bytes: size of TensorFlow's graph, which comes first.
        resting: keys of values that training does not update.
        owners: the host that writes each value; None: one host writes all.
        hosts: how many write.
    """
    sizes = {OBJECT_GRAPH: graph_bytes, **sizes}
    moving, resting = [OBJECT_GRAPH, *sorted(sizes.keys() - {OBJECT_GRAPH, *resting})], sorted(resting)
    if owners is None or hosts == 1:
        owners = dict.fromkeys(sizes, 0)
    locations: dict[str, Location] = {}
    resting_files: set[int] = set()
    files_of: list[range] = []
    files = 0
    for host in range(hosts):
        begin = files
        first, last = ([key for key in keys if owners.get(key) == host] for keys in (moving, resting))
        ordered = [sizes[key] for key in (*first, *last)]
        found = locate(ordered, shard_bytes=SHARD_BYTES, borders=_borders(ordered, len(last)), shard=begin)
        resting_files |= {each.shard for each in found[len(first) :]}
        apart = [key for key in moving if host == 0 and key not in owners]
        files = found[-1].shard + 1 if found else begin
        found += locate([sizes[key] for key in apart], shard_bytes=sys.maxsize, shard=files)
        files += bool(apart)
        locations |= zip((*first, *last, *apart), found, strict=True)
        files_of.append(range(begin, files))
    return FileLayout(locations=locations, files_of=tuple(files_of), resting_files=frozenset(resting_files))


def _borders(sizes: Sequence[int], resting: int) -> set[int]:
    large = {index for index, size in enumerate(sizes) if size >= SHARD_BYTES // 2}
    return large | {index + 1 for index in large} | {len(sizes) - resting}


def resting_keys(leaves: Sequence[Leaf], sizes: Mapping[str, int], replicas: int) -> frozenset[str]:
    """Return the keys of large values that training does not update, such as the weights of a frozen layer.

    Args:
        sizes: bytes of each value, by key.
        replicas: number of replicas on all hosts.
    """
    return frozenset(
        key
        for leaf in leaves
        if leaf.path.startswith("model/") and not leaf.trainable and not leaf.seed
        for key in (map(partial(replica_key, leaf.path), range(replicas)) if leaf.per_replica else (leaf.path,))
        if sizes.get(key, 0) >= _LEAST_RESTING_BYTES
    )


# Those of TensorFlow's reader, of its operations, of the object graph and of protocol buffers.
_OF_A_BUNDLE = (
    tf.errors.DataLossError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.UnimplementedError,
    AssertionError,
    DecodeError,
    IndexError,
    ValueError,
)


@contextmanager
def bundle_errors(where: str, prefix: str) -> Iterator[None]:
    """Name the file that is no checkpoint's, whatever its digests say: somebody wrote it by hand.

    Args:
        where: address of the checkpoint.
        prefix: path prefix of its files on this machine.

    Raises:
        DamagedCheckpoint: they cannot be read, or were deleted meanwhile.
    """
    try:
        yield
    except (tf.errors.OpError, *_OF_A_BUNDLE) as fault:
        # The reader raises the base class where it knows no better; others are of lost devices and full memories.
        if not (isinstance(fault, _OF_A_BUNDLE) or type(fault) is tf.errors.OpError):
            raise
        index = Path(f"{prefix}.index")
        if not index.exists():
            # On a local home these are links: retiring the checkpoint deletes the files behind them.
            raise DamagedCheckpoint(f"{where}: a file was deleted while it was being read") from fault
        lines = str(fault).splitlines()
        raise DamagedCheckpoint(
            message(
                f"{where}/{index.name} is not the index of this checkpoint ({lines[0] if lines else fault}), although "
                "it has the digest in the manifest",
                hints=["Baton did not write it: take another checkpoint, or another home"],
            )
        ) from fault
