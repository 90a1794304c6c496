"""Objects of a bucket over the JSON API: describe, read, copy, list and delete; `uploads.py` makes them.

Each method sends one request, or one per page or part, and retries as its policy allows; `responses.py` checks what
comes back. A whole object is verified against the store's checksum; ranges of one are read side by side. Many objects
are deleted in few requests (https://cloud.google.com/storage/docs/batch): a batch is tried once, and what it did not
delete, for whatever reason, is deleted one by one, which retries and explains.
"""

import logging
import re
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from baton.tasks.foundation.contracts.home_files import too_large
from baton.tasks.foundation.errors import BatonError, StorageError
from baton.tasks.foundation.storage.gcs.connection import Retry, RetryPolicy, connect, retrying, send
from baton.tasks.foundation.storage.gcs.refusals import bucket_missing, compressed_object, credentials_refused
from baton.tasks.foundation.storage.gcs.responses import (
    NOT_FOUND,
    SETTINGS_FIELDS,
    UNAUTHORIZED,
    BodyTooLarge,
    ChecksumMismatch,
    ErrorResponse,
    MalformedResponse,
    Page,
    Resource,
    Response,
    Settings,
    media_of,
    message_of,
    page_of,
    require_deleted,
    require_success,
    resource_of,
    rewrite_token_of,
    settings_of,
    whole_size_of,
)
from baton.tasks.foundation.storage.transfers import checksum_bytes, parallel_map

_T = TypeVar("_T")
_FIELDS = "name,size,crc32c,generation,metadata,contentEncoding,timeCreated"
_PAGE_SIZE = 1000
_OK, _FORBIDDEN = 200, 403
_OBJECT = "b/{}/o/{}"
_RANGE_NOT_SATISFIABLE = 416
_PARTS_OF_ONE_OBJECT = 4
# A module global on purpose: it bounds the memory of the whole process, however many files it downloads side by side.
_PARTS_IN_MEMORY = threading.BoundedSemaphore(16)
_LOGGER = logging.getLogger(__name__)
_MAX_CALLS = 100  # of one batch, according to the documentation
# One answer in a batch names its request; what does not is not believed.
_BATCH_ANSWER = re.compile(
    rb"content-id: *<?response-(\d+)>?\s*\r?\n(?:[\w-]+:.*\r?\n)*\r?\nHTTP/[\d.]+ (\d{3})", re.IGNORECASE
)
_GONE = {b"200", b"204", b"404"}


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
            options: see `connection.send`.

        Raises:
            FileNotFoundError: 404.
            ErrorResponse: another error from the store.
            MalformedResponse: the response is not from the store.
            ChecksumMismatch: the store received other bytes than were sent.
            StoreRefused: there are no usable credentials.
        """
        files = self._files(where)
        response = send(files, method, path, *names, stall_seconds=self.policy.stall_seconds, **options)
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

    def describe(self, key: str) -> Resource | None:
        """An object's description; None if it does not exist."""
        return self.retry(key, lambda: self.describe_once(key))

    def describe_once(self, key: str) -> Resource | None:
        """The same without retries. Network errors pass through."""
        try:
            response = self.request(self.uri(key), "GET", _OBJECT, self.name, key, fields=_FIELDS)
        except FileNotFoundError:
            return None
        return resource_of(response, key=key)

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
            return rewrite_token_of(response, target=target)

        while True:
            token = self.retry(target, once)
            if token is None:
                return

    def delete(self, key: str) -> None:
        """Delete an object; does nothing if it does not exist."""
        self.retry(key, lambda: self.delete_once(key))

    def delete_once(self, key: str, **options: int) -> None:
        """The same without retries. Network errors pass through.

        Args:
            key: the object's name.
            options: parameters of the query.
        """
        try:
            response = self.request(self.uri(key), "DELETE", _OBJECT, self.name, key, **options)
        except FileNotFoundError:
            return
        require_deleted(response)

    def pages(self, prefix: str, *, delimiter: str | None = None) -> Iterator[Page]:
        """Pages of a listing: names, and with a delimiter prefixes.

        Raises:
            StoreRefused: there is no such bucket, or no permission.
        """
        token: str | None = None

        def once() -> Page:
            response = self.request(
                self.uri(prefix), "GET", "b/{}/o", self.name, prefix=prefix, delimiter=delimiter, pageToken=token,
                maxResults=_PAGE_SIZE, fields="kind,items(name),prefixes,nextPageToken",
            )  # fmt: skip
            return page_of(response, prefix=prefix, delimiter=delimiter, token=token)

        while True:
            page = self.retry(prefix, once, not_found_is_bucket=True)
            yield page
            token = page.next_token
            if token is None:
                return

    def settings(self) -> Settings | None:
        """The bucket's settings; None if these credentials may not read them.

        Raises:
            StoreRefused: there is no such bucket.
        """

        def once() -> Settings | None:
            try:
                response = self.request(f"gs://{self.name}", "GET", "b/{}", self.name, fields=SETTINGS_FIELDS)
            except ErrorResponse as error:
                if error.code == _FORBIDDEN and not error.is_transient:
                    return None
                raise
            return settings_of(response, bucket=self.name)

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


