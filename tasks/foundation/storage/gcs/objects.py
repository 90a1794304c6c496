"""Single objects of a bucket over the JSON API: made, asked about, read in part, copied, listed, deleted.

Each function is one request (or one a page), tried as long as its patience lasts. Checksums travel with every upload,
so that the store itself refuses what was garbled on the way, before anybody can see it.
"""

import base64
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.checksum import checksum_bytes
from tasks.foundation.storage.gcs.answers import NOT_FOUND, PRECONDITION_FAILED, UNAUTHORIZED, Answered, Garbled
from tasks.foundation.storage.gcs.connection import connect
from tasks.foundation.storage.gcs.patience import Patience, Tries, retrying
from tasks.foundation.storage.gcs.refusals import bucket_missing, credentials_refused

_FIELDS = "name,size,crc32c,generation,metadata"
_PAGE = 1000
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_BAD_REQUEST, _FORBIDDEN, _NOT_SATISFIABLE = 400, 403, 416


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, and how patiently it is asked."""

    name: str
    patience: Patience

    def uri(self, key: str) -> str:
        """Address of an object."""
        return f"gs://{self.name}/{key}"

    def call(self, where: str, method: str, path: str, *arguments: str, **options: Any) -> Any:
        """One request of the JSON API through gcsfs, tried again where that is worth it.

        Raises:
            FileNotFoundError: 404.
            StorageError: anything else; see `Tries.again_after`.
        """
        return retrying(lambda: self.call_once(where, method, path, *arguments, **options), Tries(where, self.patience))

    def call_once(self, where: str, method: str, path: str, *arguments: str, **options: Any) -> Any:
        """One request; other errors of the network come through.

        Raises:
            FileNotFoundError: 404.
            Answered: another error of the store's.
            Garbled: the store got other bytes than were sent.
            StoreRefused: there are no credentials that could be used.
        """
        files = self._files(where)
        try:
            return files.call(method, path, *arguments, **options)
        except Answered as fault:
            if fault.code == NOT_FOUND:
                raise FileNotFoundError(fault.said) from fault
            if fault.code == UNAUTHORIZED and files.credentials.credentials is not None:
                files.credentials.credentials.token = None  # the next try asks for a new one
            if _is_of_checksums(fault):
                raise Garbled(f"the store got other bytes than were sent ({fault.said})") from fault
            raise

    def _files(self, where: str) -> Any:
        import google.auth.exceptions

        try:
            return connect(self.patience.stall_seconds)
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
                there = self._describe_once(key)
                if there is None:
                    raise  # refused for another reason, such as a policy
                if there.get("metadata", {}).get("baton-create") != token:
                    raise FileExistsError(fault.said) from fault
                made = there
            try:
                require_same(made, checksum_bytes(data))
            except Garbled:
                # A store that keeps other bytes than it was sent, and says so. Nobody shall ever read them.
                self._delete_once(key, generation=made["generation"])
                raise

        self._until_done(key, once)

    def put(self, key: str, data: bytes) -> None:
        """Make an object, or replace it.

        Raises:
            StoreRefused: there is no such bucket, or no permission.
            StorageError: the store failed.
        """
        self._until_done(key, lambda: require_same(self._insert_once(key, data, {}), checksum_bytes(data)))

    def _until_done(self, key: str, once: Callable[[], None]) -> None:
        where = self.uri(key)
        try:
            retrying(once, Tries(where, self.patience))
        except FileNotFoundError as fault:
            raise bucket_missing(where) from fault

    def _insert_once(self, key: str, data: bytes, more: Mapping[str, Any], **options: str) -> dict[str, Any]:
        """One multipart upload; what the store says it has now."""
        resource = {"name": key, "crc32c": base64_of(checksum_bytes(data).crc32c), **more}
        line = f"baton-{uuid.uuid4().hex}"
        head = f"--{line}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(resource)}\r\n"
        head += f"--{line}\r\nContent-Type: application/octet-stream\r\n\r\n"
        answer: dict[str, Any] = self.call_once(
            self.uri(key),
            "POST",
            self.upload_url(),
            uploadType="multipart",
            headers={"Content-Type": f"multipart/related; boundary={line}"},
            data=b"".join((head.encode(), data, f"\r\n--{line}--".encode())),
            json_out=True,
            **options,
        )
        return answer

    def describe(self, key: str) -> dict[str, Any] | None:
        """An object's name, size, crc32c, generation and own metadata; None if it is not there."""
        return retrying(lambda: self._describe_once(key), Tries(self.uri(key), self.patience))

    def _describe_once(self, key: str) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = self.call_once(
                self.uri(key), "GET", "b/{}/o/{}", self.name, key, fields=_FIELDS, json_out=True
            )
        except FileNotFoundError:
            return None
        return answer

    def read(self, key: str) -> bytes:
        """A whole object, compared with the checksum that comes with it.

        Raises:
            FileNotFoundError: it is not there.
        """
        where = self.uri(key)

        def once() -> bytes:
            headers, data = self.call_once(where, "GET", "b/{}/o/{}", self.name, key, alt="media")
            told = _hash_in(headers)
            if told is not None and told != checksum_bytes(data).crc32c:
                raise Garbled("what arrived has another checksum than the store says")
            return bytes(data)

        return retrying(once, Tries(where, self.patience))

    def read_part(self, key: str, begin: int, size: int) -> tuple[bytes, int]:
        """At most `size` bytes, at least 1, from `begin` on, and the size of the whole object.

        Raises:
            FileNotFoundError: it is not there.
        """
        where = self.uri(key)

        def once() -> tuple[bytes, int]:
            try:
                headers, data = self.call_once(
                    where,
                    "GET",
                    "b/{}/o/{}",
                    self.name,
                    key,
                    alt="media",
                    headers={"Range": f"bytes={begin}-{begin + size - 1}"},
                )
            except Answered as fault:
                if fault.code == _NOT_SATISFIABLE:
                    return b"", begin  # nothing lies there
                raise
            match = _RANGE.fullmatch(headers.get("Content-Range", ""))
            if match is None or int(match[1]) != begin or int(match[2]) - begin + 1 != len(data):
                raise Garbled(f"asked for {size} bytes from {begin} on, {len(data)} came")
            return bytes(data), int(match[3])

        return retrying(once, Tries(where, self.patience))

    def copy(self, key: str, target: str) -> None:
        """Have an object's content under another name too, without moving it out of the store.

        Raises:
            FileNotFoundError: it is not there.
        """
        token: dict[str, str] = {}
        while True:
            answer = self.call(
                self.uri(target), "POST", "b/{}/o/{}/rewriteTo/b/{}/o/{}", self.name, key, self.name, target,
                json_out=True, **token,
            )  # fmt: skip
            if answer["done"]:
                return
            token = {"rewriteToken": answer["rewriteToken"]}

    def delete(self, key: str) -> None:
        """Delete an object; nothing happens if it is not there."""
        retrying(lambda: self._delete_once(key), Tries(self.uri(key), self.patience))

    def _delete_once(self, key: str, **options: str) -> None:
        try:
            self.call_once(self.uri(key), "DELETE", "b/{}/o/{}", self.name, key, **options)
        except FileNotFoundError:
            return

    def pages(self, prefix: str, *, delimiter: str | None = None) -> Iterator[Mapping[str, Any]]:
        """Pages of a listing: `items` of names, and with a delimiter `prefixes`.

        Raises:
            StoreRefused: there is no such bucket, or no permission.
        """
        token: str | None = None
        while True:
            try:
                page = self.call(
                    self.uri(prefix), "GET", "b/{}/o", self.name, prefix=prefix, delimiter=delimiter, pageToken=token,
                    maxResults=_PAGE, fields="items(name),prefixes,nextPageToken", json_out=True,
                )  # fmt: skip
            except FileNotFoundError as fault:
                raise bucket_missing(self.uri(prefix)) from fault
            yield page
            token = page.get("nextPageToken")
            if token is None:
                return

    def settings(self) -> Mapping[str, Any] | None:
        """The bucket's own settings; None where these credentials may not see them.

        Raises:
            StoreRefused: there is no such bucket.
        """
        where = f"gs://{self.name}"

        def once() -> Mapping[str, Any] | None:
            try:
                found: Mapping[str, Any] = self.call_once(
                    where, "GET", "b/{}", self.name, fields="versioning,retentionPolicy", json_out=True
                )
            except Answered as fault:
                if fault.code == _FORBIDDEN:
                    return None
                raise
            return found

        try:
            return retrying(once, Tries(where, self.patience))
        except FileNotFoundError as fault:
            raise bucket_missing(where) from fault

    def upload_url(self) -> str:
        """Where new objects are sent."""
        from urllib.parse import quote

        return f"{self._files(self.uri(''))._location}/upload/storage/v1/b/{quote(self.name, safe='')}/o"


