"""Restore the train state from a checkpoint, on the same or on another number of replicas."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tasks.foundation.checkpoint.bundle import PREFIX
from tasks.foundation.checkpoint.prefetch import PREFETCHED_CHECKPOINT
from tasks.foundation.checkpoint.verify import fetch, read_manifest
from tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, replica_key
from tasks.foundation.errors import DamagedCheckpoint
from tasks.foundation.model.variables import Leaf
from tasks.foundation.state.host_state import read_host_state
from tasks.foundation.state.layout import require_same_signature, stored_name
from tasks.foundation.state.returned_means import read_returned_means, stored_means
from tasks.foundation.state.temporary_space import temporary_folder_errors
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.temporary_files import temporary_folder


def restore_checkpoint(state: TrainState, home: Storage, ref: CheckpointRef) -> None:
    """Verify a checkpoint's bytes, read them, and compare step and digest. With several hosts, all of them call it.

    Args:
        state: a state of the same model; every variable gets a new value.
        home: the run's home.
        ref: the checkpoint.

    Raises:
        DamagedCheckpoint: the bytes differ from the manifest, or the restored values differ from the log's digest. If
            one host finds that, all of them raise it.
        StateMismatch: the checkpoint belongs to another model.
        StorageError: the store or the temporary folder failed.
    """
    fault = None
    try:
        _restore(state, home, ref)
    except DamagedCheckpoint as found:
        fault = found
    if not state.accelerator.all_agree(fault is None):
        raise fault or DamagedCheckpoint(f"{home.uri}/{ref.path} could not be restored on another host")


def _restore(state: TrainState, home: Storage, ref: CheckpointRef) -> None:
    where = f"{home.uri}/{ref.path}"
    manifest = PREFETCHED_CHECKPOINT.manifest(home, ref) or read_manifest(home, ref)
    require_same_signature(manifest.signature, state.signature, where=where)
    with temporary_folder_errors(where), temporary_folder("baton-restoring-") as local:
        fetch(home, ref, manifest, local, fetched=PREFETCHED_CHECKPOINT.take(home, ref))
        PREFETCHED_CHECKPOINT.drop()
        prefix = str(local / PREFIX)
        try:
            _read_model(state, prefix, manifest)
            host_state = read_host_state(prefix, manifest.signature)
            returned = read_returned_means(prefix, manifest)
        except tf.errors.NotFoundError as fault:
            # On a local home these are links: retiring the checkpoint deletes the files behind them.
            raise DamagedCheckpoint(f"{where}: a file was deleted while it was being read") from fault
    state.seeds.derive()
    same_replicas = manifest.replicas == state.accelerator.replicas
    digest = state.digest(stored=host_state | returned)
    if state.step != ref.step or (same_replicas and digest != ref.state_digest):
        raise DamagedCheckpoint(
            f"{where} was restored as step {state.step}, digest {digest[:12]}…; "
            f"the log says step {ref.step}, digest {ref.state_digest[:12]}…"
        )
    if state.host_state is not None:
        state.host_state.restore(host_state)
    for leaf in state.returned_leaves:
        _assign_replicas(state, leaf, stored_means(leaf, returned, manifest.replicas))
    _set_changed_learning_rates(state, manifest)
    state.finalize()
    state.earlier_files.remember(ref.path, manifest.files)


def _set_changed_learning_rates(state: TrainState, manifest: CheckpointManifest) -> None:
    """Set the learning rates that the model was compiled with, if they changed since the checkpoint was written.

    Others stay as restored: a schedule or a callback may have changed them since.
    """
    for leaf in state.leaves:
        compiled = state.compiled_learning_rates.get(leaf.path)
        if compiled is not None and compiled != manifest.configured.get(leaf.path, compiled):
            leaf.variable.assign(compiled)


def _read_model(state: TrainState, prefix: str, manifest: CheckpointManifest) -> None:
    if manifest.replicas == state.accelerator.replicas:
        options = tf.train.CheckpointOptions(experimental_io_device=state.accelerator.io_device)
        status = state.model_checkpoint.read(prefix, options=options)
        status.assert_existing_objects_matched()
        status.expect_partial()  # no warnings about the host state, which is read separately
        return
    reader = tf.train.load_checkpoint(prefix)
    for leaf in state.model_leaves:
        if leaf.seed:
            state.replica_variables.first_seed(leaf).assign(reader.get_tensor(stored_name(leaf.path)))
        elif leaf.per_replica:
            keys = [replica_key(leaf.path, index) for index in range(manifest.replicas)]
            _assign_replicas(state, leaf, [reader.get_tensor(stored_name(key)) for key in keys])
        else:
            leaf.variable.assign(reader.get_tensor(stored_name(leaf.path)))


def _assign_replicas(state: TrainState, leaf: Leaf, stored: Sequence[Any]) -> None:
    variables = state.replica_variables.of(leaf)
    values = stored if len(stored) == len(variables) else _for_replica_count(leaf, stored, len(variables))
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _for_replica_count(leaf: Leaf, stored: Sequence[Any], count: int) -> list[Any]:
    """Values for `count` replicas from those of another number of replicas.

    Every replica gets replica 0's value. A metric keeps its value over all replicas: replica 0 gets the sum, or every
    replica the mean.
    """
    aggregation = leaf.variable.aggregation if leaf.path.startswith("metrics/") else tf.VariableAggregation.NONE
    if aggregation == tf.VariableAggregation.SUM:
        return [np.sum(stored, axis=0, dtype=stored[0].dtype), *([np.zeros_like(stored[0])] * (count - 1))]
    if aggregation == tf.VariableAggregation.MEAN:
        return [np.mean(stored, axis=0, dtype=stored[0].dtype)] * count
    return [stored[0]] * count
