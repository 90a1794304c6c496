"""crc32c, the checksum that Cloud Storage reports, in one place."""

from pathlib import Path

import google_crc32c

from tasks.foundation.storage.base import Stored

BLOCK_BYTES = 1 << 20


def checksum_bytes(data: bytes) -> Stored:
    """Size and crc32c of bytes."""
    return Stored(size=len(data), crc32c=f"{google_crc32c.value(data):08x}")


def checksum_file(path: Path) -> Stored:
    """Size and crc32c of a local file, read in blocks."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            crc = google_crc32c.extend(crc, block)
            size += len(block)
    return Stored(size=size, crc32c=f"{crc:08x}")
