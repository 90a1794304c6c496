"""Do a checkpoint's bytes agree with its manifest, and the manifest with the log?

One bad read may be the wire's; only a second, independent one that differs too is the file's, and only where the store
itself does not say that it has the file as it was written. Refusals, time-outs and full disks say nothing about the
bytes.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tasks.foundation.contracts.base import another_version
from tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, FileRecord
from tasks.foundation.errors import DamagedCheckpoint, FileMissing
from tasks.foundation.storage.base import Storage, Stored
from tasks.foundation.storage.download import side_by_side
from tasks.foundation.storage.transit_damage import require_damage_in_store

_READS_BEFORE_A_VERDICT = 2


def read_manifest(home: Storage, ref: CheckpointRef) -> CheckpointManifest:
    """The manifest that `ref` points at.

    Raises:
        DamagedCheckpoint: it is missing, or not the one that was committed.
        AnotherVersion: it is the one that was committed, and this version cannot read it.
    """
    path = f"{ref.path}/manifest.json"
    where = f"{home.uri}/{path}"
    verdict = ""
    for _ in range(_READS_BEFORE_A_VERDICT):
        try:
            data = home.read(path)
        except FileMissing:
            verdict = f"{where} is missing"
            continue
        digest = manifest_digest(data)
        if digest == ref.manifest_digest:
            return _parsed(data, where)
        verdict = f"{where} has sha256 {digest[:12]}…, the log says {ref.manifest_digest[:12]}…"
    raise DamagedCheckpoint(verdict)


def _parsed(data: bytes, where: str) -> CheckpointManifest:
    """A manifest whose digest is the log's. It is as it was written, so a fault in it is no damage."""
    try:
        return CheckpointManifest.from_json(data, where=where, error=DamagedCheckpoint)
    except DamagedCheckpoint as fault:
        why = f"its digest is the log's, and {str(fault).removeprefix(f'{where}: ')}"
        raise another_version(where, CheckpointManifest, why) from fault


def manifest_digest(data: bytes) -> str:
    """sha256 of a manifest as written."""
    return hashlib.sha256(data).hexdigest()


def check(home: Storage, ref: CheckpointRef) -> CheckpointManifest:
    """Ask the store about every file of a checkpoint, once.

    A local disk answers by reading all bytes, Cloud Storage from what it computed when they arrived.

    Raises:
        DamagedCheckpoint: naming the file that differs.
        AnotherVersion: a newer Baton wrote the manifest.
        StorageError: the store refused or failed; that says nothing about the bytes.
    """
    manifest = read_manifest(home, ref)
    side_by_side(lambda file: _compare(home, ref, file, home.stat), manifest.files, workers=home.transfers)
    return manifest


def damage(home: Storage, ref: CheckpointRef, *, read: bool = False) -> str | None:
    """What is wrong with a checkpoint, after two independent looks that both found fault; None if it is whole.

    Args:
        home: the run's home.
        ref: the checkpoint.
        read: read all bytes, wherever they are; otherwise the store is asked, as in `check`.

    Raises:
        AnotherVersion: a newer Baton wrote the manifest; that is no damage.
    """
    ask = home.checksum if read else home.stat
    try:
        manifest = read_manifest(home, ref)
        side_by_side(lambda file: _compare_twice(home, ref, file, ask), manifest.files, workers=home.transfers)
    except DamagedCheckpoint as fault:
        return str(fault)
    return None


def fetch(home: Storage, ref: CheckpointRef, manifest: CheckpointManifest, folder: Path) -> None:
    """Have a checkpoint's files in a local folder, side by side, each compared with the manifest once it is there.

    Files of this machine are linked to; others are downloaded, and once more if what arrived differs.

    Args:
        home: the run's home.
        ref: the checkpoint.
        manifest: its manifest.
        folder: an empty folder of this machine.

    Raises:
        DamagedCheckpoint: naming the file that differs, or is missing.
        StorageError: the store or the local disk refused or failed; that says nothing about the bytes.
    """

    def fetch_one(file: FileRecord) -> None:
        target = folder / file.name

        def arrive(path: str) -> Stored:
            there = home.local_path(path)
            if there is None:
                return home.download(path, target)
            target.unlink(missing_ok=True)
            target.symlink_to(there)
            return home.checksum(path)

        _compare_twice(home, ref, file, arrive)

    side_by_side(fetch_one, manifest.files, workers=home.transfers)


def _compare_twice(home: Storage, ref: CheckpointRef, file: FileRecord, ask: Callable[[str], Stored]) -> None:
    try:
        _compare(home, ref, file, ask)
    except DamagedCheckpoint:
        try:
            _compare(home, ref, file, ask)
        except DamagedCheckpoint:
            with suppress(FileMissing):  # and what is missing is damaged
                require_damage_in_store(home, f"{ref.path}/{file.name}", Stored(size=file.size, crc32c=file.crc32c))
            raise


def _compare(home: Storage, ref: CheckpointRef, file: FileRecord, ask: Callable[[str], Stored]) -> None:
    path = f"{ref.path}/{file.name}"
    try:
        found = ask(path)
    except FileMissing as fault:
        raise DamagedCheckpoint(f"{home.uri}/{path} is missing") from fault
    if (found.size, found.crc32c) != (file.size, file.crc32c):
        raise DamagedCheckpoint(
            f"{home.uri}/{path} has {found.size} bytes and crc32c {found.crc32c}, "
            f"its manifest says {file.size} and {file.crc32c}"
        )
