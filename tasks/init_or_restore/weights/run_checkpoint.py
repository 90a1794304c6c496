"""Reads weights from a committed checkpoint of another Baton run, with the same verification as a resume."""

from functools import partial
from pathlib import Path
from typing import Literal

import tensorflow as tf

from tasks.foundation.checkpoint.bundle import PREFIX
from tasks.foundation.checkpoint.bundle_errors import bundle_errors
from tasks.foundation.checkpoint.selection import read_selected
from tasks.foundation.checkpoint.verify import fetch, read_manifest
from tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, replica_key
from tasks.foundation.errors import WeightsError
from tasks.foundation.state.layout import stored_name
from tasks.foundation.storage.base import Storage
from tasks.init_or_restore.weights.source_variables import SourceContents, SourceVariable, as_array

_MODEL = "model/"
_RAW = "variables/"
_RANDOM = "seed_generator_state"


def read_run_weights(home: Storage, step: int | Literal["best"] | None, folder: Path) -> SourceContents:
    """Read the weights of a checkpoint; for a per-replica variable, replica 0's.

    Args:
        home: the home of the other run.
        step: the checkpoint's step; None for the newest.
        folder: an empty local folder.

    Raises:
        WeightsError: the run has no such checkpoint, or retired it meanwhile.
        DamagedCheckpoint: its bytes differ from what was committed.
        StorageError: the store failed.
    """
    return read_selected(home, step, partial(_read, home, folder), error=WeightsError)


def _read(home: Storage, above: Path, ref: CheckpointRef) -> SourceContents:
    folder = above / ref.path  # a folder per checkpoint: one that was retired meanwhile may have left files
    folder.mkdir(parents=True)
    manifest = read_manifest(home, ref)
    fetch(home, ref, manifest, folder)
    prefix = str(folder / PREFIX)
    with bundle_errors(f"{home.uri}/{ref.path}", prefix):
        return _contents(home, ref, manifest, prefix)


def _contents(home: Storage, ref: CheckpointRef, manifest: CheckpointManifest, prefix: str) -> SourceContents:
    reader = tf.train.load_checkpoint(prefix)
    found, ignored = [], 0
    for record in manifest.signature:
        name = record.path.removeprefix(_MODEL)
        # Raw TensorFlow variables in layers are weights too, with another prefix.
        if not record.path.startswith((_MODEL, _RAW)) or _RANDOM in name:
            ignored += 1
            continue
        key = replica_key(record.path, 0) if record.per_replica else record.path
        found.append(SourceVariable((name,), as_array(reader.get_tensor(stored_name(key)))))
    return SourceContents(variables=tuple(found), ignored=ignored, place=f"{home.uri}/{ref.path}", step=ref.step)
