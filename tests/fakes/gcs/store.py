"""The fake's buckets and objects, with the error responses of the service.

One lock covers each check and its change, so preconditions are atomic.
"""

import base64
import bisect
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import google_crc32c
import numpy as np

Content = tuple[np.ndarray, ...]
"""An object's bytes as the uint8 arrays in which they arrived; never joined, never changed."""

CALLER = "tester@project.iam.gserviceaccount.com"
REASONS = {400: "invalid", 401: "authError", 404: "notFound", 409: "conflict", 503: "backendError"}


class Refusal(Exception):
    """An error response of the service."""

    def __init__(self, status: int, message: str, reason: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason or REASONS.get(status, "invalid")
        self.headers = dict(headers or {})

    def as_json(self) -> dict[str, Any]:
        entry = {"message": self.message, "domain": "global", "reason": self.reason}
        return {"error": {"code": self.status, "message": self.message, "errors": [entry]}}


def no_such_object(bucket: str, name: str) -> Refusal:
    return Refusal(404, f"No such object: {bucket}/{name}")


def no_such_bucket() -> Refusal:
    return Refusal(404, "The specified bucket does not exist.")


def permission_denied(permission: str) -> Refusal:
    resource = "bucket" if permission.endswith(".list") else "object"
    return Refusal(
        403,
        f"{CALLER} does not have {permission} access to the Google Cloud Storage {resource}. "
        f"Permission '{permission}' denied on resource (or it may not exist).",
        "forbidden",
    )


def retained(bucket: str, name: str, until: float) -> Refusal:
    return Refusal(
        403,
        f"Object '{bucket}/{name}' is subject to bucket's retention policy or object retention and cannot be deleted "
        f"or overwritten until {timestamp(until)}",
        "retentionPolicyNotMet",
    )


def held(bucket: str, name: str) -> Refusal:
    return Refusal(
        403,
        f"Object '{bucket}/{name}' is under active Event-Based hold and cannot be deleted, overwritten or archived "
        "until hold is removed.",
        "forbidden",
    )


def number_of(values: Mapping[str, Any], key: str) -> int | None:
    """An integer of a query or a body; None if it is missing."""
    text = values.get(key)
    if text is None or text == "":
        return None
    try:
        return int(text)
    except ValueError:
        raise Refusal(400, f"Invalid value for {key}: {text!r}") from None


def timestamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def as_content(data: bytes | bytearray | memoryview | np.ndarray) -> Content:
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    return (array,) if array.size else ()


def joined(content: Content) -> bytes:
    return b"".join(piece.tobytes() for piece in content)


def cut(content: Content, start: int, stop: int) -> Content:
    """Bytes [start, stop) of a content, as views."""
    pieces, position = [], 0
    for piece in content:
        low, high = max(start - position, 0), min(stop - position, piece.size)
        if low < high:
            pieces.append(piece[low:high])
        position += piece.size
    return tuple(pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """Size and crc32c in base64, as the service reports them. It has an md5 too, which Baton does not read."""

    size: int
    crc32c: str


class Hasher:
    """Checksums of bytes that arrive in pieces. Call it without holding a lock."""

    def __init__(self) -> None:
        self.size = 0
        self._crc = 0

    def update(self, piece: np.ndarray) -> None:
        self.size += piece.size
        # google_crc32c holds the GIL, so long pieces would block all other connections.
        for start in range(0, piece.size, 1 << 24):
            self._crc = google_crc32c.extend(self._crc, piece[start : start + (1 << 24)])

    def result(self) -> Checksums:
        return Checksums(
            size=self.size,
            crc32c=base64.b64encode(self._crc.to_bytes(4, "big")).decode(),
        )


def checksums_of(content: Iterable[np.ndarray]) -> Checksums:
    hasher = Hasher()
    for piece in content:
        hasher.update(piece)
    return hasher.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One generation of an object."""

    bucket: str
    name: str
    generation: int
    content: Content
    checksums: Checksums
    created: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    leaves_out_zeros: bool = False

    @property
    def size(self) -> int:
        return self.checksums.size

    @property
    def etag(self) -> str:
        return base64.b64encode(f"{self.generation}".encode()).decode()

    @property
    def content_type(self) -> str:
        return str(self.fields.get("contentType") or "application/octet-stream")

    def resource(self) -> dict[str, Any]:
        """The object's metadata in the JSON API, without links."""
        resource: dict[str, Any] = {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "name": self.name,
            "bucket": self.bucket,
            "generation": str(self.generation),
            "metageneration": "1",
            "contentType": self.content_type,
            "storageClass": "STANDARD",
            "size": str(self.size),
            "crc32c": self.checksums.crc32c,
            "etag": self.etag,
            "timeCreated": timestamp(self.created),
            "updated": timestamp(self.created),
        }
        if self.leaves_out_zeros and not self.size:
            del resource["size"]
        return resource | {key: value for key, value in self.fields.items() if value not in (None, {})}


@dataclass(slots=True)
class Bucket:
    """A bucket and its settings. `names` is kept sorted for listings."""

    name: str
    created: float
    live: dict[str, StoredObject] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    retention_seconds: float = 0.0
    versioning: bool = False
    requester_pays: bool = False
    denied: Sequence[str] = ()
    default_event_based_hold: bool = False
    soft_delete_seconds: float = 0.0
    lifecycle: Sequence[Mapping[str, Any]] = ()
    object_retention: bool = False
    leaves_out_zeros: bool = False
    """Leave out the size of an empty object, as Google's own test bench does."""

    def resource(self) -> dict[str, Any]:
        resource: dict[str, Any] = {
            "kind": "storage#bucket",
            "id": self.name,
            "name": self.name,
            "storageClass": "STANDARD",
            "timeCreated": timestamp(self.created),
            "updated": timestamp(self.created),
            "versioning": {"enabled": self.versioning},
            "billing": {"requesterPays": self.requester_pays},
        }
        if self.retention_seconds:
            resource["retentionPolicy"] = {"retentionPeriod": str(int(self.retention_seconds))}
        if self.default_event_based_hold:
            resource["defaultEventBasedHold"] = True
        if self.lifecycle:
            resource["lifecycle"] = {"rule": list(self.lifecycle)}
        if self.object_retention:
            resource["objectRetention"] = {"mode": "Enabled"}
        resource["softDeletePolicy"] = {"retentionDurationSeconds": str(int(self.soft_delete_seconds))}
        return resource


WRITABLE = ("contentType", "metadata", "cacheControl", "contentDisposition", "contentEncoding", "contentLanguage")
SETTINGS = (
    *("retention_seconds", "versioning", "requester_pays", "denied", "default_event_based_hold"),
    *("soft_delete_seconds", "lifecycle", "object_retention", "leaves_out_zeros"),
)
MUTABLE = (*WRITABLE, "eventBasedHold")


def generation_wanted(query: Mapping[str, str]) -> int | None:
    """The ifGenerationMatch of a request; 0 means that there is no object.

    Preconditions that Baton never sends are refused, so that none is passed over in silence.
    """
    unknown = {key for key in query if key.startswith("if")} - {"ifGenerationMatch"}
    if unknown:
        raise Refusal(501, f"The fake does not know {', '.join(sorted(unknown))}")
    return number_of(query, "ifGenerationMatch")


def check_generation(found: StoredObject | None, if_generation: int | None) -> None:
    if if_generation is not None and if_generation != (found.generation if found else 0):
        raise Refusal(412, "At least one of the pre-conditions you specified did not hold.", "conditionNotMet")


class Store:
    """Buckets and their objects. Every method is atomic. Callers hash contents before."""

    def __init__(self, buckets: tuple[str, ...] = (), *, clock: Callable[[], float] = time.time) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self.buckets: dict[str, Bucket] = {}
        self._last_generation = 0
        for name in buckets:
            self.create_bucket(name)

    def create_bucket(self, name: str) -> Bucket:
        with self.lock:
            if name in self.buckets:
                raise Refusal(409, "Your previous request to create the named bucket succeeded and you already own it.")
            self.buckets[name] = Bucket(name, self.clock())
            return self.buckets[name]

    def bucket(self, name: str) -> Bucket:
        with self.lock:
            if name not in self.buckets:
                raise no_such_bucket()
            return self.buckets[name]

    def set_bucket(self, name: str, **settings: Any) -> Bucket:
        """Change settings of a `Bucket`, such as `retention_seconds` or `denied` (a list of permissions)."""
        with self.lock:
            bucket = self.bucket(name)
            for key, value in settings.items():
                if key not in SETTINGS:
                    raise Refusal(400, f"Unknown bucket setting {key!r}")
                setattr(bucket, key, value)
            return bucket

    def require(self, bucket: str, *permissions: str) -> Bucket:
        with self.lock:
            found = self.bucket(bucket)
            for permission in permissions:
                if permission in found.denied:
                    raise permission_denied(permission)
            return found

    # Direct access for tests, without permission checks.

    def names(self, bucket: str) -> list[str]:
        with self.lock:
            return list(self.bucket(bucket).names)

    def find(self, bucket: str, name: str, generation: int | None = None) -> StoredObject | None:
        with self.lock:
            found = self.bucket(bucket).live.get(name)
            return found if found is None or generation in {None, found.generation} else None

    def put(self, bucket: str, name: str, data: bytes, **fields: Any) -> StoredObject:
        """Store an object without a request."""
        content = as_content(data)
        return self.insert(bucket, name, content, checksums_of(content), fields=fields)

    def corrupt(self, bucket: str, name: str, *, bit: int = 0) -> None:
        """Flip one bit of the stored bytes and keep the checksums: damage at rest."""
        with self.lock:
            found = self.find(bucket, name)
            if found is None or not found.size:
                raise no_such_object(bucket, name)
            data = bytearray(joined(found.content))
            data[bit // 8 % len(data)] ^= 1 << bit % 8
            self.bucket(bucket).live[name] = replace(found, content=as_content(data))

    # The service's operations.

    def read(self, bucket: str, name: str, generation: int | None = None) -> StoredObject:
        with self.lock:
            settings = self.require(bucket, "storage.objects.get")
            found = self.find(bucket, name, generation)
            if found is None:
                # As documented: without permission to list, a missing object is reported as forbidden.
                if "storage.objects.list" in settings.denied:
                    raise permission_denied("storage.objects.get")
                raise no_such_object(bucket, name)
            return found

    def may_insert(self, bucket: str, name: str, if_generation: int | None) -> None:
        """Raise the refusal of an insert. A resumable upload checks at its start and its end."""
        with self.lock:
            settings = self.require(bucket, "storage.objects.create")
            found = settings.live.get(name)
            check_generation(found, if_generation)
            if found is not None:
                # Overwriting deletes the old object.
                self.require(bucket, "storage.objects.delete")
                self._check_retention(settings, found)

    def insert(
        self,
        bucket: str,
        name: str,
        content: Content,
        checksums: Checksums,
        *,
        fields: Mapping[str, Any] | None = None,
        if_generation: int | None = None,
    ) -> StoredObject:
        check_name(name)
        with self.lock:
            self.may_insert(bucket, name, if_generation)
            now = self.clock()
            # Generations always rise, even if the clock goes back.
            self._last_generation = max(self._last_generation + 1, int(now * 1_000_000))
            made = StoredObject(
                bucket=bucket,
                name=name,
                generation=self._last_generation,
                content=content,
                checksums=checksums,
                created=now,
                fields={key: value for key, value in (fields or {}).items() if key in MUTABLE},
            )
            home = self.bucket(bucket)
            if home.default_event_based_hold:
                made = replace(made, fields={**made.fields, "eventBasedHold": True})
            made = replace(made, leaves_out_zeros=home.leaves_out_zeros)
            self._retire(home, name)
            home.live[name] = made
            bisect.insort(home.names, name)
            return made

    def delete(self, bucket: str, name: str, generation: int | None = None, if_generation: int | None = None) -> None:
        with self.lock:
            home = self.require(bucket, "storage.objects.delete")
            found = self.find(bucket, name, generation)
            if found is None:
                raise no_such_object(bucket, name)
            check_generation(found, if_generation)
            self._check_retention(home, found)
            self._retire(home, name)

    def _retire(self, home: Bucket, name: str) -> None:
        if home.live.pop(name, None) is not None:
            del home.names[bisect.bisect_left(home.names, name)]

    def _check_retention(self, home: Bucket, found: StoredObject) -> None:
        if found.fields.get("eventBasedHold"):
            raise held(home.name, found.name)
        until = found.created + home.retention_seconds
        if home.retention_seconds and self.clock() < until:
            raise retained(home.name, found.name, until)

    # This comes last, because it shadows the built-in `bytes` in the rest of the class.

    def bytes(self, bucket: str, name: str) -> bytes:
        found = self.find(bucket, name)
        if found is None:
            raise no_such_object(bucket, name)
        return joined(found.content)


def check_name(name: str) -> None:
    if not name:
        raise Refusal(400, "Required", "required")
    if len(name.encode()) > 1024 or "\r" in name or "\n" in name:
        raise Refusal(400, "The specified object name is not valid.")
