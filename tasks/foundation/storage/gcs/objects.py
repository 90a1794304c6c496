"""Objects of a bucket over the JSON API: create, write, describe, copy, list and delete.

Each method sends one request, or one per page, and retries as its policy allows. Checksums travel with every upload, so
the store itself refuses damaged bytes before anyone can read them. `response_shapes` checks what comes back.
"""

import base64
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from tasks.foundation.storage.base import FileStat
from tasks.foundation.storage.checksum import checksum_bytes
from tasks.foundation.storage.gcs import response_shapes
from tasks.foundation.storage.gcs.connection import connect
from tasks.foundation.storage.gcs.refusals import bucket_missing, credentials_refused
from tasks.foundation.storage.gcs.responses import (
    NOT_FOUND,
    PRECONDITION_FAILED,
    UNAUTHORIZED,
    ChecksumMismatch,
    ErrorResponse,
    Response,
    require_success,
)
from tasks.foundation.storage.gcs.retrying import Retry, RetryPolicy, retrying

_T = TypeVar("_T")

_FIELDS = "name,size,crc32c,generation,metadata,contentEncoding,timeCreated"
_PAGE_SIZE = 1000
_FORBIDDEN = 403
OBJECT = "b/{}/o/{}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket and the retry policy for its requests."""

    name: str
    policy: RetryPolicy

    def uri(self, key: str) -> str:
        """The gs:// address of an object."""
        return f"gs://{self.name}/{key}"

    def request(self, where: str, method: str, path: str, *names: str, **options: Any) -> Response:
        """Send one request of the JSON API, without retries. Other network errors pass through.

        Args:
            where: address of the object or bucket, for messages.
            method: HTTP method.
            path: below the JSON API, with {} for names; or a whole URL.
            names: inserted into the path, quoted.
            options: see `connection.connect`.

        Raises:
            FileNotFoundError: 404.
            ErrorResponse: another error from the store.
            MalformedResponse: the response is not from the store.
            ChecksumMismatch: the store received other bytes than were sent.
            StoreRefused: there are no usable credentials.
        """
        files = self._files(where)
        response: Response = files.request(method, path, *names, stall_seconds=self.policy.stall_seconds, **options)
        try:
            require_success(response)
        except ErrorResponse as error:
            if error.code == NOT_FOUND:
                raise FileNotFoundError(error.message) from error
            if error.code == UNAUTHORIZED and files.credentials.credentials is not None:
                files.credentials.credentials.token = None  # the next attempt requests a new one
            if error.is_checksum_mismatch:
                raise ChecksumMismatch(f"the store received other bytes than were sent ({error.message})") from error
            raise
        return response

    def retry(self, key: str, once: Callable[[], _T], *, not_found_is_bucket: bool = False) -> _T:
        """Call `once` until it succeeds or the policy gives up.

        Args:
            key: the object's name, for messages.
            once: one attempt.
            not_found_is_bucket: a 404 means that the bucket does not exist.

        Raises:
            FileNotFoundError: a 404 that means the object.
            StoreRefused: there is no such bucket, or no permission.
            StorageError: see `retrying`.
        """
        where = self.uri(key) if key else f"gs://{self.name}"
        try:
            return retrying(once, Retry(where, self.policy))
        except FileNotFoundError as error:
            if not_found_is_bucket:
                raise bucket_missing(where) from error
            raise

    def create(self, key: str, data: bytes) -> None:
        """Create an object that must not exist yet, with ifGenerationMatch=0.

        Raises:
            FileExistsError: it exists, and this call did not create it.
            StoreRefused: there is no such bucket, or no permission.
            StorageError: the store failed.
        """
        token = uuid.uuid4().hex

        def once() -> None:
            try:
                made = self._insert_once(key, data, {"metadata": {"baton-create": token}}, ifGenerationMatch="0")
            except ErrorResponse as error:
                if error.code != PRECONDITION_FAILED:
                    raise
                # The object may be our own: the first response got lost, or the network delivered the request twice.
                existing = self.describe_once(key)
                if existing is None:
                    raise  # refused for another reason, such as a policy
                if existing.metadata.get("baton-create") != token:
                    raise FileExistsError(error.message) from error
                made = existing
            try:
                require_same(made.stat, checksum_bytes(data))
            except ChecksumMismatch:
                # The store reports that it kept other bytes than were sent. Delete them before anyone reads them.
                self._delete_once(key, generation=made.generation)
                raise

        self.retry(key, once, not_found_is_bucket=True)

    def put(self, key: str, data: bytes) -> None:
        """Create an object, or replace it.

        Raises:
            StoreRefused: there is no such bucket, or no permission.
            StorageError: the store failed.
        """
        sent = checksum_bytes(data)
        self.retry(key, lambda: require_same(self._insert_once(key, data, {}).stat, sent), not_found_is_bucket=True)

    def _insert_once(self, key: str, data: bytes, more: Mapping[str, Any], **options: str) -> response_shapes.Resource:
        """Send one multipart upload; returns the store's description of the new object."""
        resource = {"name": key, "crc32c": base64_of(checksum_bytes(data).crc32c), **more}
        boundary = f"baton-{uuid.uuid4().hex}"
        head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(resource)}\r\n"
        head += f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        response = self.request(
            self.uri(key),
            "POST",
            self.upload_url(),
            uploadType="multipart",
            headers={"Content-Type": f"multipart/related; boundary={boundary}"},
            data=b"".join((head.encode(), data, f"\r\n--{boundary}--".encode())),
            **options,
        )
        return response_shapes.resource_of(response, key=key)

    def describe(self, key: str) -> response_shapes.Resource | None:
        """An object's description; None if it does not exist."""
        return self.retry(key, lambda: self.describe_once(key))

    def describe_once(self, key: str) -> response_shapes.Resource | None:
        """The same without retries. Network errors pass through."""
        try:
            response = self.request(self.uri(key), "GET", OBJECT, self.name, key, fields=_FIELDS)
        except FileNotFoundError:
            return None
        return response_shapes.resource_of(response, key=key)

    def copy(self, key: str, target: str) -> None:
        """Copy an object within the bucket. The bytes stay in the store.

        Raises:
            FileNotFoundError: `key` does not exist.
        """
        token: str | None = None

        def once() -> str | None:
            response = self.request(
                self.uri(target), "POST", "b/{}/o/{}/rewriteTo/b/{}/o/{}", self.name, key, self.name, target,
                rewriteToken=token,
            )  # fmt: skip
            return response_shapes.rewrite_token_of(response, target=target)

        while True:
            token = self.retry(target, once)
            if token is None:
                return

    def delete(self, key: str) -> None:
        """Delete an object; does nothing if it does not exist."""
        self.retry(key, lambda: self._delete_once(key))

    def _delete_once(self, key: str, **options: str) -> None:
        try:
            response = self.request(self.uri(key), "DELETE", OBJECT, self.name, key, **options)
        except FileNotFoundError:
            return
        response_shapes.require_deleted(response)

    def pages(self, prefix: str, *, delimiter: str | None = None) -> Iterator[response_shapes.Page]:
        """Pages of a listing: names, and with a delimiter prefixes.

        Raises:
            StoreRefused: there is no such bucket, or no permission.
        """
        token: str | None = None

        def once() -> response_shapes.Page:
            response = self.request(
                self.uri(prefix), "GET", "b/{}/o", self.name, prefix=prefix, delimiter=delimiter, pageToken=token,
                maxResults=_PAGE_SIZE, fields="kind,items(name),prefixes,nextPageToken",
            )  # fmt: skip
            return response_shapes.page_of(response, prefix=prefix, delimiter=delimiter, token=token)

        while True:
            page = self.retry(prefix, once, not_found_is_bucket=True)
            yield page
            token = page.next_token
            if token is None:
                return

    def settings(self, fields: str) -> Mapping[str, Any] | None:
        """The bucket's settings; None if these credentials may not read them.

        Raises:
            StoreRefused: there is no such bucket.
        """

        def once() -> Mapping[str, Any] | None:
            try:
                response = self.request(f"gs://{self.name}", "GET", "b/{}", self.name, fields=f"name,{fields}")
            except ErrorResponse as error:
                if error.code == _FORBIDDEN and not error.is_transient:
                    return None
                raise
            return response_shapes.settings_of(response, bucket=self.name)

        return self.retry("", once, not_found_is_bucket=True)

    def upload_url(self) -> str:
        """The URL that new objects are sent to."""
        return f"{self._files(self.uri(''))._location}/upload/storage/v1/b/{quote(self.name, safe='')}/o"

    def _files(self, where: str) -> Any:
        import google.auth.exceptions

        try:
            return connect()
        except google.auth.exceptions.TransportError:
            raise
        except (google.auth.exceptions.GoogleAuthError, OSError) as error:
            raise credentials_refused(error, where) from error


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
