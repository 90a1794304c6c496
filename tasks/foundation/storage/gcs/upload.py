"""Uploads of large files to Cloud Storage: in one request if that works, or in a session that continues after a break.

See https://cloud.google.com/storage/docs/uploads-downloads and
https://cloud.google.com/storage/docs/performing-resumable-uploads.
"""

from collections.abc import AsyncIterator

from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import FileStat
from tasks.foundation.storage.gcs.inserts import base64_of, insert_once, require_same
from tasks.foundation.storage.gcs.objects import Bucket
from tasks.foundation.storage.gcs.payload import Payload, SourceUnreadable
from tasks.foundation.storage.gcs.refusals import bucket_missing
from tasks.foundation.storage.gcs.response_shapes import Resource, progress_of, session_url_of
from tasks.foundation.storage.gcs.responses import ChecksumMismatch, ErrorResponse
from tasks.foundation.storage.gcs.retrying import Retry, retrying

_GONE = 410


class Upload:
    """The upload of one file. What the store reports of the finished object is compared with what was sent."""

    def __init__(self, bucket: Bucket, key: str, payload: Payload, *, in_one_request: bool) -> None:
        """Prepare the upload without sending anything.

        Args:
            bucket: the target.
            key: the object's name.
            payload: what to send.
            in_one_request: whether the first attempt sends everything in one request. It is faster than a session, and
                after a break nothing of it is kept, so every further attempt uses a session.
        """
        self._bucket, self._key, self._payload, self._sent = bucket, key, payload, payload.stat
        self._in_one_request = in_one_request
        self._retry = Retry(bucket.uri(key), bucket.policy)
        self._session_url: str | None = None
        self._persisted = self._furthest = 0

    def run(self) -> FileStat:
        """Upload the whole file.

        Returns:
            Size and checksum according to the store, which are those of the bytes sent.

        Raises:
            StoreRefused: there is no such bucket, or no permission.
            StorageError: the store, the network or the local disk failed for too long.
        """
        return retrying(self._once, self._retry)

    def _once(self) -> FileStat:
        try:
            made = self._send_whole() if self._in_one_request else self._send_rest()
        except FileNotFoundError as error:
            raise bucket_missing(self._bucket.uri(self._key)) from error
        except Exception as error:
            if unreadable := _unreadable_source(error):
                raise StorageError(str(unreadable)) from error
            raise
        require_same(made.stat, self._sent)
        return made.stat

    def _send_whole(self) -> Resource:
        self._in_one_request = False
        return insert_once(self._bucket, self._key, self._payload)

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
            json={"name": self._key, "crc32c": base64_of(self._sent.crc32c)},
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


def _unreadable_source(error: BaseException | None) -> SourceUnreadable | None:
    """The error of the local file behind the error of a request, if there is one."""
    while error is not None and not isinstance(error, SourceUnreadable):
        error = error.__cause__
    return error
