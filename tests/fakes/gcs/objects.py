"""Objects, buckets and error responses of the fake."""

import base64
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

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


def precondition_failed() -> Refusal:
    return Refusal(412, "At least one of the pre-conditions you specified did not hold.", "conditionNotMet")


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

    def resource(self, base: str) -> dict[str, Any]:
        """The object's metadata in the JSON API. `base` is the server's URL."""
        path = f"/storage/v1/b/{self.bucket}/o/{quote(self.name, safe='')}"
        resource: dict[str, Any] = {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "selfLink": base + path,
            "mediaLink": f"{base}/download{path}?generation={self.generation}&alt=media",
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
    metageneration: int = 1
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

    def resource(self, base: str) -> dict[str, Any]:
        resource: dict[str, Any] = {
            "kind": "storage#bucket",
            "id": self.name,
            "name": self.name,
            "selfLink": f"{base}/storage/v1/b/{self.name}",
            "projectNumber": "123456789012",
            "metageneration": str(self.metageneration),
            "location": "US-CENTRAL1",
            "locationType": "region",
            "storageClass": "STANDARD",
            "etag": base64.b64encode(str(self.metageneration).encode()).decode(),
            "timeCreated": timestamp(self.created),
            "updated": timestamp(self.created),
            "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "inherited"},
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
