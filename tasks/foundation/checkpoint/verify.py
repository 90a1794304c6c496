"""Verify that a checkpoint's bytes agree with its manifest, and the manifest with the log.

One read that differs may be an error of the network. A file is damaged when a second, independent read differs too, and
the store itself does not report the bytes that were written. Refusals, time-outs and full disks say nothing about the
bytes.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.foundation.contracts.base import another_version
from tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, FileRecord
from tasks.foundation.contracts.safe_names import is_refused_name
from tasks.foundation.errors import DamagedCheckpoint, FileMissing
from tasks.foundation.storage.base import FileStat, Storage
from tasks.foundation.storage.transfers import damage_of, difference, parallel_map

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


def manifest_digest(data: bytes) -> str:
    """The sha256 of a manifest's bytes."""
    return hashlib.sha256(data).hexdigest()


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
        home: the run's home.
        ref: the checkpoint.
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
        home: the run's home.
        ref: the checkpoint.
        manifest: its manifest.
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
