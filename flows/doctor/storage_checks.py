"""Check that the storage can be reached and written to, and measure how long a commit and a restore take."""

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.doctor.finding import Finding
from flows.run import storage_of
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.parallel import parallel_map
from tasks.foundation.storage.temporary_files import DOCTOR_PREFIX, temporary_folder
from tasks.foundation.telemetry.formatting import duration_words, size_words

if TYPE_CHECKING:
    from tasks.foundation.state.train_state import TrainState

# Not a valid run name.
_PREFIX = ".baton-doctor-"
_PROBE = b"written by baton doctor, which deletes it again\n"
# Only this part of a checkpoint is transferred; the rest is assumed to be as fast.
_SENT_BYTES = 256 << 20
# The size of a shard in a commit.
_SHARD_BYTES = 64 << 20
# TensorFlow stores the object graph under this key.
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCost:
    """The measured cost of a checkpoint.

    Attributes:
        commit_seconds: time to write the checkpoint on this machine, upload it, and read it back.
        restore_seconds: time to download and restore the checkpoint.
        state_bytes: size of the checkpoint's files.
    """

    commit_seconds: float
    restore_seconds: float
    state_bytes: int


def check_storage(run: RunFile) -> Finding:
    """Write, read and delete a small file below the storage root; the finding's value is the `Storage`.

    Raises:
        InvalidInput: the address is not a supported storage.
        StorageError: the storage refuses or fails.
    """
    storage = storage_of(run)
    notes = storage.probe()
    with _scratch(storage) as scratch:
        scratch.create("file", _PROBE)
        if scratch.read("file") != _PROBE:
            raise StorageError(f"{scratch.uri}/file: read back other bytes than were written; check this storage")
    text = f"{storage.uri}: wrote, read and deleted a file"
    # The value is a new object, because this one has cached a folder that no longer exists.
    value = storage_of(run)
    if notes:
        return Finding(check="storage", verdict="warn", text=text, remedy="; ".join(notes), value=value)
    return Finding(check="storage", verdict="pass", text=text, value=value)


def check_commit(storage: Storage, state: "TrainState") -> Finding:
    """Measure a commit and a restore of the train state; the finding's value is the `CommitCost`.

    The files go to a temporary folder of the storage root, beside the runs, and are then deleted. Only the first
    256 MiB of a large state are transferred.

    Args:
        storage: the storage root.
        state: the `TrainState`; it keeps its values.
    """
    import tensorflow as tf

    from tasks.foundation.state.digest import digest_of
    from tasks.foundation.state.layout import tree_of

    checkpoint = tf.train.Checkpoint(**tree_of({leaf.path: leaf.variable for leaf in state.leaves}))
    policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=_SHARD_BYTES)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
    with temporary_folder(DOCTOR_PREFIX) as folder, _scratch(storage) as scratch:
        began = time.monotonic()
        written = checkpoint.write(str(folder / "ckpt"), options=options)
        reader = tf.train.load_checkpoint(written)
        digest_of((key for key in reader.get_variable_to_shape_map() if key != _GRAPH), reader.get_tensor)
        here = time.monotonic() - began
        files = sorted(folder.iterdir())
        size = sum(file.stat().st_size for file in files)
        chosen = _first(files, _SENT_BYTES)
        share = max(1, size) / max(1, sum(file.stat().st_size for file in chosen))
        began = time.monotonic()
        parallel_map(lambda file: scratch.upload(file, file.name), chosen, workers=storage.transfers)
        there = (time.monotonic() - began) * share
        with temporary_folder(DOCTOR_PREFIX) as fetched:
            began = time.monotonic()
            parallel_map(
                lambda file: scratch.download(file.name, fetched / file.name), chosen, workers=storage.transfers
            )
            back = (time.monotonic() - began) * share
        began = time.monotonic()
        checkpoint.read(written).assert_existing_objects_matched()
        back += time.monotonic() - began
    cost = CommitCost(commit_seconds=here + there, restore_seconds=back, state_bytes=size)
    sampled = "" if share == 1 else f" ({size_words(size / share)} of it measured, the rest assumed as fast)"
    text = (
        f"{size_words(size)}{sampled}: {duration_words(cost.commit_seconds)} to commit, "
        f"{duration_words(cost.restore_seconds)} to restore, from this machine"
    )
    return Finding(check="commit", verdict="pass", text=text, value=cost)


def _first(files: list[Path], size: int) -> list[Path]:
    """Return the first files, up to about `size` bytes and at least one."""
    chosen: list[Path] = []
    for file in files:
        if chosen and sum(each.stat().st_size for each in chosen) + file.stat().st_size > size:
            break
        chosen.append(file)
    return chosen


@contextmanager
def _scratch(storage: Storage) -> Iterator[Storage]:
    """Make a temporary folder below the storage root, and delete it afterwards with all parents that it created.

    On a local disk the folder is locked, so that the next `baton doctor` can delete the folder of a killed one.
    """
    missing = _missing_folders(storage)
    name = f"{_PREFIX}{secrets.token_hex(8)}"
    try:
        with ExitStack() as locked:
            if isinstance(storage, LocalStorage):
                with suppress(OSError):  # the storage itself reports why it is not writable
                    storage.root.mkdir(parents=True, exist_ok=True)
                    name = locked.enter_context(temporary_folder(_PREFIX, within=storage.root)).name
            try:
                yield storage.at(name)
            finally:
                with suppress(StorageError):  # an error here must not hide the one that ended the check
                    storage.delete(name)
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _missing_folders(storage: Storage) -> list[Path]:
    """Return the local folders that writing would create: the root and its parents that do not exist yet."""
    if not isinstance(storage, LocalStorage):
        return []
    return [folder for folder in (storage.root, *storage.root.parents) if not folder.exists()]
