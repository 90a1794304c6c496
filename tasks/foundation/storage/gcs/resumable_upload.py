"""A resumable upload: streams one local file to Cloud Storage, and continues where it broke off.

See https://cloud.google.com/storage/docs/performing-resumable-uploads.
"""

from collections.abc import AsyncIterator
from pathlib import Path

from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import FileStat
from tasks.foundation.storage.gcs.connection import BLOCK_BYTES
from tasks.foundation.storage.gcs.objects import Bucket, base64_of, require_same
from tasks.foundation.storage.gcs.refusals import bucket_missing
from tasks.foundation.storage.gcs.response_shapes import Resource, progress_of, session_url_of
from tasks.foundation.storage.gcs.responses import ChecksumMismatch, ErrorResponse
from tasks.foundation.storage.gcs.retrying import Retry, retrying

_GONE = 410


class Upload:
    """The upload of one file."""

    def __init__(self, bucket: Bucket, key: str, source: Path, sent: FileStat) -> None:
        """Prepare the upload without sending anything.

        Args:
            bucket: the target.
            key: the object's name.
            source: the local file.
            sent: its size and checksum.
        """
        self._bucket, self._key, self._source, self._sent = bucket, key, source, sent
        self._retry = Retry(bucket.uri(key), bucket.policy)
        self._session_url: str | None = None
        self._persisted = self._furthest = 0
        self._read_error: OSError | None = None

    def run(self) -> None:
        """Upload the whole file.

        Raises:
            StoreRefused: there is no such bucket, or no permission.
            StorageError: the store, the network or the local disk failed for too long.
        """
        retrying(self._once, self._retry)

    def _once(self) -> None:
        """Start a session, or ask how much of it arrived; then send the rest until the store has it all."""
        if self._session_url is None:
            self._session_url, self._persisted = self._start(), 0
            made = None
        else:
            made = self._put(f"bytes */{self._sent.size}", None, 0)
        while made is None:
            before = self._persisted
            content_range = f"bytes {before}-{self._sent.size - 1}/{self._sent.size}"
            made = self._put(content_range, self._blocks(before), self._sent.size - before)
            if made is None and self._persisted <= before:
                raise ConnectionError("the store kept none of the bytes sent")
        self._session_url = None
        require_same(made.stat, self._sent)

    def _start(self) -> str:
        try:
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
        except FileNotFoundError as error:
            raise bucket_missing(self._bucket.uri(self._key)) from error
        return session_url_of(response)

    def _put(self, content_range: str, data: AsyncIterator[bytes] | None, size: int) -> Resource | None:
        """The finished object; None if bytes are missing: `_persisted` then has the number that arrived."""
        headers = {"Content-Range": content_range, "Content-Length": str(size)}
        try:
            response = self._bucket.request(
                self._bucket.uri(self._key), "PUT", str(self._session_url), headers=headers, data=data
            )
        except Exception as error:
            if self._read_error is not None:
                raise StorageError(
                    f"{self._source}: cannot read the rest of the file ({self._read_error.strerror}); check its disk"
                ) from error
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

    async def _blocks(self, begin: int) -> AsyncIterator[bytes]:
        try:
            with self._source.open("rb") as file:
                file.seek(begin)
                while block := file.read(BLOCK_BYTES):
                    yield block
        except OSError as error:
            self._read_error = error
            raise
