"""The framing of TFRecord files: every record between its length and its checksum, both checked here.

    uint64 length | uint32 masked crc32c of the length | bytes of the record | uint32 masked crc32c of the record

Numbers are little-endian; the mask is (crc >> 15 | crc << 17) + 0xa282ead8
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details).
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import google_crc32c

from tasks.foundation.errors import SourceError

_LENGTH = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_MOST_AT_ONCE = 8 << 20
# The first byte of zlib's header, for its usual window, and what two bytes of it are a multiple of (RFC 1950).
_ZLIB, _ZLIB_MULTIPLE = 0x78, 31


@dataclass(frozen=True, slots=True)
class Framed:
    """One record, as it stands in its file."""

    number: int  # within the file, from 0
    begin: int  # offset of its frame in the file
    frame: bytes

    @property
    def data(self) -> bytes:
        """The record itself."""
        return self.frame[_LENGTH.size : -_CHECKSUM.size]


def framed(blocks: Iterable[bytes], *, where: str, compressed: bool = False) -> Iterator[Framed]:
    """The records of a file; the largest of them and a block are in memory.

    Args:
        blocks: the file's bytes.
        where: the file, for messages.
        compressed: whether it may be a compressed one, which is unpacked; offsets are those of the unpacked bytes.

    Raises:
        SourceError: it is no TFRecord file, a compressed one, damaged or cut off; names record and offset.
    """
    reader = _Reader(unpacked(blocks, where=where) if compressed else iter(blocks))
    number = begin = 0
    while header := reader.take(_LENGTH.size):
        at = f"{where}: record {number}, at byte {begin}"
        if len(header) < _LENGTH.size:
            raise _cut_off(at, len(header), _LENGTH.size, "its length")
        length, checksum = _LENGTH.unpack(header)
        if checksum != _masked(header[:8]):
            raise SourceError(_no_record(where, header) if number == 0 else f"{at}: {_damaged('length')}")
        rest = reader.take(length + _CHECKSUM.size)
        if len(rest) < length + _CHECKSUM.size:
            raise _cut_off(at, len(rest), length + _CHECKSUM.size, "the rest of it")
        if _CHECKSUM.unpack(rest[length:])[0] != _masked(rest[:length]):
            raise SourceError(f"{at}: {_damaged('content')}")
        frame = header + rest
        yield Framed(number, begin, frame)
        number += 1
        begin += len(frame)


def unpacked(blocks: Iterable[bytes], *, where: str) -> Iterator[bytes]:
    """A gzip or zlib file's content, in blocks of bounded size; a file that is neither, as it is.

    Raises:
        SourceError: it is damaged or cut off.
    """
    stream = iter(blocks)
    first = next(stream, b"")
    if not _compression(first):
        yield first
        yield from stream
        return
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header
    for block in chain([first], stream):
        rest = block
        while rest:
            # Files may be several compressed ones, one after the other.
            if decoder.eof:
                decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)
            try:
                yield decoder.decompress(rest, _MOST_AT_ONCE)
            except zlib.error as fault:
                raise SourceError(f"{where}: is compressed and damaged ({fault}); write it again") from fault
            rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
    if not decoder.eof:
        raise SourceError(f"{where}: is compressed and cut off; write it again")


class _Reader:
    """Bytes of a stream, as many at a time as are asked for."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._held = bytearray()
        self._at = 0

    def take(self, size: int) -> bytes:
        """The next bytes; fewer at the end."""
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


def _masked(data: bytes) -> int:
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _compression(begin: bytes) -> str:
    if begin.startswith(b"\x1f\x8b"):
        return "gzip"
    if len(begin) > 1 and begin[0] == _ZLIB and int.from_bytes(begin[:2], "big") % _ZLIB_MULTIPLE == 0:
        return "zlib"
    return ""


def _no_record(where: str, header: bytes) -> str:
    if kind := _compression(header):
        return (
            f"{where}: is compressed ({kind}), so nothing in it can be found without unpacking it; set "
            "data.options.copy: true to have it unpacked once"
        )
    return f"{where}: is no TFRecord file; take it out of data.options.path, with a pattern such as *.tfrecord"


def _damaged(what: str) -> str:
    return f"is damaged: the checksum of its {what} is another; write the file again"


def _cut_off(at: str, found: int, expected: int, what: str) -> SourceError:
    return SourceError(
        f"{at}: the file ends within it, after {found} of {expected} bytes of {what}; write it again, or leave it out "
        "of data.options.path"
    )
