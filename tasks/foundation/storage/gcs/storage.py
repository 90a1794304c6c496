"""gs://: the store of runs that machines come and go on."""

import uuid
from collections.abc import Iterator
from pathlib import Path

from tasks.foundation.errors import FileAlreadyThere, FileMissing, StorageError, StoreRefused
from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.checksum import checksum_file
from tasks.foundation.storage.download import copy_blocks, local_target, side_by_side
from tasks.foundation.storage.gcs import media
from tasks.foundation.storage.gcs.bucket_settings import FIELDS, hurts
from tasks.foundation.storage.gcs.objects import Bucket
from tasks.foundation.storage.gcs.refusals import packed
from tasks.foundation.storage.gcs.response_shapes import Resource
from tasks.foundation.storage.gcs.resumable_upload import Upload
from tasks.foundation.storage.gcs.retrying import RetryPolicy
from tasks.foundation.storage.path_guard import is_inside, require_inside

# So many files at a time, and so much of each in memory: what a checkpoint of any size takes is the product, twice.
_TRANSFERS = 8
_PART_BYTES = 8 << 20
_PROBE = ".probe"  # no run has such a name
_LEFT_BEHIND_SECONDS, _MOST_LEFTOVERS = 3600.0, 20


class CloudStorage:
    """Objects below a prefix of a bucket.

    Nothing is kept of what was listed or read before: every question goes to the store, which is strongly consistent.
    """

    def __init__(self, bucket: str, prefix: str, patience: RetryPolicy | None = None, *, fenced: bool = True) -> None:
        """Asks nobody yet.

        Args:
            bucket: its name.
            prefix: without slashes at its ends; may be empty.
            patience: how long to wait for answers; left out: as the environment says.
            fenced: whether names that are no plain paths are refused, see `fence.py`.
        """
        self._fenced = fenced
        self._bucket = Bucket(bucket, patience or RetryPolicy.of_environment())
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
        """The same, one folder down."""
        return CloudStorage(self._bucket.name, self._key(folder), self._bucket.patience, fenced=self._fenced)

    def with_deadline(self, seconds: float) -> "CloudStorage":
        """See `Storage.with_deadline`."""
        patience = self._bucket.patience.with_deadline(seconds)
        return CloudStorage(self._bucket.name, self._prefix, patience, fenced=self._fenced)

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        try:
            return media.read(self._bucket, self._key(path))
        except FileNotFoundError as fault:
            raise self._missing(path) from fault

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        return self._bucket.describe(self._key(path)) is not None

    def create(self, path: str, data: bytes) -> None:
        """See `Storage.create`."""
        try:
            self._bucket.create(self._key(path), data)
        except FileExistsError as fault:
            raise FileAlreadyThere(f"{self.uri}/{path} exists already") from fault

    def write(self, path: str, data: bytes) -> None:
        """See `Storage.write`."""
        self._bucket.put(self._key(path), data)

    def upload(self, source: Path, path: str) -> Stored:
        """See `Storage.upload`. Memory does not grow with the file."""
        try:
            sent = checksum_file(source)
            small = source.read_bytes() if sent.size <= _PART_BYTES else None
        except OSError as fault:
            raise StorageError(f"{source}: cannot be read ({fault.strerror}); see to its disk and run again") from fault
        if small is not None:
            self._bucket.put(self._key(path), small)
        else:
            Upload(self._bucket, self._key(path), source, sent).run()
        return sent

    def copy(self, path: str, target: str) -> None:
        """See `Storage.copy`. The bytes do not leave the bucket."""
        try:
            self._bucket.copy(self._key(path), self._key(target))
        except FileNotFoundError as fault:
            raise self._missing(path) from fault

    def stat(self, path: str) -> Stored:
        """What the store computed when the bytes arrived, and keeps them by; no byte is read."""
        description = self._bucket.describe(self._key(path))
        if description is None:
            raise self._missing(path)
        if description.encoding:
            raise packed(f"{self.uri}/{path}", description.encoding)
        return description.stored

    def checksum(self, path: str, *, begin: int = 0, size: int | None = None) -> Stored:
        """See `Storage.checksum`."""
        return copy_blocks(self._parts(path, begin, size), None, size, where=f"{self.uri}/{path}")

    def local_path(self, path: str) -> Path | None:  # noqa: ARG002 - nothing of it is on this machine
        """See `Storage.local_path`."""
        return None

    def download(self, path: str, target: Path, *, begin: int = 0, size: int | None = None) -> Stored:
        """See `Storage.download`."""
        with local_target(target) as file:
            return copy_blocks(self._parts(path, begin, size), file, size, where=f"{self.uri}/{path}")

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        """See `Storage.read_range`."""
        return b"".join(self._parts(path, begin, size))

    def files(self, folder: str) -> Iterator[str]:
        """See `Storage.files`."""
        for page in self._bucket.pages(self._below(folder)):
            for name in page.names:
                path = self._path(name)
                # A slash at its end is the console's mark for an empty folder.
                if not name.endswith("/") and self._lists(path):
                    yield path

    def folders(self, folder: str) -> Iterator[str]:
        """See `Storage.folders`."""
        for page in self._bucket.pages(self._below(folder), delimiter="/"):
            yield from filter(self._lists, (self._path(prefix.rstrip("/")) for prefix in page.prefixes))

    def delete(self, folder: str) -> None:
        """See `Storage.delete`."""
        below = [name for page in self._bucket.pages(self._below(folder)) for name in page.names]
        # What is named alike and is no folder.
        side_by_side(self._bucket.delete, [*below, *([self._key(folder)] if folder else [])], workers=_TRANSFERS)

    def probe(self) -> list[str]:
        """See `Storage.probe`. Makes a small object and deletes it: no other question is answered so truly."""
        settings = self._bucket.settings(FIELDS) or {}
        found = hurts(settings, bucket=f"gs://{self._bucket.name}", prefix=self._prefix)
        if found.refusals:
            raise StoreRefused(f"{self.uri}: {'; '.join(found.refusals)}")
        # Of its own name, so that commands that begin together do not delete each other's.
        key = self._key(f"{_PROBE}-{uuid.uuid4().hex}")
        self._bucket.put(key, b"")
        try:
            made = self._bucket.describe(key)
            if made is None:
                raise StorageError(
                    f"{self._bucket.uri(key)} was made and is not there; see to the store, and run again"
                )
            self._clean_up(made)
        finally:
            self._delete_probe(key)
        return list(found.notes)

    def _clean_up(self, made: Resource) -> None:
        """Delete what killed commands left behind: objects that are much older, by the store's own clock."""
        for page in self._bucket.pages(self._key(_PROBE)):
            for name in page.names[:_MOST_LEFTOVERS]:
                other = self._bucket.describe(name) if name != made.name else None
                if other is not None and other.age_before(made) > _LEFT_BEHIND_SECONDS:
                    self._bucket.delete(name)

    def _delete_probe(self, key: str) -> None:
        try:
            self._bucket.delete(key)
        except StoreRefused as fault:
            raise StoreRefused(f"{fault}; the empty object {self._bucket.uri(key)} is left behind") from fault

    def _parts(self, path: str, begin: int, size: int | None) -> Iterator[bytes]:
        """A file, or `size` bytes of it, a part at a time; fewer where it ends."""
        end = None if size is None else begin + size
        while end is None or begin < end:
            wanted = _PART_BYTES if end is None else min(_PART_BYTES, end - begin)
            try:
                data, whole = media.read_part(self._bucket, self._key(path), begin, wanted)
            except FileNotFoundError as fault:
                raise self._missing(path) from fault
            if data:
                yield data
            begin += len(data)
            if begin >= whole:
                return

    def _missing(self, path: str) -> FileMissing:
        return FileMissing(f"{self.uri}/{path} is not there")

    def _lists(self, path: str) -> bool:
        """Whether a name that was found is told of: nothing of Baton's has a name that is refused."""
        return not self._fenced or is_inside(path)

    def _key(self, path: str) -> str:
        if self._fenced:
            require_inside(path, root=self.uri)
        return f"{self._prefix}/{path}".strip("/")

    def _below(self, folder: str) -> str:
        key = self._key(folder)
        return f"{key}/" if key else ""

    def _path(self, key: str) -> str:
        return key[len(self._prefix) :].lstrip("/") if self._prefix else key
