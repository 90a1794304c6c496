"""Restore the train state from a checkpoint, on the same or on another number of replicas."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from baton.tasks.foundation.checkpoint.tensor_bundle import PREFIX, bundle_errors
from baton.tasks.foundation.checkpoint.verify import PREFETCHED_CHECKPOINT, fetch, read_manifest
from baton.tasks.foundation.contracts.checkpoint import CarriedState, CheckpointManifest, CheckpointRef, differing_keys
from baton.tasks.foundation.contracts.identity import SIGNATURE
from baton.tasks.foundation.errors import DamagedCheckpoint
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.model.variables import Leaf, components
from baton.tasks.foundation.state.digest import require_same_signature, signature_digest, stored_name
from baton.tasks.foundation.state.host_memory import read_host_state
from baton.tasks.foundation.state.replicas import read_returned_means, stored_means
from baton.tasks.foundation.state.train_state import (
    TrainState,
    carry,
    is_average_of,
    is_iteration,
    is_same_tree,
    optimizer_path,
    temporary_folder_errors,
)
from baton.tasks.foundation.state.warm_state import WarmState
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local_files import temporary_folder


def restore_checkpoint(
    state: TrainState, home: Storage, ref: CheckpointRef, *, initial: AbstractContextManager[TrainState] | None = None
) -> None:
    """Verify a checkpoint's bytes, read them, and compare step and digest. With several hosts, all of them call it.

    A checkpoint from before an accepted change may have other variables: see `train_state.py`.

    Args:
        state: a state of the same model; every variable gets a new value.
        initial: gives a state with the values of step 0, entered if variables begin fresh; None: `state` is as built.

    Raises:
        DamagedCheckpoint: the bytes differ from the manifest, or the restored values differ from the log's digest. If
            one host finds that, all of them raise it.
        StateMismatch: the checkpoint belongs to another model.
        StorageError: the store or the temporary folder failed.
    """
    fault = None
    try:
        _restore(state, home, ref, nullcontext(state) if initial is None else initial)
    except DamagedCheckpoint as found:
        fault = found
    if not state.accelerator.all_agree(fault is None):
        raise fault or DamagedCheckpoint(f"{home.uri}/{ref.path} could not be restored on another host")


def _restore(state: TrainState, home: Storage, ref: CheckpointRef, initial: AbstractContextManager[TrainState]) -> None:
    where = f"{home.uri}/{ref.path}"
    manifest = PREFETCHED_CHECKPOINT.manifest(home, ref) or read_manifest(home, ref)
    carried = _carried(state, home, manifest, where)
    with temporary_folder_errors(where), temporary_folder("baton-restoring-") as local:
        fetch(home, ref, manifest, local, fetched=PREFETCHED_CHECKPOINT.take(home, ref))
        PREFETCHED_CHECKPOINT.drop()
        prefix = str(local / PREFIX)
        with bundle_errors(where, prefix):
            _read_model(state, prefix, manifest, carried, initial)
            host_state = read_host_state(prefix, manifest.signature)
            returned = read_returned_means(prefix, manifest)
    state.seeds.derive()
    comparable = carried is None and manifest.replicas == state.accelerator.replicas
    digest = state.digest(stored=host_state | returned)
    if state.step != ref.step or (comparable and digest.root != ref.state_digest):
        differing = differing_keys(manifest.leaf_digests, digest.leaves) if comparable else []
        first = f"; the first variable that differs from its manifest is {differing[0]}" if differing else ""
        raise DamagedCheckpoint(
            f"{where} was restored as step {state.step}, digest {digest.root[:12]}…; "
            f"the log says step {ref.step}, digest {ref.state_digest[:12]}…{first}"
        )
    if state.host_state is not None:
        state.host_state.restore(host_state)
    for leaf in state.returned_leaves:
        _assign_replicas(state, leaf, stored_means(leaf, returned, manifest.replicas))
    _set_changed_learning_rates(state, manifest, carried)
    state.finalize()
    state.earlier_files.remember(ref.path, manifest.files)
    state.shares.restored(ref.step)


def _carried(state: TrainState, home: Storage, manifest: CheckpointManifest, where: str) -> CarriedState | None:
    """What becomes of the checkpoint's variables; None if the model has the same."""
    if is_same_tree(manifest, state.tree):
        return None
    head = RunLog(home).head()
    if head is None or head.identity.get(SIGNATURE) != signature_digest(state.signature):
        # Nobody has accepted the difference: another model, or this host has other code than the one that begins.
        require_same_signature(manifest.signature, state.signature, where=where)
        return None
    return carry(manifest, state.tree, where=where, home=home.uri)


