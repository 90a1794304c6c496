"""Reads TensorFlow checkpoints: of an object graph, of a SavedModel, or name-based ones of TensorFlow 1.

The keys of an object graph are positions (model/_operations/4/_kernel), but the checkpoint contains the graph, which
has the name of each variable and shows which objects are optimizers. A variable may have a key below its optimizer
only, so the graph and not the key decides what is a weight.

Reads weights from a committed checkpoint of another Baton run, with the same verification as a resume.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tasks.foundation.checkpoint.files import PREFIX, bundle_errors
from tasks.foundation.checkpoint.selection import read_selected
from tasks.foundation.checkpoint.verify import fetch, read_manifest
from tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, replica_key
from tasks.foundation.errors import WeightsError
from tasks.foundation.state.digest import stored_name
from tasks.foundation.storage.base import Storage
from tasks.init_or_restore.weights.matching import SourceContents, SourceVariable, as_array, with_unique_names

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
# Keras 3 and 2.11 or newer; older Keras 2.
_COUNTERS_OF_OPTIMIZERS = {"_iterations", "iter"}
# Layers that a layer holds in a list are in the graph only as variables that the optimizer trains.
_TRAINED = "_trainable_variables"
_NO_WEIGHTS = {
    "metrics",
    "_metrics",
    "_compile_metrics",
    "_compile_loss",
    "_loss_tracker",
    "compiled_metrics",
    "compiled_loss",
    "keras_api",
    "save_counter",
}
_RANDOM = re.compile(r"(^|/)(seed_generator_state|StateVar)$")
# Variables of TensorFlow 1 optimizers, in checkpoints without a graph.
_OF_OPTIMIZERS = re.compile(
    r"(^|/)(global_step|save_counter|beta[12]_power|(Adam|Momentum|RMSProp|Adagrad|Adadelta|Ftrl|LAMB|AdamWeightDecay)"
    r"(Optimizer)?(_\d+)?|adam_[mv])$"
)


def read_checkpoint(prefix: str, *, uri: str) -> SourceContents:
    """Read the variables of a checkpoint.

    Args:
        prefix: path prefix of its files, on this machine.
        uri: the address in the run file.

    Raises:
        WeightsError: files are missing, or cannot be read.
    """
    try:
        reader = tf.train.load_checkpoint(prefix)
        keys = sorted(reader.get_variable_to_shape_map())
        if _GRAPH in keys:
            found, ignored = _of_graph(reader)
        else:
            weights = [key for key in keys if not _OF_OPTIMIZERS.search(key)]
            found = [SourceVariable((key,), as_array(reader.get_tensor(key))) for key in weights]
            ignored = len(keys) - len(weights)
    except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as fault:
        lines = str(fault).splitlines()
        raise WeightsError(
            f"init.weights: {uri} cannot be read as a TensorFlow checkpoint ({lines[0] if lines else fault}); check "
            "that all its files are present: .index, and every .data-… file"
        ) from fault
    return SourceContents(variables=with_unique_names(found), ignored=ignored, place=uri)


def _of_graph(reader: Any) -> tuple[list[SourceVariable], int]:
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor(_GRAPH))
    weights = set(_weights_of(graph))
    found, ignored, seen = [], 0, set()
    for index, node in enumerate(graph.nodes):
        for attribute in node.attributes:
            key = attribute.checkpoint_key
            if key in seen or not reader.has_tensor(key):
                continue
            seen.add(key)
            plain = key.removesuffix(_SUFFIX)
            name = attribute.full_name.partition(":")[0]
            if index not in weights or plain == key or _RANDOM.search(name or plain):
                ignored += 1
                continue
            value = as_array(reader.get_tensor(key))
            if value.dtype.kind in "OS" or _is_counter(index, value, graph):
                ignored += 1
                continue
            # The default name of a tf.Variable does not tell variables apart; the key does.
            names = (name, plain) if name and name != "Variable" else (plain,)
            found.append(SourceVariable(tuple(dict.fromkeys(names)), value))
    return found, ignored


def _weights_of(graph: Any) -> Iterator[int]:
    """Yield the indices of the objects that belong to the model, not only to an optimizer or a metric."""
    slots = {slot.slot_variable_node_id for node in graph.nodes for slot in node.slot_variables}
    waiting, seen = [0], set()
    while waiting:
        index = waiting.pop()
        if index in seen or index in slots:
            continue
        seen.add(index)
        yield index
        children = graph.nodes[index].children
        is_optimizer = any(child.local_name in _COUNTERS_OF_OPTIMIZERS for child in children)
        waiting += [
            child.node_id
            for child in children
            if (child.local_name == _TRAINED if is_optimizer else child.local_name not in _NO_WEIGHTS)
        ]


def _is_counter(index: int, value: Any, graph: Any) -> bool:
    """Whether the value is an integer at the root, as in tf.train.Checkpoint(step=…)."""
    at_root = any(child.node_id == index for child in graph.nodes[0].children)
    return at_root and value.shape == () and value.dtype.kind in "iu"


_MODEL = "model/"
_RAW = "variables/"
_RANDOM_STATE = "seed_generator_state"


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
        if not record.path.startswith((_MODEL, _RAW)) or _RANDOM_STATE in name:
            ignored += 1
            continue
        key = replica_key(record.path, 0) if record.per_replica else record.path
        found.append(SourceVariable((name,), as_array(reader.get_tensor(stored_name(key)))))
    return SourceContents(variables=tuple(found), ignored=ignored, place=f"{home.uri}/{ref.path}", step=ref.step)
