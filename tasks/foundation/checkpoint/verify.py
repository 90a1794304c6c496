"""Verify that a checkpoint's bytes agree with its manifest, and the manifest with the log.

One read that differs may be an error of the network. A file is damaged when a second, independent read differs too, and
the store itself does not report the bytes that were written. Refusals, time-outs and full disks say nothing about the
bytes.

A start reads the files ahead, while the process still imports TensorFlow. Files in a bucket are downloaded into a
temporary folder, and `fetch` takes them from there. For files on this machine, the kernel is asked to read them into
memory. Nothing depends on it: `fetch` verifies every file as if it had read it itself, and reads again whatever is not
there.
"""

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from baton.tasks.foundation.contracts.base import another_version, is_refused_name
from baton.tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, FileRecord, manifest_digest
from baton.tasks.foundation.errors import BatonError, DamagedCheckpoint, FileMissing
from baton.tasks.foundation.storage.interface import FileStat, Storage
from baton.tasks.foundation.storage.local_files import temporary_folder
from baton.tasks.foundation.storage.transfers import damage_of, difference, parallel_map

_MANIFEST_READS = 2


def read_manifest(home: Storage, ref: CheckpointRef) -> CheckpointManifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing, or is not the one that was committed.
        AnotherVersion: it is the one that was committed, and this version of Baton cannot read it.
    """
    path = f"{ref.path}/manifest.json"
    where = f"{home.uri}/{path}"
    reason = ""
    for _ in range(_MANIFEST_READS):
        try:
            data = home.read(path)
        except FileMissing:
            reason = f"{where} is missing"
            continue
        digest = manifest_digest(data)
        if digest == ref.manifest_digest:
            return _parse(data, where)
        reason = f"{where} has sha256 {digest[:12]}…, the log says {ref.manifest_digest[:12]}…"
    raise DamagedCheckpoint(reason)


def _parse(data: bytes, where: str) -> CheckpointManifest:
    """Parse a manifest whose digest is right. It is as it was written, so an error in it is not damage.

    A name that leads out of its folder is: whoever wrote it also wrote the log that has its digest.
    """
    try:
        return CheckpointManifest.from_json(data, where=where, error=DamagedCheckpoint)
    except DamagedCheckpoint as fault:
        if is_refused_name(fault.__cause__):
            raise
        why = f"its digest is the log's, and {str(fault).removeprefix(f'{where}: ')}"
        raise another_version(where, CheckpointManifest, why) from fault


def verify_checkpoint(home: Storage, ref: CheckpointRef) -> CheckpointManifest:
    """Compare every file of a checkpoint with the manifest, once, by what the store reports.

    A local disk reads all bytes to report them. Cloud Storage reports the checksum that it computed on arrival.

    Raises:
        DamagedCheckpoint: names the file that differs.
        AnotherVersion: a newer Baton wrote the manifest.
        StorageError: the store refused or failed; this says nothing about the bytes.
    """
    manifest = read_manifest(home, ref)
    parallel_map(
        lambda file: _compare(home, ref, file, home.stat, compare=difference), manifest.files, workers=home.transfers
    )
    return manifest


def find_damage(home: Storage, ref: CheckpointRef, *, read_bytes: bool = False) -> str | None:
    """Look for damage in a checkpoint; two independent reads must agree on it.

    Args:
        read_bytes: whether to read all bytes, wherever they are. Otherwise as `verify_checkpoint` does.

    Returns:
        What is wrong; None if the checkpoint is whole.

    Raises:
        AnotherVersion: a newer Baton wrote the manifest, which is not damage.
        StorageError: the store refused or failed.
    """
    read = home.checksum if read_bytes else home.stat
    try:
        manifest = read_manifest(home, ref)
        parallel_map(lambda file: _compare(home, ref, file, read), manifest.files, workers=home.transfers)
    except DamagedCheckpoint as fault:
        return str(fault)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedFile:
    """A file that was downloaded before it was needed: where it is, and what the download computed."""

    path: Path
    stat: FileStat


def fetch(
    home: Storage,
    ref: CheckpointRef,
    manifest: CheckpointManifest,
    folder: Path,
    *,
    fetched: Mapping[str, FetchedFile] = {},
) -> None:
    """Put a checkpoint's files into a local folder, side by side, and compare each with the manifest.

    Files on this machine are linked. Others are downloaded, and once more if the first download differs.

    Args:
        folder: an empty local folder, on the disk of `fetched`.
        fetched: files that were downloaded before, by name; they are moved, and count as the first download.

    Raises:
        DamagedCheckpoint: names the file that differs or is missing.
        StorageError: the store or the local disk refused or failed; this says nothing about the bytes.
    """

    def fetch_one(file: FileRecord) -> None:
        target = folder / file.name
        first = [fetched[file.name]] if file.name in fetched else []

        def read(path: str) -> FileStat:
            while first:
                early = first.pop()
                with suppress(OSError):  # deleted meanwhile, as systems do in temporary folders
                    early.path.replace(target)
                    return early.stat
            local = home.local_path(path)
            if local is None:
                return home.download(path, target)
            target.unlink(missing_ok=True)
            target.symlink_to(local)
            return home.checksum(path)

        _compare(home, ref, file, read)

    parallel_map(fetch_one, manifest.files, workers=home.transfers)


def _compare(
    home: Storage,
    ref: CheckpointRef,
    file: FileRecord,
    read: Callable[[str], FileStat],
    *,
    compare: Callable[[Storage, str, FileStat, Callable[[], FileStat]], str | None] = damage_of,
) -> None:
    path = f"{ref.path}/{file.name}"
    fault = compare(home, path, FileStat(size=file.size, crc32c=file.crc32c), lambda: read(path))
    if fault is not None:
        raise DamagedCheckpoint(fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadFiles:
    """What was read: nothing, if the manifest could not be read."""

    manifest: CheckpointManifest | None
    files: dict[str, FetchedFile]

    @property
    def is_whole(self) -> bool:
        if self.manifest is None:
            return False
        written = {file.name: FileStat(size=file.size, crc32c=file.crc32c) for file in self.manifest.files}
        return written == {name: fetched.stat for name, fetched in self.files.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    address: str
    found: "Future[_ReadFiles]"
    folder: ExitStack


class CheckpointPrefetch:
    """The checkpoint that this process reads ahead; at most one."""

    def __init__(self) -> None:
        self._reading: _Reading | None = None

    def begin(self, home: Storage, ref: CheckpointRef) -> None:
        """Begin to read a checkpoint's files. Errors are ignored: the restore meets them again."""
        self.drop()
        folder = ExitStack()
        with suppress(BatonError, OSError):
            manifest = home.local_path(f"{ref.path}/manifest.json")
            if manifest is not None:
                _read_into_memory(manifest.parent)
                return
            local = folder.enter_context(temporary_folder("baton-restoring-"))
            self._reading = _Reading(address=_address(home, ref), found=Future(), folder=folder)
            atexit.register(self.drop)
            # A daemon thread, so that a command that is stopped does not wait for it.
            threading.Thread(
                target=_download, args=(home, ref, local, self._reading.found), name="baton-prefetch", daemon=True
            ).start()

    def take(self, home: Storage, ref: CheckpointRef) -> dict[str, FetchedFile]:
        """Wait for the files of a checkpoint that were read ahead.

        Returns:
            What was downloaded, by file name; empty for another checkpoint. `drop` deletes the files.
        """
        reading = self._reading_of(home, ref)
        return {} if reading is None else reading.found.result().files

    def manifest(self, home: Storage, ref: CheckpointRef) -> CheckpointManifest | None:
        """Wait for the manifest of a checkpoint that was read ahead, and return it; None for another checkpoint."""
        reading = self._reading_of(home, ref)
        return None if reading is None else reading.found.result().manifest

    def looks_whole(self, home: Storage, ref: CheckpointRef) -> bool:
        """Whether a checkpoint is being read ahead, or was and agrees with its manifest. Does not wait."""
        reading = self._reading_of(home, ref)
        return reading is not None and (not reading.found.done() or reading.found.result().is_whole)

    def _reading_of(self, home: Storage, ref: CheckpointRef) -> _Reading | None:
        reading = self._reading
        return None if reading is None or reading.address != _address(home, ref) else reading

    def drop(self) -> None:
        """Delete the files that were read ahead."""
        reading, self._reading = self._reading, None
        if reading is not None:
            atexit.unregister(self.drop)
            with suppress(OSError):
                reading.folder.close()


def _address(home: Storage, ref: CheckpointRef) -> str:
    return f"{home.uri}/{ref.path}#{ref.manifest_digest}"


def _read_into_memory(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def _download(home: Storage, ref: CheckpointRef, folder: Path, done: "Future[_ReadFiles]") -> None:
    found: dict[str, FetchedFile] = {}
    manifest = None

    def download(file: FileRecord) -> None:
        target = folder / file.name
        with suppress(BatonError, OSError):
            found[file.name] = FetchedFile(path=target, stat=home.download(f"{ref.path}/{file.name}", target))

    try:
        with suppress(BatonError, OSError):
            manifest = read_manifest(home, ref)
            parallel_map(download, manifest.files, workers=home.transfers)
    finally:
        done.set_result(_ReadFiles(manifest=manifest, files=found))


# A process restores the checkpoint that it starts from once.
PREFETCHED_CHECKPOINT = CheckpointPrefetch()
