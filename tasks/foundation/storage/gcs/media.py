"""Reads the bytes of objects: a whole object, verified against the store's checksum, or ranges of one side by side."""

import threading
from collections.abc import Callable

from tasks.foundation.contracts.home_files import too_large
from tasks.foundation.errors import StorageError
from tasks.foundation.storage.checksum import checksum_bytes
from tasks.foundation.storage.gcs import response_shapes
from tasks.foundation.storage.gcs.objects import OBJECT, Bucket
from tasks.foundation.storage.gcs.refusals import compressed_object
from tasks.foundation.storage.gcs.responses import (
    BodyTooLarge,
    ChecksumMismatch,
    ErrorResponse,
    MalformedResponse,
    Response,
)
from tasks.foundation.storage.parallel import parallel_map

_RANGE_NOT_SATISFIABLE = 416
_PARTS_OF_ONE_OBJECT = 4
# A module global on purpose: it bounds the memory of the whole process, however many files it downloads side by side.
_PARTS_IN_MEMORY = threading.BoundedSemaphore(16)


def read(bucket: Bucket, key: str, *, most_bytes: int | None) -> bytes:
    """A whole object.

    Args:
        bucket: the bucket.
        key: the object's name.
        most_bytes: the number of bytes not to read beyond; None: any number.

    Raises:
        FileNotFoundError: it does not exist.
        FileTooLarge: it has more bytes.
        StoreRefused: it is stored compressed.
    """

    def once() -> bytes:
        where = bucket.uri(key)
        try:
            response = bucket.request(where, "GET", OBJECT, bucket.name, key, alt="media", most_bytes=most_bytes)
        except BodyTooLarge as error:
            raise too_large(where) from error
        expected = response_shapes.crc32c_of_media(response)
        _require_uncompressed(bucket, key, response)
        if expected is None:
            expected = _existing(bucket, key).stat.crc32c
        if expected != checksum_bytes(response.body).crc32c:
            raise ChecksumMismatch("the checksum of the received bytes differs from the store's")
        return response.body

    return bucket.retry(key, once)


def read_range(bucket: Bucket, key: str, begin: int, size: int) -> tuple[bytes, int]:
    """At most `size` bytes, at least 1, from offset `begin`, and the size of the whole object.

    The store has no checksums of ranges, so the caller verifies the whole. The request does not pin a generation: two
    processes that prepare one dataset replace a shard by the same bytes.

    Raises:
        FileNotFoundError: it does not exist.
        StoreRefused: it is stored compressed.
    """

    def once() -> tuple[bytes, int]:
        headers = {"Range": f"bytes={begin}-{begin + size - 1}"}
        try:
            response = bucket.request(bucket.uri(key), "GET", OBJECT, bucket.name, key, alt="media", headers=headers)
        except ErrorResponse as error:
            if error.code == _RANGE_NOT_SATISFIABLE:
                return b"", _size_at_most(bucket, key, begin)
            raise
        _require_uncompressed(bucket, key, response)
        return response.body, response_shapes.size_of_ranged_media(response, begin=begin, size=size)

    return bucket.retry(key, once)


def read_parts(
    bucket: Bucket, key: str, take: Callable[[int, bytes], None], *, begin: int, size: int | None, part_bytes: int
) -> None:
    """Read an object, or `size` bytes from offset `begin`, in parts side by side; less if it ends before.

    The first part comes alone if the size is not known: its answer has the size of the whole.

    Args:
        bucket: the bucket.
        key: the object's name.
        take: called with each part and its offset from `begin`, from several threads and in any order.
        begin: offset in bytes.
        size: number of bytes; None for all.
        part_bytes: of one request.

    Raises:
        FileNotFoundError: it does not exist.
        StoreRefused: it is stored compressed.
        StorageError: it was replaced meanwhile by one of another size.
    """

    def read_part(offset: int, wanted: int) -> int:
        """Returns the size of the whole object."""
        with _PARTS_IN_MEMORY:
            data, whole = read_range(bucket, key, offset, wanted)
            if data:
                take(offset - begin, data)
            return whole

    if size == 0:
        return
    end = begin + part_bytes if size is None else begin + size
    first = min(part_bytes, end - begin)
    whole = read_part(begin, first)
    end = whole if size is None else min(end, whole)

    def read_other(offset: int) -> None:
        if read_part(offset, min(part_bytes, end - offset)) != whole:
            raise StorageError(f"{bucket.uri(key)}: replaced by an object of another size while it was read; run again")

    parallel_map(read_other, range(begin + first, end, part_bytes), workers=_PARTS_OF_ONE_OBJECT)


def _size_at_most(bucket: Bucket, key: str, begin: int) -> int:
    """The size of an object that has no bytes at `begin` or after, according to the store.

    Raises:
        MalformedResponse: it is larger than that.
    """
    size = _existing(bucket, key).stat.size
    if size > begin:
        raise MalformedResponse(f"the store reports no bytes at {begin} of {size}")
    return size


def _existing(bucket: Bucket, key: str) -> response_shapes.Resource:
    found = bucket.describe_once(key)
    if found is None:
        raise FileNotFoundError(key)
    return found


def _require_uncompressed(bucket: Bucket, key: str, response: Response) -> None:
    encoding = response_shapes.encoding_of_media(response)
    if encoding:
        raise compressed_object(bucket.uri(key), encoding)
