"""What an upload sends: a local file, or buffers in memory. Both can be sent again from any offset."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import FileStat
from tasks.foundation.storage.checksum import checksum_file, extend_crc32c
from tasks.foundation.storage.gcs.connection import BLOCK_BYTES


class SourceUnreadable(Exception):
    """The local file of an upload cannot be read any more. Sending it again does not help."""


class Payload(Protocol):
    """The bytes of an upload.

    Attributes:
        stat: their size and checksum.
    """

    @property
    def stat(self) -> FileStat:
        """Size and checksum of all bytes."""

    def blocks(self, begin: int) -> AsyncIterator[bytes | memoryview]:
        """The bytes from offset `begin`, in blocks of at most `BLOCK_BYTES`."""


@dataclass(frozen=True, slots=True)
class FilePayload:
    """A local file."""

    file: Path
    stat: FileStat

    @classmethod
    def of(cls, file: Path) -> "FilePayload":
        """The payload of a file, which is read once for its checksum.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            return cls(file, checksum_file(file))
        except OSError as error:
            raise StorageError(f"{file}: cannot read ({error.strerror}); check its disk and run again") from error

    async def blocks(self, begin: int) -> AsyncIterator[bytes]:
        """See `Payload.blocks`.

        Raises:
            SourceUnreadable: the file cannot be read.
        """
        try:
            with self.file.open("rb") as file:
                file.seek(begin)
                while block := file.read(BLOCK_BYTES):
                    yield block
        except OSError as error:
            message = f"{self.file}: cannot read the rest of the file ({error.strerror}); check its disk"
            raise SourceUnreadable(message) from error


@dataclass(frozen=True, slots=True)
class BufferPayload:
    """Buffers in memory, one after the other. They are sent from where they are, without a copy."""

    buffers: tuple[memoryview, ...]
    stat: FileStat

    @classmethod
    def of(cls, buffers: Sequence[memoryview]) -> "BufferPayload":
        """The payload of buffers of contiguous bytes, which must not change until they are sent."""
        bytes_of = tuple(buffer.cast("B") for buffer in buffers if buffer.nbytes)
        size, crc = 0, 0
        for buffer in bytes_of:
            crc = extend_crc32c(crc, buffer.toreadonly())
            size += buffer.nbytes
        return cls(bytes_of, FileStat(size=size, crc32c=f"{crc:08x}"))

    async def blocks(self, begin: int) -> AsyncIterator[memoryview]:
        """See `Payload.blocks`."""
        for buffer in self.buffers:
            for offset in range(min(begin, buffer.nbytes), buffer.nbytes, BLOCK_BYTES):
                yield buffer[offset : offset + BLOCK_BYTES]
            begin = max(begin - buffer.nbytes, 0)
