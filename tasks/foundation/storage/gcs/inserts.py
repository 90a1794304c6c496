"""Makes objects of a bucket: only if absent, or in place of what is there.

Checksums travel with every upload, so the store itself refuses damaged bytes before anyone can read them.
"""

import base64
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tasks.foundation.storage.base import FileStat
from tasks.foundation.storage.gcs.objects import Bucket
from tasks.foundation.storage.gcs.payload import BufferPayload, Payload
from tasks.foundation.storage.gcs.response_shapes import Resource, resource_of
from tasks.foundation.storage.gcs.responses import PRECONDITION_FAILED, ChecksumMismatch, ErrorResponse


def create(bucket: Bucket, key: str, data: bytes) -> None:
    """Create an object that must not exist yet, with ifGenerationMatch=0.

    Raises:
        FileExistsError: it exists, and this call did not create it.
        StoreRefused: there is no such bucket, or no permission.
        StorageError: the store failed.
    """
    token = uuid.uuid4().hex
    payload = BufferPayload.of([memoryview(data)])

    def once() -> None:
        try:
            made = insert_once(bucket, key, payload, {"metadata": {"baton-create": token}}, ifGenerationMatch="0")
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


def put(bucket: Bucket, key: str, data: bytes) -> Resource:
    """Create an object, or replace it. Returns the store's description of it.

    Raises:
        StoreRefused: there is no such bucket, or no permission.
        StorageError: the store failed.
    """
    payload = BufferPayload.of([memoryview(data)])

    def once() -> Resource:
        made = insert_once(bucket, key, payload)
        require_same(made.stat, payload.stat)
        return made

    return bucket.retry(key, once, not_found_is_bucket=True)


def insert_once(
    bucket: Bucket, key: str, payload: Payload, more: Mapping[str, Any] | None = None, **options: str
) -> Resource:
    """Send one multipart upload without retries; returns the store's description of the new object.

    Args:
        bucket: the bucket.
        key: the object's name.
        payload: its bytes.
        more: further metadata.
        options: parameters of the query.
    """
    resource = {"name": key, "crc32c": base64_of(payload.stat.crc32c), **(more or {})}
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


def base64_of(crc32c: str) -> str:
    """A hexadecimal checksum in the base64 of the JSON API."""
    return base64.b64encode(bytes.fromhex(crc32c)).decode()
