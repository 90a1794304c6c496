"""A committed checkpoint of another Baton run, verified as a resume verifies its own."""

from functools import partial
from pathlib import Path
from typing import Literal

import tensorflow as tf

from tasks.foundation.checkpoint.selection import read_chosen
from tasks.foundation.checkpoint.verify import fetch, read_manifest
from tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, replica_key
from tasks.foundation.errors import FileMissing, WeightsError
from tasks.foundation.state.layout import stored_name
from tasks.foundation.storage.base import Storage
from tasks.init_or_restore.weights.source_variables import Contents, Held, as_array

_MODEL = "model/"
_RAW = "variables/"
_RANDOM = "seed_generator_state"


def read_run(home: Storage, step: int | Literal["best"] | None, folder: Path) -> Contents:
    """Read the weights of a checkpoint; of a variable that each replica has for itself, replica 0's.

    Args:
        home: the other run's.
        step: which checkpoint; None for the newest.
        folder: an empty folder of this machine.

    Raises:
        WeightsError: the run has no such checkpoint, or retired the one of that step meanwhile.
        DamagedCheckpoint: its bytes are not those that were committed.
        StorageError: the store refused or failed.
    """
    return read_chosen(home, step, partial(_read, home, folder), error=WeightsError)


def _read(home: Storage, above: Path, ref: CheckpointRef) -> Contents:
    folder = above / ref.path  # what was retired meanwhile may have left files of its own
    folder.mkdir(parents=True)
    manifest = read_manifest(home, ref)
    fetch(home, ref, manifest, folder)
    try:
        return _contents(home, ref, manifest, str(folder / "ckpt"))
    except tf.errors.NotFoundError as fault:
        # Files of this machine are linked to, and not copied.
        raise FileMissing(f"{home.uri}/{ref.path}: a file went while it was being read") from fault


def _contents(home: Storage, ref: CheckpointRef, manifest: CheckpointManifest, prefix: str) -> Contents:
    reader = tf.train.load_checkpoint(prefix)
    found, ignored = [], 0
    for record in manifest.signature:
        name = record.path.removeprefix(_MODEL)
        # Raw variables of TensorFlow that layers hold are weights too, and have a place of their own.
        if not record.path.startswith((_MODEL, _RAW)) or _RANDOM in name:
            ignored += 1
            continue
        key = replica_key(record.path, 0) if record.per_replica else record.path
        found.append(Held((name,), as_array(reader.get_tensor(stored_name(key)))))
    return Contents(variables=tuple(found), ignored=ignored, place=f"{home.uri}/{ref.path}", step=ref.step)