def stored(resource: Mapping[str, Any]) -> Stored:
    """Size and checksum out of an object's description."""
    crc = base64.b64decode(resource["crc32c"]).hex()
    return Stored(size=int(resource["size"]), crc32c=crc)


def require_same(resource: Mapping[str, Any], sent: Stored) -> None:
    """Compare what the store says it has with what was sent.

    Raises:
        Garbled: they differ.
    """
    kept = stored(resource)
    if kept != sent:
        raise Garbled(f"sent {sent.size} bytes with crc32c {sent.crc32c}, the store has {kept.size} with {kept.crc32c}")


def base64_of(crc32c: str) -> str:
    """A checksum in hexadecimal as the JSON API writes it."""
    return base64.b64encode(bytes.fromhex(crc32c)).decode()


def _hash_in(headers: Mapping[str, str]) -> str | None:
    """The crc32c that an answer comes with; several hashes are one header or several."""
    values = headers.getall("X-Goog-Hash", []) if hasattr(headers, "getall") else [headers.get("X-Goog-Hash", "")]
    for value in ",".join(values).split(","):
        name, _, encoded = value.strip().partition("=")
        if name == "crc32c":
            return base64.b64decode(encoded).hex()
    return None


def _is_of_checksums(fault: Answered) -> bool:
    """400 for a body whose checksum is not the one that came with it."""
    said = fault.said.lower()
    return fault.code == _BAD_REQUEST and "crc32c" in said and ("match" in said or "invalid" in said)
