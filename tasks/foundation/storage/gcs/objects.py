"""Objects of a bucket over the JSON API: describe, copy, list and delete; `inserts.py` makes them.

Each method sends one request, or one per page, and retries as its policy allows. `response_shapes` checks what comes
back.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from tasks.foundation.storage.gcs import response_shapes
from tasks.foundation.storage.gcs.connection import connect
from tasks.foundation.storage.gcs.refusals import bucket_missing, credentials_refused
from tasks.foundation.storage.gcs.responses import (
    NOT_FOUND,
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
        self.retry(key, lambda: self.delete_once(key))

    def delete_once(self, key: str, **options: str) -> None:
        """The same without retries. Network errors pass through.

        Args:
            key: the object's name.
            options: parameters of the query.
        """
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

    def batch_url(self) -> str:
        """The URL that takes many requests in one."""
        return f"{self._files(self.uri(''))._location}/batch/storage/v1"

    def _files(self, where: str) -> Any:
        import google.auth.exceptions

        try:
            return connect()
        except google.auth.exceptions.TransportError:
            raise
        except (google.auth.exceptions.GoogleAuthError, OSError) as error:
            raise credentials_refused(error, where) from error
