"""Deletes many objects in few requests. See https://cloud.google.com/storage/docs/batch.

A batch is tried once. What it did not delete, for whatever reason, is deleted one by one, which retries and explains.
"""

import logging
import re
import uuid
from collections.abc import Sequence
from email import message_from_bytes
from urllib.parse import quote

from tasks.foundation.errors import BatonError
from tasks.foundation.storage.gcs.objects import Bucket
from tasks.foundation.storage.gcs.payload import BufferPayload
from tasks.foundation.storage.gcs.responses import NOT_FOUND, MalformedResponse, Response, message_of
from tasks.foundation.storage.parallel import parallel_map

_LOGGER = logging.getLogger(__name__)
_MAX_CALLS = 100  # of one batch, according to the documentation
_STATUS = re.compile(rb"HTTP/[\d.]+ (\d{3})\b")
_ID = re.compile(r"<?response-(\d+)>?\s*")
_SUCCESS = range(200, 300)


def delete_all(bucket: Bucket, keys: Sequence[str], *, workers: int) -> None:
    """Delete objects; those that do not exist are skipped.

    Args:
        bucket: the bucket.
        keys: names of the objects.
        workers: the maximum number of requests side by side.

    Raises:
        StoreRefused: an object may not be deleted.
        StorageError: the store failed.
    """
    batches = [keys[begin : begin + _MAX_CALLS] for begin in range(0, len(keys), _MAX_CALLS)]
    left = parallel_map(lambda batch: _left_by_batch(bucket, batch), batches, workers=workers)
    parallel_map(bucket.delete, [key for keys_left in left for key in keys_left], workers=workers)


def _left_by_batch(bucket: Bucket, keys: Sequence[str]) -> list[str]:
    """Send one batch; returns what it did not delete."""
    if len(keys) == 1:
        return list(keys)
    try:
        gone = _delete_once(bucket, keys)
    except BatonError:
        raise
    except Exception as error:  # noqa: BLE001 - deleting one by one meets the same error, and reports it
        _LOGGER.debug("%s: no batch of deletes: %s", bucket.uri(keys[0]), message_of(error))
        gone = set()
    return [key for index, key in enumerate(keys) if index not in gone]


def _delete_once(bucket: Bucket, keys: Sequence[str]) -> set[int]:
    """Positions of the keys that do not exist any more."""
    boundary = f"baton-{uuid.uuid4().hex}"
    parts = [
        f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: <{index}>\r\n\r\n"
        f"DELETE /storage/v1/b/{quote(bucket.name, safe='')}/o/{quote(key, safe='')} HTTP/1.1\r\n\r\n"
        for index, key in enumerate(keys)
    ]
    payload = BufferPayload.of([memoryview(f"{''.join(parts)}--{boundary}--\r\n".encode())])
    response = bucket.request(
        bucket.uri(keys[0]),
        "POST",
        bucket.batch_url(),
        headers={
            "Content-Type": f"multipart/mixed; boundary={boundary}",
            "Content-Length": str(payload.stat.size),
        },
        data=payload.blocks(0),
    )
    return {index for index, status in _statuses(response) if status in _SUCCESS or status == NOT_FOUND}


def _statuses(response: Response) -> list[tuple[int, int]]:
    """Position and status of each answer in a batch.

    Raises:
        MalformedResponse: it is no answer to a batch.
    """
    content_type = response.headers.get("Content-Type", "")
    message = message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode() + response.body)
    if not message.is_multipart():
        raise MalformedResponse(f"expected the answers of a batch, got {content_type}")
    found = []
    for part in message.walk():
        answered = _ID.fullmatch(str(part.get("Content-ID", "")))
        body = part.get_payload(decode=True)
        status = _STATUS.match(body.lstrip()) if isinstance(body, bytes) else None
        if answered is not None and status is not None:
            found.append((int(answered[1]), int(status[1])))
    return found
