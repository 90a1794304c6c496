"""crc32c, the checksum that Cloud Storage reports for each object."""

from pathlib import Path
from typing import Any

import google_crc32c

from tasks.foundation.storage.base import FileStat

BLOCK_BYTES = 1 << 20


def checksum_bytes(data: bytes) -> FileStat:
    """Size and crc32c of bytes."""
    return FileStat(size=len(data), crc32c=f"{google_crc32c.value(data):08x}")


def as_array(buffer: memoryview) -> Any:
    """The bytes of a buffer without a copy, uint8 [size]; google_crc32c takes no memoryview."""
    import numpy as np  # an image that only commits has none

    return np.frombuffer(buffer, np.uint8)


def extend_crc32c(crc: int, buffer: memoryview) -> int:
    """The crc32c of bytes that are followed by `buffer`.

    Args:
        crc: of the bytes before; 0 if there are none.
        buffer: contiguous bytes.
    """
    if buffer.nbytes <= BLOCK_BYTES:
        # An image that only commits has no numpy, and writes small files only.
        return int(google_crc32c.extend(crc, bytes(buffer)))
    return int(google_crc32c.extend(crc, as_array(buffer)))


def masked_crc32c(data: bytes) -> int:
    """The masked crc32c of TFRecord files.

    See https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details.
    """
    return mask_crc32c(google_crc32c.value(data))


def mask_crc32c(crc: int) -> int:
    """Mask a crc32c as TensorFlow does in its files."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def checksum_file(path: Path) -> FileStat:
    """Size and crc32c of a local file, read in blocks."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            crc = google_crc32c.extend(crc, block)
            size += len(block)
    return FileStat(size=size, crc32c=f"{crc:08x}")
