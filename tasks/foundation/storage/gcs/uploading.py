"""One local file on its way to Cloud Storage: a resumable upload, streamed, gone on with where it broke off."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.gcs.objects import Bucket, base64_of, require_same
from tasks.foundation.storage.gcs.patience import Garbled, Tries, retrying
from tasks.foundation.storage.gcs.refusals import bucket_missing

# What is in memory at a time, besides what the connection holds.
_BLOCK_BYTES = 1 << 20
_PERSISTED = re.compile(r"bytes=0-(\d+)")


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
        self._persisted = 0

    def run(self) -> None:
        """Send it all.

        Raises:
            StoreRefused: there is no such bucket, or no permission.
            StorageError: the store or the network failed for too long.
        """
        retrying(self._to_the_end, self._tries)

    def _to_the_end(self) -> None:
        made = self._go_on()
        self._session = None
        require_same(made, self._sent)

    def _go_on(self) -> dict[str, Any]:
        """Begin, or ask how far it came; then send the rest."""
        if self._session is None:
            self._session = self._begin()
            self._persisted = 0
        else:
            done = self._ask()
            if done is not None:
                return done
        rest = f"bytes {self._persisted}-{self._sent.size - 1}/{self._sent.size}"
        answer = self._put(rest, self._blocks(self._persisted), self._sent.size - self._persisted)
        if answer is None:
            raise Garbled("the store does not have the whole file yet")
        return answer

    def _begin(self) -> str:
        resource = {"name": self._key, "crc32c": base64_of(self._sent.crc32c)}
        try:
            headers, _ = self._bucket.call_once(
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
        return str(headers["Location"])

    def _ask(self) -> dict[str, Any] | None:
        """How far it came; the finished object if it is one."""
        before = self._persisted
        answer = self._put(f"bytes */{self._sent.size}", None, 0)
        if answer is None and self._persisted > before:
            self._tries.progress()
        return answer

    def _put(self, content_range: str, data: AsyncIterator[bytes] | None, size: int) -> dict[str, Any] | None:
        """The finished object, or None: then `_persisted` tells how far it came."""
        session = self._session
        try:
            headers, text = self._bucket.call_once(
                self._bucket.uri(self._key),
                "PUT",
                str(session),
                headers={"Content-Range": content_range, "Content-Length": str(size)},
                data=data,
            )
        except FileNotFoundError as fault:
            self._session = None
            raise Garbled("the store has forgotten the upload; it begins anew") from fault
        except Exception as fault:
            if getattr(fault, "code", None) == 410:  # noqa: PLR2004 - gone: likewise
                self._session = None
                raise Garbled("the store has given the upload up; it begins anew") from fault
            if isinstance(fault, Garbled):
                self._session = None
            raise
        if text:
            finished: dict[str, Any] = json.loads(text)
            return finished
        match = _PERSISTED.fullmatch(headers.get("Range", ""))
        self._persisted = int(match[1]) + 1 if match else 0
        return None

    async def _blocks(self, begin: int) -> AsyncIterator[bytes]:
        with self._source.open("rb") as file:
            file.seek(begin)
            while block := file.read(_BLOCK_BYTES):
                yield block
