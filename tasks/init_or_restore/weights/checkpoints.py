"""Checkpoints of TensorFlow: of an object graph, of a SavedModel, or by names as TensorFlow 1 wrote them.

The keys of an object graph are places (model/_operations/4/_kernel), but the graph, which is in the checkpoint, holds
the name of each variable, and which objects are optimizers. A variable may stand under its optimizer's key alone, so
what is a weight is asked of the graph and not of the keys.
"""

import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tasks.foundation.errors import WeightsError
from tasks.init_or_restore.weights.source_variables import Contents, Held, as_array, told_apart

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
# Keras 3 and 2.11 on; Keras 2 before.
_COUNTERS_OF_OPTIMIZERS = {"_iterations", "iter"}
# Layers that a layer keeps in a list are in the graph only as what the optimizer trains.
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
# What optimizers of TensorFlow 1 keep, in checkpoints without a graph.
_OF_OPTIMIZERS = re.compile(
    r"(^|/)(global_step|save_counter|beta[12]_power|(Adam|Momentum|RMSProp|Adagrad|Adadelta|Ftrl|LAMB|AdamWeightDecay)"
    r"(Optimizer)?(_\d+)?|adam_[mv])$"
)


def read_checkpoint(prefix: str, *, uri: str) -> Contents:
    """Read the variables of a checkpoint.

    Args:
        prefix: of its files, on this machine.
        uri: what the user calls it.

    Raises:
        WeightsError: its files are not all there, or cannot be read.
    """
    try:
        reader = tf.train.load_checkpoint(prefix)
        keys = sorted(reader.get_variable_to_shape_map())
        if _GRAPH in keys:
            found, ignored = _of_graph(reader)
        else:
            weights = [key for key in keys if not _OF_OPTIMIZERS.search(key)]
            found = [Held((key,), as_array(reader.get_tensor(key))) for key in weights]
            ignored = len(keys) - len(weights)
    except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as fault:
        said = str(fault).splitlines()
        raise WeightsError(
            f"init.weights: {uri} cannot be read as a checkpoint of TensorFlow ({said[0] if said else fault}); see "
            "that all its files are there: .index, and .data-… as many as their names say"
        ) from fault
    return Contents(variables=told_apart(found), ignored=ignored, place=uri)


def _of_graph(reader: Any) -> tuple[list[Held], int]:
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
            # Names that hand-made variables have by default say nothing, and keys are then all there is.
            names = (name, plain) if name and name != "Variable" else (plain,)
            found.append(Held(tuple(dict.fromkeys(names)), value))
    return found, ignored


def _weights_of(graph: Any) -> Iterator[int]:
    """Numbers of the objects that a model consists of: not those that only an optimizer or a metric has."""
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
    """A whole number at the root, as tf.train.Checkpoint(step=…) has it."""
    at_root = any(child.node_id == index for child in graph.nodes[0].children)
    return at_root and value.shape == () and value.dtype.kind in "iu"
