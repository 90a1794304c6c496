"""Do a checkpoint's bytes agree with its manifest, and the manifest with the log?"""

import hashlib

from tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef
from tasks.foundation.errors import DamagedCheckpoint, FileMissing
from tasks.foundation.storage.base import Storage

_READS_BEFORE_A_VERDICT = 2


def read_manifest(home: Storage, ref: CheckpointRef) -> CheckpointManifest:
    """The manifest that `ref` points at.

    Raises:
        DamagedCheckpoint: it is missing, or not the one that was committed.
    """
    path = f"{ref.path}/manifest.json"
    where = f"{home.uri}/{path}"
    try:
        data = home.read(path)
    except FileMissing as fault:
        raise DamagedCheckpoint(f"{where} is missing") from fault
    digest = manifest_digest(data)
    if digest != ref.manifest_digest:
        raise DamagedCheckpoint(f"{where} has sha256 {digest[:12]}…, the log says {ref.manifest_digest[:12]}…")
    return CheckpointManifest.from_json(data, where=where, error=DamagedCheckpoint)


def manifest_digest(data: bytes) -> str:
    """sha256 of a manifest as written."""
    return hashlib.sha256(data).hexdigest()


def check(home: Storage, ref: CheckpointRef) -> CheckpointManifest:
    """Read every byte of a checkpoint once.

    Raises:
        DamagedCheckpoint: naming the file that differs.
        StorageError: the store refused or failed; that says nothing about the bytes.
    """
    manifest = read_manifest(home, ref)
    for file in manifest.files:
        path = f"{ref.path}/{file.name}"
        try:
            stored = home.stat(path)
        except FileMissing as fault:
            raise DamagedCheckpoint(f"{home.uri}/{path} is missing") from fault
        if (stored.size, stored.crc32c) != (file.size, file.crc32c):
            raise DamagedCheckpoint(
                f"{home.uri}/{path} has {stored.size} bytes and crc32c {stored.crc32c}, "
                f"its manifest says {file.size} and {file.crc32c}"
            )
    return manifest


def damage(home: Storage, ref: CheckpointRef) -> str | None:
    """What is wrong with a checkpoint, after two independent reads that both found fault; None if it is whole."""
    verdict = None
    for _ in range(_READS_BEFORE_A_VERDICT):
        try:
            check(home, ref)
        except DamagedCheckpoint as fault:
            verdict = str(fault)
        else:
            return None
    return verdict