def read_object(bucket: Bucket, key: str, *, most_bytes: int | None) -> bytes:
    """A whole object.

    Args:
        key: the object's name.
        most_bytes: the number of bytes not to read beyond; None: any number.

    Raises:
        FileNotFoundError: it does not exist.
        FileTooLarge: it has more bytes.
        StoreRefused: it is stored compressed.
    """

    def once() -> bytes:
        where = bucket.uri(key)
        try:
            response = bucket.request(where, "GET", _OBJECT, bucket.name, key, alt="media", most_bytes=most_bytes)
        except BodyTooLarge as error:
            raise too_large(where) from error
        if response.status != _OK:
            raise MalformedResponse(f"expected status {_OK} for a read, got {response.status}")
        expected = _crc32c_of_uncompressed(bucket, key, response) or _existing(bucket, key).crc32c
        if expected != checksum_bytes(response.body).crc32c:
            raise ChecksumMismatch("the checksum of the received bytes differs from the store's")
        return response.body

    return bucket.retry(key, once)


def read_range(bucket: Bucket, key: str, begin: int, size: int) -> tuple[bytes, int]:
    """At most `size` bytes, at least 1, from offset `begin`, and the size of the whole object.

    An object that has no bytes there counts as one of `begin` bytes. The store has no checksums of ranges, so the
    caller verifies the whole. The request does not pin a generation: two processes that prepare one dataset replace a
    shard by the same bytes.

    Raises:
        FileNotFoundError: it does not exist.
        StoreRefused: it is stored compressed.
    """

    def once() -> tuple[bytes, int]:
        headers = {"Range": f"bytes={begin}-{begin + size - 1}"}
        try:
            response = bucket.request(bucket.uri(key), "GET", _OBJECT, bucket.name, key, alt="media", headers=headers)
        except ErrorResponse as error:
            if error.code == _RANGE_NOT_SATISFIABLE:
                return b"", begin  # it ends there, or before
            raise
        _crc32c_of_uncompressed(bucket, key, response)
        return response.body, whole_size_of(response, begin=begin, size=size)

    return bucket.retry(key, once)


def read_parts(
    bucket: Bucket, key: str, take: Callable[[int, bytes], None], *, begin: int, size: int | None, part_bytes: int
) -> None:
    """Read an object, or `size` bytes from offset `begin`, in parts side by side; less if it ends before.

    The first part comes alone if the size is not known: its answer has the size of the whole.

    Args:
        key: the object's name.
        take: called with each part and its offset from `begin`, from several threads and in any order.
        begin: offset in bytes.
        size: number of bytes; None for all.
        part_bytes: of one request.

    Raises:
        FileNotFoundError: it does not exist.
        StoreRefused: it is stored compressed.
        StorageError: it was replaced meanwhile by one of another size.
    """

    def read_part(offset: int, wanted: int) -> int:
        """Returns the size of the whole object."""
        with _PARTS_IN_MEMORY:
            data, whole = read_range(bucket, key, offset, wanted)
            if data:
                take(offset - begin, data)
            return whole

    if size == 0:
        return
    end = begin + part_bytes if size is None else begin + size
    first = min(part_bytes, end - begin)
    whole = read_part(begin, first)
    end = whole if size is None else min(end, whole)

    def read_other(offset: int) -> None:
        if read_part(offset, min(part_bytes, end - offset)) != whole:
            raise StorageError(f"{bucket.uri(key)}: replaced by an object of another size while it was read; run again")

    parallel_map(read_other, range(begin + first, end, part_bytes), workers=_PARTS_OF_ONE_OBJECT)


def _existing(bucket: Bucket, key: str) -> Resource:
    found = bucket.describe_once(key)
    if found is None:
        raise FileNotFoundError(key)
    return found


def _crc32c_of_uncompressed(bucket: Bucket, key: str, response: Response) -> str | None:
    crc32c, encoding = media_of(response)
    if encoding:
        raise compressed_object(bucket.uri(key), encoding)
    return crc32c


def delete_all(bucket: Bucket, keys: Sequence[str], *, workers: int) -> None:
    """Delete objects; those that do not exist are skipped.

    Args:
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
    boundary = f"baton-{uuid.uuid4().hex}"
    parts = [
        f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: <{index}>\r\n\r\n"
        f"DELETE /storage/v1/b/{quote(bucket.name, safe='')}/o/{quote(key, safe='')} HTTP/1.1\r\n\r\n"
        for index, key in enumerate(keys)
    ]
    body = f"{''.join(parts)}--{boundary}--\r\n".encode()
    headers = {"Content-Type": f"multipart/mixed; boundary={boundary}", "Content-Length": str(len(body))}
    where = bucket.uri(keys[0])
    try:
        response = bucket.request(where, "POST", bucket.batch_url(), headers=headers, data=_in_one_block(body))
    except BatonError:
        raise
    except Exception as error:  # noqa: BLE001 - deleting one by one meets the same error, and reports it
        _LOGGER.debug("%s: no batch of deletes: %s", where, message_of(error))
        return list(keys)
    gone = {int(index) for index, status in _BATCH_ANSWER.findall(response.body) if status in _GONE}
    return [key for index, key in enumerate(keys) if index not in gone]


async def _in_one_block(data: bytes) -> AsyncIterator[bytes]:
    yield data
