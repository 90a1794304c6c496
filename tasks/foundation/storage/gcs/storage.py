"""gs://: the store of runs that machines come and go on."""

from collections.abc import Iterator
from pathlib import Path

from tasks.foundation.errors import FileAlreadyThere, FileMissing, StorageError, StoreRefused
from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.checksum import checksum_file
from tasks.foundation.storage.copying import copy_blocks, local_target, side_by_side
from tasks.foundation.storage.gcs.objects import Bucket, stored
from tasks.foundation.storage.gcs.patience import Patience
from tasks.foundation.storage.gcs.uploading import Upload

# So many files at a time, and so much of each in memory: what a checkpoint of any size takes is the product, twice.
_TRANSFERS = 8
_PART_BYTES = 8 << 20
_PROBE = ".probe"  # no run has such a name


class CloudStorage:
    """Objects below a prefix of a bucket.

    Nothing is kept of what was listed or read before: every question goes to the store, which is strongly consistent.
    """

    def __init__(self, bucket: str, prefix: str, patience: Patience | None = None) -> None:
        """Asks nobody yet.

        Args:
            bucket: its name.
            prefix: without slashes at its ends; may be empty.
            patience: how long to wait for answers; left out: as the environment says.
        """
        self._bucket = Bucket(bucket, patience or Patience.of_environment())
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
        return CloudStorage(self._bucket.name, self._key(folder), self._bucket.patience)

    def hurried(self, seconds: float) -> "CloudStorage":
        """See `Storage.hurried`."""
        return CloudStorage(self._bucket.name, self._prefix, self._bucket.patience.hurried(seconds))

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        try:
            return self._bucket.read(self._key(path))
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
        return stored(description)

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
            for item in page.get("items", ()):
                if not item["name"].endswith("/"):  # the console's mark for an empty folder
                    yield self._path(item["name"])

    def folders(self, folder: str) -> Iterator[str]:
        """See `Storage.folders`."""
        for page in self._bucket.pages(self._below(folder), delimiter="/"):
            for prefix in page.get("prefixes", ()):
                yield self._path(prefix.rstrip("/"))

    def delete(self, folder: str) -> None:
        """See `Storage.delete`."""
        below = [item["name"] for page in self._bucket.pages(self._below(folder)) for item in page.get("items", ())]
        # What is named alike and is no folder.
        side_by_side(self._bucket.delete, [*below, *([self._key(folder)] if folder else [])], workers=_TRANSFERS)

    def probe(self) -> list[str]:
        """See `Storage.probe`. Makes a small object and deletes it: no other question is answered so truly."""
        settings = self._bucket.settings() or {}
        retention = settings.get("retentionPolicy")
        if retention is not None:
            raise StoreRefused(
                f"{self.uri}: its bucket keeps every object for {retention.get('retentionPeriod', '?')} seconds "
                "(retention policy), and Baton replaces and deletes objects; use a bucket without one: gcloud storage "
                f"buckets create gs://NAME, or gcloud storage buckets update gs://{self._bucket.name} "
                "--clear-retention-period"
            )
        key = self._key(_PROBE)
        self._bucket.put(key, b"")
        try:
            self._bucket.delete(key)
        except StoreRefused as fault:
            raise StoreRefused(f"{fault}; the empty object {self._bucket.uri(key)} is left behind") from fault
        if not settings.get("versioning", {}).get("enabled"):
            return []
        kept = f"gs://{self._bucket.name} keeps old versions of objects, so what Baton deletes is still paid for"
        return [f"{kept}: set the lifecycle rule of deploy/README.md"]

    def _parts(self, path: str, begin: int, size: int | None) -> Iterator[bytes]:
        """A file, or `size` bytes of it, a part at a time; fewer where it ends."""
        end = None if size is None else begin + size
        while end is None or begin < end:
            wanted = _PART_BYTES if end is None else min(_PART_BYTES, end - begin)
            try:
                data, whole = self._bucket.read_part(self._key(path), begin, wanted)
            except FileNotFoundError as fault:
                raise self._missing(path) from fault
            if data:
                yield data
            begin += len(data)
            if begin >= whole:
                return

    def _missing(self, path: str) -> FileMissing:
        return FileMissing(f"{self.uri}/{path} is not there")

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}".strip("/")

    def _below(self, folder: str) -> str:
        key = self._key(folder)
        return f"{key}/" if key else ""

    def _path(self, key: str) -> str:
        return key[len(self._prefix) :].lstrip("/") if self._prefix else key
