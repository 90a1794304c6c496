"""The file format of a checkpoint's index: a sorted table of keys and values, in the format of LevelDB.

See https://github.com/google/leveldb/blob/main/doc/table_format.md. TensorFlow reads it; blocks are not compressed.
"""

import struct
from collections.abc import Iterable

from tasks.foundation.storage.transfers import masked_crc32c

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