def _set_changed_learning_rates(state: TrainState, manifest: CheckpointManifest, carried: CarriedState | None) -> None:
    """Set the learning rates that the model was compiled with, if they changed since the checkpoint was written.

    Others stay as restored: a schedule or a callback may have changed them since.
    """
    for leaf in state.leaves:
        compiled = state.compiled_learning_rates.get(leaf.path)
        stored = leaf.path if carried is None else carried.kept.get(leaf.path, "")
        if compiled is not None and compiled != manifest.configured.get(stored, compiled):
            leaf.variable.assign(compiled)


def _read_model(
    state: TrainState,
    prefix: str,
    manifest: CheckpointManifest,
    carried: CarriedState | None,
    initial: AbstractContextManager[TrainState],
) -> None:
    # TensorFlow reads no value for a variable of a server that finds no such file.
    if carried is None and manifest.replicas == state.accelerator.replicas and not state.accelerator.has_servers:
        status = state.model_checkpoint.read(prefix)
        status.assert_existing_objects_matched()
        status.expect_partial()  # no warnings about the host state, which is read separately
        return
    reader = tf.train.load_checkpoint(prefix)
    kept = {leaf.path: leaf.path for leaf in state.model_leaves} if carried is None else carried.kept
    records = {record.path: record for record in manifest.signature}
    for leaf in state.model_leaves:
        if leaf.path not in kept:
            continue
        record = records[kept[leaf.path]]
        values = [reader.get_tensor(stored_name(key)) for key in record.keys(manifest.replicas)]
        if is_iteration(leaf.path):
            values = [_iteration(value, manifest, record.path, state, leaf.path) for value in values]
        if leaf.seed:
            state.replica_variables.first_seed(leaf).assign(values[0])
        elif leaf.per_replica:
            _assign_replicas(state, leaf, values)
        else:
            _assign_everywhere(leaf, values[0])
    fresh = [leaf for leaf in state.model_leaves if leaf.path not in kept]
    if fresh:
        with initial as source:
            _begin_fresh(state, fresh, source)


def _assign_everywhere(leaf: Leaf, value: Any) -> None:
    """Give the components of all replicas one value, which is sent to each host once."""
    sent: dict[str, Any] = {}
    for component in leaf.components:
        host = component.device.partition("/device:")[0]
        if host not in sent:
            with tf.device(f"{host}/device:CPU:0"):
                sent[host] = tf.identity(value)
        component.assign(sent[host])


def _begin_fresh(state: TrainState, fresh: Sequence[Leaf], source: TrainState) -> None:
    """Give variables that the checkpoint lacks the values of step 0; an average begins at what it averages."""
    averaged = {"_".join(leaf.path.split("/")[1:]): leaf for leaf in state.model_leaves if leaf.trainable}
    for leaf in fresh:
        if (weight := averaged.get(is_average_of(leaf.path) or "")) is not None:
            leaf.variable.assign(weight.components[0].numpy())
        elif source is not state:
            for key, variable in state.replica_variables.saved([leaf]).items():
                variable.assign(components(source.saved[key])[0].numpy())


def _iteration(value: Any, manifest: CheckpointManifest, stored: str, state: TrainState, path: str) -> Any:
    """The iteration of an optimizer, which Keras counts in batches: with other accumulation, as many updates."""
    before, now = (
        manifest.optimizers.get(optimizer_path(stored) or ""),
        state.optimizers.get(optimizer_path(path) or ""),
    )
    if before is None or now is None or before.accumulates == now.accumulates:
        return value
    return value // before.accumulates * now.accumulates


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


def restore_warm_state(warm: WarmState, home: Storage, ref: CheckpointRef) -> bool:
    """Restore a checkpoint, unless the state holds it already. With several hosts, all of them call it.

    Args:
        warm: the state; every variable gets a new value.

    Returns:
        Whether it was restored; False if all hosts held it, and nothing was read.

    Raises:
        DamagedCheckpoint: see `restore_checkpoint`.
        StateMismatch: the checkpoint belongs to another model.
        StorageError: the store or the temporary folder failed.
    """
    if warm.state.accelerator.all_agree(warm.holds(ref)):
        return False
    initial = warm.initial_values()
    warm.forget_content()
    restore_checkpoint(warm.state, home, ref, initial=initial)
    warm.restores += 1
    warm.set_content(ref)
    return True
