"""Makes objects of a bucket: only if absent, in place of what is there, or in a session that continues after a break.

Checksums travel with every upload, so the store itself refuses damaged bytes before anyone can read them. A payload,
a local file or buffers in memory, can be sent again from any offset. See
https://cloud.google.com/storage/docs/uploads-downloads and
https://cloud.google.com/storage/docs/performing-resumable-uploads.
"""

import base64
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.tasks.foundation.errors import StorageError
from baton.tasks.foundation.storage.gcs.connection import BLOCK_BYTES, Retry, retrying
from baton.tasks.foundation.storage.gcs.objects import Bucket
from baton.tasks.foundation.storage.gcs.refusals import bucket_missing
from baton.tasks.foundation.storage.gcs.responses import (
    PRECONDITION_FAILED,
    ChecksumMismatch,
    ErrorResponse,
    Resource,
    progress_of,
    resource_of,
    session_url_of,
)
from baton.tasks.foundation.storage.interface import FileStat
from baton.tasks.foundation.storage.transfers import checksum_file, extend_crc32c

_GONE = 410


class _SourceUnreadable(Exception):
    """The local file of an upload cannot be read any more. Sending it again does not help."""


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of an upload.

    Attributes:
        stat: their size and checksum.
        blocks: returns the bytes from an offset on, in blocks of at most `BLOCK_BYTES`.
    """

    stat: FileStat
    blocks: Callable[[int], AsyncIterator[bytes | memoryview]]

    @classmethod
    def of_file(cls, path: Path) -> "Payload":
        """The payload of a local file, which is read once for its checksum.

        Raises:
            StorageError: it cannot be read.
        """

        async def blocks(begin: int) -> AsyncIterator[bytes]:
            try:
                with path.open("rb") as file:
                    file.seek(begin)
                    while block := file.read(BLOCK_BYTES):
                        yield block
            except OSError as error:
                message = f"{path}: cannot read the rest of the file ({error.strerror}); check its disk"
                raise _SourceUnreadable(message) from error

        try:
            return cls(checksum_file(path), blocks)
        except OSError as error:
            raise StorageError(f"{path}: cannot read ({error.strerror}); check its disk and run again") from error

    @classmethod
    def of_buffers(cls, buffers: Sequence[memoryview]) -> "Payload":
        """The payload of contiguous bytes, sent from where they are: they must not change until then."""
        parts = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        crc = 0
        for part in parts:
            crc = extend_crc32c(crc, part.toreadonly())

        async def blocks(begin: int) -> AsyncIterator[memoryview]:
            for part in parts:
                for offset in range(min(begin, part.nbytes), part.nbytes, BLOCK_BYTES):
                    yield part[offset : offset + BLOCK_BYTES]
                begin = max(begin - part.nbytes, 0)

        return cls(FileStat(size=sum(part.nbytes for part in parts), crc32c=f"{crc:08x}"), blocks)


def create_object(bucket: Bucket, key: str, data: bytes) -> None:
    """Create an object that must not exist yet, with ifGenerationMatch=0.

    Raises:
        FileExistsError: it exists, and this call did not create it.
        StoreRefused: there is no such bucket, or no permission.
        StorageError: the store failed.
    """
    token = uuid.uuid4().hex
    payload = Payload.of_buffers([memoryview(data)])

    def once() -> None:
        try:
            made = _insert_once(bucket, key, payload, {"metadata": {"baton-create": token}}, ifGenerationMatch="0")
        except ErrorResponse as error:
            if error.code != PRECONDITION_FAILED:
                raise
            # The object may be our own: the first response got lost, or the network delivered the request twice.
            existing = bucket.describe_once(key)
            if existing is None:
                raise  # refused for another reason, such as a policy
            if existing.metadata.get("baton-create") != token:
                raise FileExistsError(error.message) from error
            made = existing
        try:
            require_same(made.stat, payload.stat)
        except ChecksumMismatch:
            # The store reports that it kept other bytes than were sent. Delete them before anyone reads them.
            bucket.delete_once(key, generation=made.generation)
            raise

    bucket.retry(key, once, not_found_is_bucket=True)


def put_object(bucket: Bucket, key: str, payload: Payload, *, in_one_request: bool) -> Resource:
    """Create an object, or replace it. What the store reports of it is compared with what was sent.

    Args:
        bucket: the target.
        key: the object's name.
        payload: what to send.
        in_one_request: whether the first attempt sends everything in one request, which is faster than a session.
            Nothing of a broken one is kept, so further attempts use a session if there is much to send.

    Returns:
        The store's description of it.

    Raises:
        StoreRefused: there is no such bucket, or no permission.
        StorageError: the store, the network or the local disk failed for too long.
    """
    retry = Retry(bucket.uri(key), bucket.policy)
    return retrying(_Upload(bucket, key, payload, retry, in_one_request=in_one_request).once, retry)


def _insert_once(
    bucket: Bucket, key: str, payload: Payload, more: Mapping[str, Any] | None = None, **options: str
) -> Resource:
    """Send one multipart upload without retries; returns the store's description of the new object.

    Args:
        key: the object's name.
        more: further metadata.
        options: parameters of the query.
    """
    resource = {"name": key, "crc32c": _base64_of(payload.stat.crc32c), **(more or {})}
    boundary = f"baton-{uuid.uuid4().hex}"
    head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(resource)}\r\n"
    head += f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    tail = f"\r\n--{boundary}--"

    async def body() -> AsyncIterator[bytes | memoryview]:
        yield head.encode()
        async for block in payload.blocks(0):
            yield block
        yield tail.encode()

    response = bucket.request(
        bucket.uri(key),
        "POST",
        bucket.upload_url(),
        uploadType="multipart",
        headers={
            "Content-Type": f"multipart/related; boundary={boundary}",
            "Content-Length": str(len(head.encode()) + payload.stat.size + len(tail)),
        },
        data=body(),
        **options,
    )
    return resource_of(response, key=key)


def require_same(stored: FileStat, sent: FileStat) -> None:
    """Compare size and checksum in the store with those of the bytes that were sent.

    Raises:
        ChecksumMismatch: they differ.
    """
    if stored != sent:
        raise ChecksumMismatch(
            f"sent {sent.size} bytes with crc32c {sent.crc32c}, the store has {stored.size} with {stored.crc32c}"
        )


def _base64_of(crc32c: str) -> str:
    """A hexadecimal checksum in the base64 of the JSON API."""
    return base64.b64encode(bytes.fromhex(crc32c)).decode()


class _Upload:
    """The upload of one object, in as many attempts as it takes."""

    def __init__(self, bucket: Bucket, key: str, payload: Payload, retry: Retry, *, in_one_request: bool) -> None:
        self._bucket, self._key, self._payload, self._sent = bucket, key, payload, payload.stat
        self._in_one_request, self._retry = in_one_request, retry
        self._session_url: str | None = None
        self._persisted = self._furthest = 0

    def once(self) -> Resource:
        """One attempt. A session continues where the one before ended."""
        try:
            made = self._send_whole() if self._in_one_request else self._send_rest()
        except FileNotFoundError as error:
            raise bucket_missing(self._bucket.uri(self._key)) from error
        except Exception as error:
            if unreadable := _unreadable_source(error):
                raise StorageError(str(unreadable)) from error
            raise
        require_same(made.stat, self._sent)
        return made

    def _send_whole(self) -> Resource:
        self._in_one_request = self._sent.size <= BLOCK_BYTES
        return _insert_once(self._bucket, self._key, self._payload)

    def _send_rest(self) -> Resource:
        """Start a session, or ask how much of it arrived; then send the rest until the store has it all."""
        if self._session_url is None:
            self._session_url, self._persisted = self._start(), 0
            made = None
        else:
            made = self._put(f"bytes */{self._sent.size}", None, 0)
        while made is None:
            before = self._persisted
            content_range = f"bytes {before}-{self._sent.size - 1}/{self._sent.size}"
            made = self._put(content_range, self._payload.blocks(before), self._sent.size - before)
            if made is None and self._persisted <= before:
                raise ConnectionError("the store kept none of the bytes sent")
        self._session_url = None
        return made

    def _start(self) -> str:
        response = self._bucket.request(
            self._bucket.uri(self._key),
            "POST",
            self._bucket.upload_url(),
            uploadType="resumable",
            json={"name": self._key, "crc32c": _base64_of(self._sent.crc32c)},
            headers={
                "X-Upload-Content-Type": "application/octet-stream",
                "X-Upload-Content-Length": str(self._sent.size),
            },
        )
        return session_url_of(response)

    def _put(self, content_range: str, data: AsyncIterator[bytes | memoryview] | None, size: int) -> Resource | None:
        """The finished object; None if bytes are missing: `_persisted` then has the number that arrived."""
        headers = {"Content-Range": content_range, "Content-Length": str(size)}
        try:
            response = self._bucket.request(
                self._bucket.uri(self._key), "PUT", str(self._session_url), headers=headers, data=data
            )
        except Exception as error:
            if isinstance(error, FileNotFoundError) or (isinstance(error, ErrorResponse) and error.code == _GONE):
                self._session_url = None
                raise ConnectionError("the store lost the upload session; starting over") from error
            if isinstance(error, ChecksumMismatch):
                self._session_url = None  # the store refuses this session for good
            raise
        progress = progress_of(response, key=self._key, size=self._sent.size)
        if isinstance(progress, Resource):
            return progress
        if progress > self._furthest:  # only new bytes count: a store that forgets bytes makes no progress
            self._furthest = progress
            self._retry.reset()
        self._persisted = progress
        return None


def _unreadable_source(error: BaseException | None) -> _SourceUnreadable | None:
    """The error of the local file behind the error of a request, if there is one."""
    while error is not None and not isinstance(error, _SourceUnreadable):
        error = error.__cause__
    return error
