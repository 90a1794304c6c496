"""The framing of TFRecord files: each record has a length and two checksums, all verified here.

    uint64 length | uint32 masked crc32c of the length | bytes of the record | uint32 masked crc32c of the record

Numbers are little-endian (https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details).
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from tasks.foundation.errors import SourceError
from tasks.foundation.storage.transfers import masked_crc32c

_LENGTH = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_MAX_BLOCK_BYTES = 8 << 20
# The first byte of a zlib header with the usual window; the first two bytes are a multiple of 31 (RFC 1950).
_ZLIB, _ZLIB_MULTIPLE = 0x78, 31


@dataclass(frozen=True, slots=True)
class Record:
    """One record with its frame."""

    number: int  # index in the file, from 0
    begin: int  # offset of the frame in the file
    frame: bytes

    @property
    def data(self) -> bytes:
        """The record without its frame."""
        return self.frame[_LENGTH.size : -_CHECKSUM.size]


def read_records(blocks: Iterable[bytes], *, where: str, compressed: bool = False) -> Iterator[Record]:
    """Yield the records of a file; memory holds the largest record and one block.

    Args:
        blocks: the file's bytes.
        where: the file, for messages.
        compressed: the file may be compressed; then it is decompressed, and offsets are those of decompressed bytes.

    Raises:
        SourceError: the file is compressed, damaged, truncated or not a TFRecord file; names record and offset.
    """
    reader = _Reader(decompress(blocks, where=where) if compressed else iter(blocks))
    number = begin = 0
    while header := reader.take(_LENGTH.size):
        at = f"{where}: record {number}, at byte {begin}"
        if len(header) < _LENGTH.size:
            raise _cut_off(at, len(header), _LENGTH.size, "its length")
        length, checksum = _LENGTH.unpack(header)
        if checksum != masked_crc32c(header[:8]):
            raise SourceError(_no_record(where, header) if number == 0 else f"{at}: {_damaged('length')}")
        rest = reader.take(length + _CHECKSUM.size)
        if len(rest) < length + _CHECKSUM.size:
            raise _cut_off(at, len(rest), length + _CHECKSUM.size, "the rest of it")
        if _CHECKSUM.unpack(rest[length:])[0] != masked_crc32c(rest[:length]):
            raise SourceError(f"{at}: {_damaged('content')}")
        frame = header + rest
        yield Record(number, begin, frame)
        number += 1
        begin += len(frame)


def decompress(blocks: Iterable[bytes], *, where: str) -> Iterator[bytes]:
    """Yield the content of a gzip or zlib file in blocks of bounded size; any other file unchanged.

    Raises:
        SourceError: the file is damaged or truncated.
    """
    stream = iter(blocks)
    first = next(stream, b"")
    if not _compression(first):
        yield first
        yield from stream
        return
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # detects either header
    for block in chain([first], stream):
        rest = block
        while rest:
            # A file may consist of several compressed streams.
            if decoder.eof:
                decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)
            try:
                yield decoder.decompress(rest, _MAX_BLOCK_BYTES)
            except zlib.error as fault:
                raise SourceError(f"{where}: is compressed and damaged ({fault}); rewrite it") from fault
            rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
    if not decoder.eof:
        raise SourceError(f"{where}: is compressed and truncated; rewrite it")


class _Reader:
    """Reads a given number of bytes from a stream of blocks."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._held = bytearray()
        self._at = 0

    def take(self, size: int) -> bytes:
        """Return the next bytes; fewer at the end."""
        while len(self._held) - self._at < size:
            block = next(self._blocks, None)
            if block is None:
                break
            del self._held[: self._at]
            self._at = 0
            self._held += block
        taken = bytes(memoryview(self._held)[self._at : self._at + size])
        self._at += len(taken)
        return taken


def _compression(begin: bytes) -> str:
    if begin.startswith(b"\x1f\x8b"):
        return "gzip"
    if len(begin) > 1 and begin[0] == _ZLIB and int.from_bytes(begin[:2], "big") % _ZLIB_MULTIPLE == 0:
        return "zlib"
    return ""


def _no_record(where: str, header: bytes) -> str:
    if kind := _compression(header):
        return (
            f"{where}: is compressed ({kind}), so records cannot be read in place; set data.options.copy: true to "
            "decompress it once"
        )
    return f"{where}: is not a TFRecord file; exclude it from data.options.path, with a pattern such as *.tfrecord"


def _damaged(what: str) -> str:
    return f"is damaged: the checksum of its {what} does not match; rewrite the file"


def _cut_off(at: str, found: int, expected: int, what: str) -> SourceError:
    return SourceError(
        f"{at}: the file ends inside it, after {found} of {expected} bytes of {what}; rewrite the file, or exclude it "
        "from data.options.path"
    )
