"""A committed checkpoint of another Baton run, verified as a resume verifies its own."""

from pathlib import Path
from typing import Literal

import tensorflow as tf

from tasks.foundation.contracts.checkpoint import CheckpointRef, replica_key
from tasks.foundation.errors import WeightsError
from tasks.foundation.runlog.choosing import choose
from tasks.foundation.runlog.verifying import fetch, read_manifest
from tasks.foundation.state.layout import stored_name
from tasks.foundation.storage.base import Storage
from tasks.init_or_restore.weights.held import Contents, Held, as_array

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
        WeightsError: the run has no such checkpoint.
        DamagedCheckpoint: its bytes are not those that were committed.
        StorageError: the store refused or failed.
    """
    ref: CheckpointRef = choose(home, step, error=WeightsError)
    manifest = read_manifest(home, ref)
    fetch(home, ref, manifest, folder)
    reader = tf.train.load_checkpoint(str(folder / "ckpt"))
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
