"""Reads the files of a checkpoint while the process still imports TensorFlow, which restores it later.

Files in a bucket are downloaded into a temporary folder, and `verify.fetch` takes them from there. For files on this
machine, the kernel is asked to read them into memory. Nothing depends on it: `fetch` verifies every file as if it had
read it itself, and reads again whatever is not there.
"""

import atexit
import os
import threading
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.foundation.checkpoint.verify import FetchedFile, read_manifest
from tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, FileRecord
from tasks.foundation.errors import BatonError
from tasks.foundation.storage.base import FileStat, Storage
from tasks.foundation.storage.local_files import temporary_folder
from tasks.foundation.storage.transfers import parallel_map


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
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
    found: "Future[_Found]"
    folder: ExitStack


class CheckpointPrefetch:
    """The checkpoint that this process reads ahead; at most one."""

    def __init__(self) -> None:
        self._reading: _Reading | None = None

    def begin(self, home: Storage, ref: CheckpointRef) -> None:
        """Begin to read a checkpoint's files. Errors are ignored: the restore meets them again.

        Args:
            home: the run's home.
            ref: the checkpoint.
        """
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

        Args:
            home: the run's home.
            ref: the checkpoint.

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


def _download(home: Storage, ref: CheckpointRef, folder: Path, done: "Future[_Found]") -> None:
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
        done.set_result(_Found(manifest=manifest, files=found))


# A process restores the checkpoint that it starts from once.
PREFETCHED_CHECKPOINT = CheckpointPrefetch()
