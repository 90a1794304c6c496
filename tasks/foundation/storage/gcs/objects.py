"""Single objects of a bucket over the JSON API: made, asked about, copied, listed, deleted.

Each function is one request (or one a page), tried as long as its patience lasts. Checksums travel with every upload,
so that the store itself refuses what was garbled on the way, before anybody can see it. What an answer has to look like
is in `shapes`.
"""

import base64
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.checksum import checksum_bytes
from tasks.foundation.storage.gcs import response_shapes
from tasks.foundation.storage.gcs.connection import connect
from tasks.foundation.storage.gcs.refusals import bucket_missing, credentials_refused
from tasks.foundation.storage.gcs.responses import (
    NOT_FOUND,
    PRECONDITION_FAILED,
    UNAUTHORIZED,
    Answer,
    Answered,
    Garbled,
    require_success,
)
from tasks.foundation.storage.gcs.retrying import RetryPolicy, Tries, retrying

_FIELDS = "name,size,crc32c,generation,metadata,contentEncoding,timeCreated"
_PAGE = 1000
_FORBIDDEN = 403
OBJECT = "b/{}/o/{}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, and how patiently it is asked."""

    name: str
    patience: RetryPolicy

    def uri(self, key: str) -> str:
        """Address of an object."""
        return f"gs://{self.name}/{key}"

    def ask(self, where: str, method: str, path: str, *names: str, **options: Any) -> Answer:
        """One request of the JSON API, one try; other errors of the network come through.

        Raises:
            FileNotFoundError: 404.
            Answered: another error of the store's.
            Malformed: something else than the store answered.
            Garbled: the store got other bytes than were sent.
            StoreRefused: there are no credentials that could be used.
        """
        files = self._files(where)
        answer: Answer = files.ask(method, path, *names, stall_seconds=self.patience.stall_seconds, **options)
        try:
            require_success(answer)
        except Answered as fault:
            if fault.code == NOT_FOUND:
                raise FileNotFoundError(fault.said) from fault
            if fault.code == UNAUTHORIZED and files.credentials.credentials is not None:
                files.credentials.credentials.token = None  # the next try asks for a new one
            if fault.is_of_checksums:
                raise Garbled(f"the store got other bytes than were sent ({fault.said})") from fault
            raise
        return answer

    def _files(self, where: str) -> Any:
        import google.auth.exceptions

        try:
            return connect()
        except google.auth.exceptions.TransportError:
            raise
        except (google.auth.exceptions.GoogleAuthError, OSError) as fault:
            raise credentials_refused(fault, where) from fault

    def create(self, key: str, data: bytes) -> None:
        """Make an object that must not be there yet: put-if-absent, by ifGenerationMatch=0.

        Raises:
            FileExistsError: it is there, and is not of this call's making.
            StoreRefused: there is no such bucket, or no permission.
            StorageError: the store failed.
        """
        token = uuid.uuid4().hex

        def once() -> None:
            try:
                made = self._insert_once(key, data, {"metadata": {"baton-create": token}}, ifGenerationMatch="0")
            except Answered as fault:
                if fault.code != PRECONDITION_FAILED:
                    raise
                # Refused, and perhaps by our own: the first answer got lost, or the network delivered it twice.
                there = self.describe_once(key)
                if there is None:
                    raise  # refused for another reason, such as a policy
                if there.metadata.get("baton-create") != token:
                    raise FileExistsError(fault.said) from fault
                made = there
            try:
                require_same(made.stored, checksum_bytes(data))
            except Garbled:
                # A store that keeps other bytes than it was sent, and says so. Nobody shall ever read them.
                self._delete_once(key, generation=made.generation)
                raise

        self._until_done(key, once)

    def put(self, key: str, data: bytes) -> None:
        """Make an object, or replace it.

        Raises:
            StoreRefused: there is no such bucket, or no permission.
            StorageError: the store failed.
        """
        self._until_done(key, lambda: require_same(self._insert_once(key, data, {}).stored, checksum_bytes(data)))

    def _until_done(self, key: str, once: Callable[[], None]) -> None:
        where = self.uri(key)
        try:
            retrying(once, Tries(where, self.patience))
        except FileNotFoundError as fault:
            raise bucket_missing(where) from fault

    def _insert_once(self, key: str, data: bytes, more: Mapping[str, Any], **options: str) -> response_shapes.Resource:
        """One multipart upload; what the store says it has now."""
        resource = {"name": key, "crc32c": base64_of(checksum_bytes(data).crc32c), **more}
        line = f"baton-{uuid.uuid4().hex}"
        head = f"--{line}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(resource)}\r\n"
        head += f"--{line}\r\nContent-Type: application/octet-stream\r\n\r\n"
        answer = self.ask(
            self.uri(key),
            "POST",
            self.upload_url(),
            uploadType="multipart",
            headers={"Content-Type": f"multipart/related; boundary={line}"},
            data=b"".join((head.encode(), data, f"\r\n--{line}--".encode())),
            **options,
        )
        return response_shapes.resource_of(answer, key=key)

    def describe(self, key: str) -> response_shapes.Resource | None:
        """An object's description; None if it is not there."""
        return retrying(lambda: self.describe_once(key), Tries(self.uri(key), self.patience))

    def describe_once(self, key: str) -> response_shapes.Resource | None:
        """The same, one try; errors of the network come through."""
        try:
            answer = self.ask(self.uri(key), "GET", OBJECT, self.name, key, fields=_FIELDS)
        except FileNotFoundError:
            return None
        return response_shapes.resource_of(answer, key=key)

    def copy(self, key: str, target: str) -> None:
        """Have an object's content under another name too, without moving it out of the store.

        Raises:
            FileNotFoundError: it is not there.
        """
        token: str | None = None

        def once() -> str | None:
            answer = self.ask(
                self.uri(target), "POST", "b/{}/o/{}/rewriteTo/b/{}/o/{}", self.name, key, self.name, target,
                rewriteToken=token,
            )  # fmt: skip
            return response_shapes.rewritten(answer, target=target)

        while True:
            token = retrying(once, Tries(self.uri(target), self.patience))
            if token is None:
                return

    def delete(self, key: str) -> None:
        """Delete an object; nothing happens if it is not there."""
        retrying(lambda: self._delete_once(key), Tries(self.uri(key), self.patience))

    def _delete_once(self, key: str, **options: str) -> None:
        try:
            answer = self.ask(self.uri(key), "DELETE", OBJECT, self.name, key, **options)
        except FileNotFoundError:
            return
        response_shapes.require_deleted(answer)

    def pages(self, prefix: str, *, delimiter: str | None = None) -> Iterator[response_shapes.Page]:
        """Pages of a listing: names, and with a delimiter prefixes.

        Raises:
            StoreRefused: there is no such bucket, or no permission.
        """
        token: str | None = None

        def once() -> response_shapes.Page:
            answer = self.ask(
                self.uri(prefix), "GET", "b/{}/o", self.name, prefix=prefix, delimiter=delimiter, pageToken=token,
                maxResults=_PAGE, fields="kind,items(name),prefixes,nextPageToken",
            )  # fmt: skip
            return response_shapes.page_of(answer, prefix=prefix, delimiter=delimiter, token=token)

        while True:
            try:
                page = retrying(once, Tries(self.uri(prefix), self.patience))
            except FileNotFoundError as fault:
                raise bucket_missing(self.uri(prefix)) from fault
            yield page
            token = page.next_token
            if token is None:
                return

    def settings(self, fields: str) -> Mapping[str, Any] | None:
        """The bucket's own settings; None where these credentials may not see them.

        Raises:
            StoreRefused: there is no such bucket.
        """
        where = f"gs://{self.name}"

        def once() -> Mapping[str, Any] | None:
            try:
                answer = self.ask(where, "GET", "b/{}", self.name, fields=f"name,{fields}")
            except Answered as fault:
                if fault.code == _FORBIDDEN and not fault.is_transient:
                    return None
                raise
            return response_shapes.settings_of(answer, bucket=self.name)

        try:
            return retrying(once, Tries(where, self.patience))
        except FileNotFoundError as fault:
            raise bucket_missing(where) from fault

    def upload_url(self) -> str:
        """Where new objects are sent."""
        from urllib.parse import quote

        return f"{self._files(self.uri(''))._location}/upload/storage/v1/b/{quote(self.name, safe='')}/o"


def require_same(kept: Stored, sent: Stored) -> None:
    """Compare what the store says it has with what was sent.

    Raises:
        Garbled: they differ.
    """
    if kept != sent:
        raise Garbled(f"sent {sent.size} bytes with crc32c {sent.crc32c}, the store has {kept.size} with {kept.crc32c}")


def base64_of(crc32c: str) -> str:
    """A checksum in hexadecimal as the JSON API writes it."""
    return base64.b64encode(bytes.fromhex(crc32c)).decode()
