"""Reads TensorFlow checkpoints: of an object graph, of a SavedModel, or name-based ones of TensorFlow 1.

The keys of an object graph are positions (model/_operations/4/_kernel), but the checkpoint contains the graph, which
has the name of each variable and shows which objects are optimizers. A variable may have a key below its optimizer
only, so the graph and not the key decides what is a weight.
"""

import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tasks.foundation.errors import WeightsError
from tasks.init_or_restore.weights.source_variables import SourceContents, SourceVariable, as_array, with_unique_names

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
