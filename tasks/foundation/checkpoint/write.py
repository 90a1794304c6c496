"""Write a snapshot into a run's home: TensorFlow's files first, the manifest last.

A checkpoint whose manifest is there is *staged*: all of its files are complete. A log entry makes it *committed*, see
`commit.py`.
"""

from pathlib import Path

import tensorflow as tf

from tasks.foundation.checkpoint.snapshot import Snapshot
from tasks.foundation.checkpoint.verify import manifest_digest
from tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, FileRecord, checkpoint_folder
from tasks.foundation.errors import FileMissing, StateMismatch, StorageError
from tasks.foundation.runlog.commits import stale_writer
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.state.digest import digest_of
from tasks.foundation.state.layout import stored_name
from tasks.foundation.state.temporary_space import temporary_folder_errors
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.parallel import parallel_map
from tasks.foundation.storage.temporary_files import temporary_folder

PREFIX = "ckpt"
# Shards of at most this size are uploaded and downloaded side by side.
_SHARD_BYTES = 64 << 20


def write_snapshot(snapshot: Snapshot, home: Storage, *, base: int, attempt: str) -> CheckpointRef:
    """Write a snapshot, upload its files, read them back, and write the manifest.

    Args:
        snapshot: what to write.
        home: the run's home.
        base: number of the log entry that the work started from.
        attempt: the writer, a uuid4.

    Returns:
        The staged checkpoint.

    Raises:
        StaleWriter: another writer moved the tip first, and deleted what was being staged.
        StorageError: the store or the temporary folder failed, or the store holds other bytes than were sent.
        RunLogError: the run's log is gone.
    """
    # An upload must not recreate a home that was moved, or whose disk is not mounted.
    RunLog(home).entry(base)
    try:
        return _write(snapshot, home, base=base, attempt=attempt)
    except FileMissing as fault:
        # A writer that moves the tip deletes what others have staged. The store is not at fault then.
        log = RunLog(home)
        head = log.head()
        if head is None or head.base == base:
            raise
        raise stale_writer(log, head, step=snapshot.step, base=base) from fault


def _write(snapshot: Snapshot, home: Storage, *, base: int, attempt: str) -> CheckpointRef:
    step = snapshot.step
    folder = checkpoint_folder(step=step, base=base, attempt=attempt)
    options = tf.train.CheckpointOptions(
        experimental_io_device=snapshot.io_device,
        experimental_sharding_callback=tf.train.experimental.MaxShardSizePolicy(max_shard_size=_SHARD_BYTES),
    )
    with temporary_folder_errors(f"step {step}"), temporary_folder("baton-staging-") as local:
        written = snapshot.checkpoint.write(str(local / PREFIX), options=options)
        files = parallel_map(
            lambda file: _upload(home, file, f"{folder}/{file.name}"), sorted(local.iterdir()), workers=home.transfers
        )
        state_digest = _digest_of_files(written, snapshot.keys)
    manifest = CheckpointManifest(
        step=step,
        base=base,
        attempt=attempt,
        replicas=snapshot.replicas,
        state_digest=state_digest,
        signature=snapshot.signature,
        configured=dict(snapshot.compiled_learning_rates),
        files=tuple(files),
    ).to_json()
    home.create(f"{folder}/manifest.json", manifest)
    return CheckpointRef(
        path=folder,
        step=step,
        base=base,
        attempt=attempt,
        state_digest=state_digest,
        manifest_digest=manifest_digest(manifest),
        size=sum(file.size for file in files) + len(manifest),
    )


def _upload(home: Storage, file: Path, path: str) -> FileRecord:
    sent = home.upload(file, path)
    stored = home.stat(path)
    if stored != sent:
        raise StorageError(
            f"{home.uri}/{path}: sent {sent.size} bytes with crc32c {sent.crc32c}, the store has {stored.size} with "
            f"{stored.crc32c}; run again"
        )
    return FileRecord(name=file.name, size=stored.size, crc32c=stored.crc32c)


def _digest_of_files(prefix: str, keys: tuple[str, ...]) -> str:
    """The state's digest, from the files as they were written; this also proves that TensorFlow wrote every key."""
    reader = tf.train.load_checkpoint(prefix)
    for key in keys:
        if not reader.has_tensor(stored_name(key)):
            raise StateMismatch(f"{prefix}: TensorFlow wrote no {key}; the checkpoint is not used")
    return digest_of(keys, lambda key: reader.get_tensor(stored_name(key)))
