"""Reads the bytes of objects: a whole object, verified against the store's checksum, or a range of one."""

from tasks.foundation.storage.checksum import checksum_bytes
from tasks.foundation.storage.gcs import response_shapes
from tasks.foundation.storage.gcs.objects import OBJECT, Bucket
from tasks.foundation.storage.gcs.refusals import compressed_object
from tasks.foundation.storage.gcs.responses import ChecksumMismatch, ErrorResponse, MalformedResponse, Response

_RANGE_NOT_SATISFIABLE = 416


def read(bucket: Bucket, key: str) -> bytes:
    """A whole object.

    Raises:
        FileNotFoundError: it does not exist.
        StoreRefused: it is stored compressed.
    """

    def once() -> bytes:
        response = bucket.request(bucket.uri(key), "GET", OBJECT, bucket.name, key, alt="media")
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
