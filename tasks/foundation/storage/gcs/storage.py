"""gs://: objects below a prefix of a bucket on Cloud Storage."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from baton.tasks.foundation.contracts.home_files import most_bytes, refuse_unreadable, require_readable
from baton.tasks.foundation.errors import FileAlreadyThere, FileMissing, ForeignFile, StorageError, StoreRefused
from baton.tasks.foundation.storage.gcs.connection import RetryPolicy
from baton.tasks.foundation.storage.gcs.objects import Bucket, delete_all, read_object, read_parts
from baton.tasks.foundation.storage.gcs.refusals import check_settings, compressed_object
from baton.tasks.foundation.storage.gcs.responses import Resource, Settings
from baton.tasks.foundation.storage.gcs.uploads import Payload, create_object, put_object
from baton.tasks.foundation.storage.interface import FileStat, is_inside, require_inside
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE, Parts, local_target, parallel_map

# The number of parallel transfers and the bytes of each in memory: a checkpoint of any size takes twice the product.
_TRANSFERS = 8
_PART_BYTES = 8 << 20
# A file from memory of at most this size is sent in one request first. Larger than the shards of a checkpoint.
_ONE_REQUEST_BYTES = 80 << 20
_PROBE = ".probe"  # not a valid name of a run
_PROBE_EXPIRY, _MAX_EXPIRED_PROBES = timedelta(hours=1), 20


class CloudStorage:
    """Objects below a prefix of a bucket.

    Nothing is cached: every call asks the store, which is strongly consistent.
    """

    def __init__(self, bucket: str, prefix: str, policy: RetryPolicy | None = None, *, guarded: bool = True) -> None:
        """Create the storage without sending a request.

        Args:
            prefix: without slashes at its ends; may be empty.
            policy: how long to wait for the store; left out: from the environment.
            guarded: whether to refuse names that are not plain relative paths, see `require_inside`.
        """
        self._guarded = guarded
        self._bucket = Bucket(bucket, policy or RetryPolicy.of_environment())
        self._prefix = prefix

    @property
    def uri(self) -> str:
        """Address, beginning with gs://."""
        return self._bucket.uri(self._prefix).rstrip("/")

    @property
    def transfers(self) -> int:
        """See `Storage.transfers`."""
        return _TRANSFERS

    def at(self, folder: str) -> "CloudStorage":
        """See `Storage.at`."""
        return CloudStorage(self._bucket.name, self._key(folder), self._bucket.policy, guarded=self._guarded)

    def with_deadline(self, seconds: float) -> "CloudStorage":
        """See `Storage.with_deadline`."""
        policy = self._bucket.policy.with_deadline(seconds)
        return CloudStorage(self._bucket.name, self._prefix, policy, guarded=self._guarded)

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        key, where = self._key(path), f"{self.uri}/{path}"
        try:
            data = read_object(self._bucket, key, most_bytes=most_bytes(where) if self._guarded else None)
        except FileNotFoundError as error:
            raise self._missing(path) from error
        if self._guarded:
            require_readable(where, data)
        return data

    def read_own(self, path: str) -> bytes:
        """See `Storage.read_own`. Who else may write to a bucket is not known."""
        raise ForeignFile(f"{self.uri}/{path} is in a bucket, where others may write too")

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        return self._bucket.describe(self._key(path)) is not None

    def create(self, path: str, data: bytes) -> None:
        """See `Storage.create`."""
        self._refuse_unreadable(path, data)
        try:
            create_object(self._bucket, self._key(path), data)
        except FileExistsError as error:
            raise FileAlreadyThere(f"{self.uri}/{path} already exists") from error
        PROCESS_DEADLINE.mark_written()

    def write(self, path: str, data: bytes) -> None:
        """See `Storage.write`."""
        self._refuse_unreadable(path, data)
        self.write_buffers(path, [memoryview(data)])

    def upload(self, source: Path, path: str) -> FileStat:
        """See `Storage.upload`. Memory does not grow with the file."""
        payload = Payload.of_file(source)
        return self._put(path, payload, in_one_request=payload.stat.size <= _PART_BYTES)

    def write_buffers(self, path: str, buffers: Sequence[memoryview]) -> FileStat:
        """See `Storage.write_buffers`. Nothing is copied, and the answer to the upload is the stat."""
        payload = Payload.of_buffers(buffers)
        return self._put(path, payload, in_one_request=payload.stat.size <= _ONE_REQUEST_BYTES)

    def copy(self, path: str, target: str) -> None:
        """See `Storage.copy`. The bytes do not leave the bucket."""
        try:
            self._bucket.copy(self._key(path), self._key(target))
        except FileNotFoundError as error:
            raise self._missing(path) from error

    def stat(self, path: str) -> FileStat:
        """See `Storage.stat`. Reads no bytes: the store computed the checksum when they arrived."""
        resource = self._bucket.describe(self._key(path))
        if resource is None:
            raise self._missing(path)
        if resource.encoding:
            raise compressed_object(f"{self.uri}/{path}", resource.encoding)
        return resource.stat

    def checksum(self, path: str, *, begin: int = 0, size: int | None = None) -> FileStat:
        """See `Storage.checksum`."""
        return self._read(path, Parts(None), begin, size)

    def local_path(self, _path: str) -> Path | None:
        """See `Storage.local_path`."""
        return None

    def download(self, path: str, target: Path, *, begin: int = 0, size: int | None = None) -> FileStat:
        """See `Storage.download`."""
        with local_target(target) as file:
            return self._read(path, Parts(file), begin, size)

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        """See `Storage.read_range`."""
        parts: dict[int, bytes] = {}
        self._read_parts(path, parts.__setitem__, begin, size)
        return b"".join(parts[offset] for offset in sorted(parts))

    def files(self, folder: str, *, deep: bool = True) -> Iterator[str]:
        """See `Storage.files`."""
        for page in self._bucket.pages(self._below(folder), delimiter=None if deep else "/"):
            for name in page.names:
                path = self._path(name)
                # The Cloud console marks an empty folder with a name that ends with a slash.
                if not name.endswith("/") and self._is_listed(path):
                    yield path

    def folders(self, folder: str) -> Iterator[str]:
        """See `Storage.folders`."""
        for page in self._bucket.pages(self._below(folder), delimiter="/"):
            yield from filter(self._is_listed, (self._path(prefix.rstrip("/")) for prefix in page.prefixes))

    def delete(self, folder: str, *, files: Sequence[str] | None = None) -> None:
        """See `Storage.delete`."""
        if files is None:
            below = [name for page in self._bucket.pages(self._below(folder)) for name in page.names]
        else:
            below = [self._key(file) for file in files]
        # An object may have the folder's own name.
        own = [self._key(folder)] if folder and files is None else []
        delete_all(self._bucket, [*below, *own], workers=_TRANSFERS)

    def probe(self, home: str = "") -> list[str]:  # noqa: ARG002 - roles are of buckets and prefixes
        """See `Storage.probe`. Creates and deletes an object, because nothing else shows all permissions."""
        settings = self._bucket.settings() or Settings(name=self._bucket.name)
        problems = check_settings(settings, prefix=self._prefix)
        if problems.errors:  # first, because an object that is made now might stay
            raise StoreRefused(f"{self.uri}: {'; '.join(problems.errors)}")
        # A unique name, so that commands that start together do not delete each other's object.
        made = put_object(
            self._bucket, self._key(f"{_PROBE}-{uuid.uuid4().hex}"), Payload.of_buffers([]), in_one_request=True
        )
        try:
            steps = [lambda: self._require_readable(made.name), lambda: self._delete_expired_probes(made)]
            parallel_map(lambda step: step(), steps, workers=len(steps))
        finally:
            self._delete_probe(made.name)
        return list(problems.warnings)

    def _require_readable(self, key: str) -> None:
        if self._bucket.describe(key) is None:
            raise StorageError(f"{self._bucket.uri(key)} was created but is missing; check the store, and run again")

    def _delete_expired_probes(self, made: Resource) -> None:
        """Delete probe objects of killed commands: those that are much older, by the store's clock."""
        for page in self._bucket.pages(self._key(_PROBE)):
            for name in page.names[:_MAX_EXPIRED_PROBES]:
                other = self._bucket.describe(name) if name != made.name else None
                if other and other.created and made.created and made.created - other.created > _PROBE_EXPIRY:
                    self._bucket.delete(name)

    def _delete_probe(self, key: str) -> None:
        try:
            self._bucket.delete(key)
        except StoreRefused as error:
            raise StoreRefused(f"{error}; the empty object {self._bucket.uri(key)} is left behind") from error

    def _put(self, path: str, payload: Payload, *, in_one_request: bool) -> FileStat:
        made = put_object(self._bucket, self._key(path), payload, in_one_request=in_one_request)
        PROCESS_DEADLINE.mark_written()
        return made.stat

    def _read(self, path: str, parts: Parts, begin: int, size: int | None) -> FileStat:
        self._read_parts(path, parts.take, begin, size)
        return parts.stat(size, source=f"{self.uri}/{path}")

    def _read_parts(self, path: str, take: Callable[[int, bytes], None], begin: int, size: int | None) -> None:
        try:
            read_parts(self._bucket, self._key(path), take, begin=begin, size=size, part_bytes=_PART_BYTES)
        except FileNotFoundError as error:
            raise self._missing(path) from error

    def _missing(self, path: str) -> FileMissing:
        return FileMissing(f"{self.uri}/{path} does not exist")

    def _refuse_unreadable(self, path: str, data: bytes) -> None:
        if self._guarded:
            refuse_unreadable(f"{self.uri}/{path}", data)

    def _is_listed(self, path: str) -> bool:
        """Whether listings include a name. Names that are refused belong to someone else."""
        return not self._guarded or is_inside(path)

    def _key(self, path: str) -> str:
        if self._guarded:
            require_inside(path, root=self.uri)
        return f"{self._prefix}/{path}".strip("/")

    def _below(self, folder: str) -> str:
        key = self._key(folder)
        return f"{key}/" if key else ""

    def _path(self, key: str) -> str:
        return key[len(self._prefix) :].lstrip("/") if self._prefix else key
