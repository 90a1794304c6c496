"""The bytes of objects: a whole one, compared with the checksum that the store keeps it by, or a part of one."""

from tasks.foundation.storage.checksum import checksum_bytes
from tasks.foundation.storage.gcs import response_shapes
from tasks.foundation.storage.gcs.objects import OBJECT, Bucket
from tasks.foundation.storage.gcs.refusals import packed
from tasks.foundation.storage.gcs.responses import Answer, Answered, Garbled, Malformed
from tasks.foundation.storage.gcs.retrying import Tries, retrying

_NOT_SATISFIABLE = 416


def read(bucket: Bucket, key: str) -> bytes:
    """A whole object.

    Raises:
        FileNotFoundError: it is not there.
        StoreRefused: it is stored packed.
    """

    def once() -> bytes:
        answer = bucket.ask(bucket.uri(key), "GET", OBJECT, bucket.name, key, alt="media")
        told = response_shapes.crc32c_of_media(answer)
        _require_unpacked(bucket, key, answer)
        if told is None:  # asked for separately, then
            told = _there(bucket, key).stored.crc32c
        if told != checksum_bytes(answer.contents).crc32c:
            raise Garbled("what arrived has another checksum than the store says")
        return answer.contents

    return retrying(once, Tries(bucket.uri(key), bucket.patience))


def read_part(bucket: Bucket, key: str, begin: int, size: int) -> tuple[bytes, int]:
    """At most `size` bytes, at least 1, from `begin` on, and the size of the whole object.

    The store has no checksums of parts, so the caller compares the whole that it puts together. The request does not
    pin a generation: two processes that prepare one dataset replace a shard by the same bytes.

    Raises:
        FileNotFoundError: it is not there.
        StoreRefused: it is stored packed.
    """

    def once() -> tuple[bytes, int]:
        wanted = {"Range": f"bytes={begin}-{begin + size - 1}"}
        try:
            answer = bucket.ask(bucket.uri(key), "GET", OBJECT, bucket.name, key, alt="media", headers=wanted)
        except Answered as fault:
            if fault.code == _NOT_SATISFIABLE:
                return b"", _size_at_most(bucket, key, begin)
            raise
        _require_unpacked(bucket, key, answer)
        return answer.contents, response_shapes.range_of_media(answer, begin=begin, size=size)

    return retrying(once, Tries(bucket.uri(key), bucket.patience))


def _size_at_most(bucket: Bucket, key: str, begin: int) -> int:
    """The size of an object of which nothing is said to lie at `begin`, or beyond."""
    size = _there(bucket, key).stored.size
    if size > begin:
        raise Malformed(f"the store says that nothing lies at {begin} of {size} bytes")
    return size


def _there(bucket: Bucket, key: str) -> response_shapes.Resource:
    found = bucket.describe_once(key)
    if found is None:
        raise FileNotFoundError(key)
    return found


def _require_unpacked(bucket: Bucket, key: str, answer: Answer) -> None:
    encoding = response_shapes.encoding_of_media(answer)
    if encoding:
        raise packed(bucket.uri(key), encoding)
