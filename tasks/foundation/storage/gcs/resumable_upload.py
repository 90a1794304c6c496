"""One local file on its way to Cloud Storage: a resumable upload, streamed, gone on with where it broke off."""

from collections.abc import AsyncIterator
from pathlib import Path

from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.gcs.connection import BLOCK_BYTES
from tasks.foundation.storage.gcs.objects import Bucket, base64_of, require_same
from tasks.foundation.storage.gcs.refusals import bucket_missing
from tasks.foundation.storage.gcs.response_shapes import Resource, progress_of, session_of
from tasks.foundation.storage.gcs.responses import Answered, Garbled
from tasks.foundation.storage.gcs.retrying import Tries, retrying

_GONE = 410


class Upload:
    """A resumable session (https://cloud.google.com/storage/docs/performing-resumable-uploads)."""

    def __init__(self, bucket: Bucket, key: str, source: Path, sent: Stored) -> None:
        """Nothing is sent yet.

        Args:
            bucket: where to.
            key: the object's name.
            source: the file.
            sent: its size and checksum.
        """
        self._bucket, self._key, self._source, self._sent = bucket, key, source, sent
        self._tries = Tries(bucket.uri(key), bucket.patience)
        self._session: str | None = None
        self._persisted = self._furthest = 0
        self._unreadable: OSError | None = None

    def run(self) -> None:
        """Send it all.

        Raises:
            StoreRefused: there is no such bucket, or no permission.
            StorageError: the store, the network or the local disk failed for too long.
        """
        retrying(self._to_the_end, self._tries)

    def _to_the_end(self) -> None:
        """Begin, or ask how far it came; then send the rest, as often as the store takes some of it."""
        if self._session is None:
            self._session, self._persisted = self._begin(), 0
            made = None
        else:
            made = self._put(f"bytes */{self._sent.size}", None, 0)
        while made is None:
            before = self._persisted
            rest = self._sent.size - before
            content_range = f"bytes {before}-{self._sent.size - 1}/{self._sent.size}"
            made = self._put(content_range, self._blocks(before), rest)
            if made is None and self._persisted <= before:
                raise ConnectionError("the store took none of what was sent")
        self._session = None
        require_same(made.stored, self._sent)

    def _begin(self) -> str:
        resource = {"name": self._key, "crc32c": base64_of(self._sent.crc32c)}
        try:
            answer = self._bucket.ask(
                self._bucket.uri(self._key),
                "POST",
                self._bucket.upload_url(),
                uploadType="resumable",
                json=resource,
                headers={
                    "X-Upload-Content-Type": "application/octet-stream",
                    "X-Upload-Content-Length": str(self._sent.size),
                },
            )
        except FileNotFoundError as fault:
            raise bucket_missing(self._bucket.uri(self._key)) from fault
        return session_of(answer)

    def _put(self, content_range: str, data: AsyncIterator[bytes] | None, size: int) -> Resource | None:
        """The finished object, or None: then `_persisted` tells how far it came."""
        session = str(self._session)
        try:
            answer = self._bucket.ask(
                self._bucket.uri(self._key),
                "PUT",
                session,
                headers={"Content-Range": content_range, "Content-Length": str(size)},
                data=data,
            )
        except Exception as fault:
            if self._unreadable is not None:
                why = self._unreadable.strerror
                raise StorageError(f"{self._source}: cannot be read any more ({why}); see to its disk") from fault
            if isinstance(fault, FileNotFoundError) or (isinstance(fault, Answered) and fault.code == _GONE):
                self._session = None
                raise ConnectionError("the store has forgotten the upload; it begins anew") from fault
            if isinstance(fault, Garbled):
                self._session = None  # what was refused at its end stays refused
            raise
        came = progress_of(answer, key=self._key, size=self._sent.size)
        if isinstance(came, Resource):
            return came
        if came > self._furthest:  # a store that takes something, forgets it and takes it again gets nowhere
            self._furthest = came
            self._tries.progress()
        self._persisted = came
        return None

    async def _blocks(self, begin: int) -> AsyncIterator[bytes]:
        try:
            with self._source.open("rb") as file:
                file.seek(begin)
                while block := file.read(BLOCK_BYTES):
                    yield block
        except OSError as fault:
            self._unreadable = fault
            raise
