"""gs://: objects below a prefix of a bucket on Cloud Storage."""

import uuid
from collections.abc import Iterator
from pathlib import Path

from tasks.foundation.errors import FileAlreadyThere, FileMissing, StorageError, StoreRefused
from tasks.foundation.storage.base import FileStat
from tasks.foundation.storage.checksum import checksum_file
from tasks.foundation.storage.download import copy_blocks, local_target
from tasks.foundation.storage.gcs import media
from tasks.foundation.storage.gcs.bucket_settings import FIELDS, check_settings
from tasks.foundation.storage.gcs.objects import Bucket
from tasks.foundation.storage.gcs.refusals import compressed_object
from tasks.foundation.storage.gcs.response_shapes import Resource
from tasks.foundation.storage.gcs.resumable_upload import Upload
from tasks.foundation.storage.gcs.retrying import RetryPolicy
from tasks.foundation.storage.parallel import parallel_map
from tasks.foundation.storage.path_guard import is_inside, require_inside

# The number of parallel transfers and the bytes of each in memory: a checkpoint of any size takes twice the product.
_TRANSFERS = 8
_PART_BYTES = 8 << 20
_PROBE = ".probe"  # not a valid name of a run
_PROBE_EXPIRY_SECONDS, _MAX_EXPIRED_PROBES = 3600.0, 20


class CloudStorage:
    """Objects below a prefix of a bucket.

    Nothing is cached: every call asks the store, which is strongly consistent.
    """

    def __init__(self, bucket: str, prefix: str, policy: RetryPolicy | None = None, *, guarded: bool = True) -> None:
        """Create the storage without sending a request.

        Args:
            bucket: its name.
            prefix: without slashes at its ends; may be empty.
            policy: how long to wait for the store; left out: from the environment.
            guarded: whether to refuse names that are not plain relative paths, see `path_guard`.
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
        try:
            return media.read(self._bucket, self._key(path))
        except FileNotFoundError as error:
            raise self._missing(path) from error

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        return self._bucket.describe(self._key(path)) is not None

    def create(self, path: str, data: bytes) -> None:
        """See `Storage.create`."""
        try:
            self._bucket.create(self._key(path), data)
        except FileExistsError as error:
            raise FileAlreadyThere(f"{self.uri}/{path} already exists") from error

    def write(self, path: str, data: bytes) -> None:
        """See `Storage.write`."""
        self._bucket.put(self._key(path), data)

    def upload(self, source: Path, path: str) -> FileStat:
        """See `Storage.upload`. Memory does not grow with the file."""
        try:
            sent = checksum_file(source)
            small = source.read_bytes() if sent.size <= _PART_BYTES else None
        except OSError as error:
            raise StorageError(f"{source}: cannot read ({error.strerror}); check its disk and run again") from error
        if small is not None:
            self._bucket.put(self._key(path), small)
        else:
            Upload(self._bucket, self._key(path), source, sent).run()
        return sent

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
        return copy_blocks(self._parts(path, begin, size), None, size, source=f"{self.uri}/{path}")

    def local_path(self, _path: str) -> Path | None:
        """See `Storage.local_path`."""
        return None

    def download(self, path: str, target: Path, *, begin: int = 0, size: int | None = None) -> FileStat:
        """See `Storage.download`."""
        with local_target(target) as file:
            return copy_blocks(self._parts(path, begin, size), file, size, source=f"{self.uri}/{path}")

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        """See `Storage.read_range`."""
        return b"".join(self._parts(path, begin, size))

    def files(self, folder: str) -> Iterator[str]:
        """See `Storage.files`."""
        for page in self._bucket.pages(self._below(folder)):
            for name in page.names:
                path = self._path(name)
                # The Cloud console marks an empty folder with a name that ends with a slash.
                if not name.endswith("/") and self._is_listed(path):
                    yield path

    def folders(self, folder: str) -> Iterator[str]:
        """See `Storage.folders`."""
        for page in self._bucket.pages(self._below(folder), delimiter="/"):
            yield from filter(self._is_listed, (self._path(prefix.rstrip("/")) for prefix in page.prefixes))

    def delete(self, folder: str) -> None:
        """See `Storage.delete`."""
        below = [name for page in self._bucket.pages(self._below(folder)) for name in page.names]
        # An object may have the folder's own name.
        parallel_map(self._bucket.delete, [*below, *([self._key(folder)] if folder else [])], workers=_TRANSFERS)

    def probe(self) -> list[str]:
        """See `Storage.probe`. Creates and deletes an object, because nothing else shows all permissions."""
        settings = self._bucket.settings(FIELDS) or {}
        problems = check_settings(settings, bucket=f"gs://{self._bucket.name}", prefix=self._prefix)
        if problems.errors:
            raise StoreRefused(f"{self.uri}: {'; '.join(problems.errors)}")
        # A unique name, so that commands that start together do not delete each other's object.
        key = self._key(f"{_PROBE}-{uuid.uuid4().hex}")
        self._bucket.put(key, b"")
        try:
            made = self._bucket.describe(key)
            if made is None:
                raise StorageError(
                    f"{self._bucket.uri(key)} was created but is missing; check the store, and run again"
                )
            self._delete_expired_probes(made)
        finally:
            self._delete_probe(key)
        return list(problems.warnings)

    def _delete_expired_probes(self, made: Resource) -> None:
        """Delete probe objects of killed commands: those that are much older, by the store's clock."""
        for page in self._bucket.pages(self._key(_PROBE)):
            for name in page.names[:_MAX_EXPIRED_PROBES]:
                other = self._bucket.describe(name) if name != made.name else None
                if other is not None and other.seconds_before(made) > _PROBE_EXPIRY_SECONDS:
                    self._bucket.delete(name)

    def _delete_probe(self, key: str) -> None:
        try:
            self._bucket.delete(key)
        except StoreRefused as error:
            raise StoreRefused(f"{error}; the empty object {self._bucket.uri(key)} is left behind") from error

    def _parts(self, path: str, begin: int, size: int | None) -> Iterator[bytes]:
        """A file, or `size` bytes of it, in parts; fewer bytes if it ends before."""
        end = None if size is None else begin + size
        while end is None or begin < end:
            part_size = _PART_BYTES if end is None else min(_PART_BYTES, end - begin)
            try:
                data, whole = media.read_range(self._bucket, self._key(path), begin, part_size)
            except FileNotFoundError as error:
                raise self._missing(path) from error
            if data:
                yield data
            begin += len(data)
            if begin >= whole:
                return

    def _missing(self, path: str) -> FileMissing:
        return FileMissing(f"{self.uri}/{path} does not exist")

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
