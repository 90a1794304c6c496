"""crc32c, the checksum that Cloud Storage reports for each object."""

from pathlib import Path

import google_crc32c

from tasks.foundation.storage.base import FileStat

BLOCK_BYTES = 1 << 20


def checksum_bytes(data: bytes) -> FileStat:
    """Size and crc32c of bytes."""
    return FileStat(size=len(data), crc32c=f"{google_crc32c.value(data):08x}")


def masked_crc32c(data: bytes) -> int:
    """The masked crc32c of TFRecord files.

    See https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details.
    """
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def checksum_file(path: Path) -> FileStat:
    """Size and crc32c of a local file, read in blocks."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            crc = google_crc32c.extend(crc, block)
            size += len(block)
    return FileStat(size=size, crc32c=f"{crc:08x}")
