"""The store: can it be reached and written to, and how long does a checkpoint take there and back?"""

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.doctor.finding import Finding
from flows.goal import storage_of
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.download import side_by_side
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.temporary_files import DOCTOR, temporary_folder
from tasks.foundation.telemetry.formatting import duration_words, size_words

# Not a name that a run can have.
_PREFIX = ".baton-doctor-"
_SMALL = b"a file of baton doctor, which deletes it again\n"
# So much of a checkpoint is sent and fetched; the rest is taken to be as fast.
_SENT_BYTES = 256 << 20
# As a commit writes them.
_SHARD_BYTES = 64 << 20
# TensorFlow's own note of what the file holds.
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCost:
    """What a checkpoint costs.

    Attributes:
        commit_seconds: to write it here, send it, and read it back.
        restore_seconds: to fetch and to read it.
        state_bytes: its size.
    """

    commit_seconds: float
    restore_seconds: float
    state_bytes: int


def reachable_and_writable(run: RunFile) -> Finding:
    """Makes, reads and deletes a small file below the storage root; its value is the `Storage`.

    Raises:
        InvalidInput: the address is no store's.
        StorageError: the store refuses or fails.
    """
    storage = storage_of(run)
    notes = storage.probe()
    with _scratch(storage) as scratch:
        scratch.create("file", _SMALL)
        if scratch.read("file") != _SMALL:
            raise StorageError(f"{scratch.uri}/file: the store has other bytes than were written; see to the store")
    text = f"{storage.uri}: a file was made, read and deleted"
    # Opened anew: this one has seen a folder that is gone again.
    value = storage_of(run)
    if notes:
        return Finding(check="storage", verdict="warn", text=text, remedy="; ".join(notes), value=value)
    return Finding(check="storage", verdict="pass", text=text, value=value)


def commit_cost(storage: Storage, state: Any) -> Finding:
    """Writes the train state as a commit does, sends it to the store, reads it back, and restores it.

    Its value is the `CommitCost`. What is sent lies below a temporary folder of the storage root, beside the runs, and
    is deleted again. Of a large state only the first 256 MB of its files travel.

    Args:
        storage: the root.
        state: a `TrainState`; it keeps its values.
    """
    import tensorflow as tf

    from tasks.foundation.state.digest import digest_of
    from tasks.foundation.state.layout import tree_of

    checkpoint = tf.train.Checkpoint(**tree_of({leaf.path: leaf.variable for leaf in state.leaves}))
    policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=_SHARD_BYTES)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
    with temporary_folder(DOCTOR) as folder, _scratch(storage) as scratch:
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
        side_by_side(lambda file: scratch.upload(file, file.name), chosen, workers=storage.transfers)
        there = (time.monotonic() - began) * share
        with temporary_folder(DOCTOR) as fetched:
            began = time.monotonic()
            side_by_side(
                lambda file: scratch.download(file.name, fetched / file.name), chosen, workers=storage.transfers
            )
            back = (time.monotonic() - began) * share
        began = time.monotonic()
        checkpoint.read(written).assert_existing_objects_matched()
        back += time.monotonic() - began
    cost = CommitCost(commit_seconds=here + there, restore_seconds=back, state_bytes=size)
    part = "" if share == 1 else f" (of it {size_words(size / share)} were sent, the rest is taken to be as fast)"
    text = (
        f"{size_words(size)}{part}: {duration_words(cost.commit_seconds)} to commit, "
        f"{duration_words(cost.restore_seconds)} to restore, from this machine"
    )
    return Finding(check="commit", verdict="pass", text=text, value=cost)


def _first(files: list[Path], size: int) -> list[Path]:
    """The first files up to about so many bytes; at least one."""
    chosen: list[Path] = []
    for file in files:
        if chosen and sum(each.stat().st_size for each in chosen) + file.stat().st_size > size:
            break
        chosen.append(file)
    return chosen


@contextmanager
def _scratch(storage: Storage) -> Iterator[Storage]:
    """A folder of its own name below the storage root, gone afterwards with whatever had to be made for it.

    On this machine's disks it is locked, so that the next doctor removes what a killed one left.
    """
    missing = _missing_folders(storage)
    name = f"{_PREFIX}{secrets.token_hex(8)}"
    try:
        with ExitStack() as locked:
            if isinstance(storage, LocalStorage):
                with suppress(OSError):  # the storage says itself why it cannot be written to
                    storage.root.mkdir(parents=True, exist_ok=True)
                    name = locked.enter_context(temporary_folder(_PREFIX, within=storage.root)).name
            try:
                yield storage.at(name)
            finally:
                with suppress(StorageError):  # what went wrong before is what has to be said
                    storage.delete(name)
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _missing_folders(storage: Storage) -> list[Path]:
    """Folders of this machine that writing makes: the root and those above it that are not there yet."""
    if not isinstance(storage, LocalStorage):
        return []
    return [folder for folder in (storage.root, *storage.root.parents) if not folder.exists()]
