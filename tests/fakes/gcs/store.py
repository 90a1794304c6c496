"""The fake's objects. One lock covers each check and its change, so preconditions are atomic."""

import bisect
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.fakes.gcs.objects import (
    Bucket,
    Checksums,
    Content,
    Refusal,
    StoredObject,
    as_content,
    checksums_of,
    held,
    joined,
    no_such_bucket,
    no_such_object,
    number_of,
    permission_denied,
    precondition_failed,
    retained,
)

WRITABLE = ("contentType", "metadata", "cacheControl", "contentDisposition", "contentEncoding", "contentLanguage")
SETTINGS = (
    *("retention_seconds", "versioning", "requester_pays", "denied", "default_event_based_hold"),
    *("soft_delete_seconds", "lifecycle", "object_retention", "leaves_out_zeros"),
)
MUTABLE = (*WRITABLE, "eventBasedHold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preconditions:
    """Preconditions of a request on the live object. Generation 0 means that it does not exist."""

    generation: int | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "Preconditions":
        """Refuses those that Baton never sends, so that none is passed over in silence."""
        unknown = {key for key in query if key.startswith("if")} - {"ifGenerationMatch"}
        if unknown:
            raise Refusal(501, f"The fake does not know {', '.join(sorted(unknown))}")
        return cls(generation=number_of(query, "ifGenerationMatch"))

    def check(self, found: StoredObject | None) -> None:
        if self.generation is not None and self.generation != (found.generation if found else 0):
            raise precondition_failed()


NONE = Preconditions()


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
            bucket.metageneration += 1
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

    def may_insert(self, bucket: str, name: str, preconditions: Preconditions) -> None:
        """Raise the refusal of an insert. A resumable upload checks at its start and its end."""
        with self.lock:
            settings = self.require(bucket, "storage.objects.create")
            found = settings.live.get(name)
            preconditions.check(found)
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
        preconditions: Preconditions = NONE,
    ) -> StoredObject:
        check_name(name)
        with self.lock:
            self.may_insert(bucket, name, preconditions)
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

    def delete(
        self, bucket: str, name: str, generation: int | None = None, preconditions: Preconditions = NONE
    ) -> None:
        with self.lock:
            home = self.require(bucket, "storage.objects.delete")
            found = self.find(bucket, name, generation)
            if found is None:
                raise no_such_object(bucket, name)
            preconditions.check(found)
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
