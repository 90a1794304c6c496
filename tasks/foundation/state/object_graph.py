"""The object graph that TensorFlow keeps in a checkpoint: which key belongs to which variable of the tree."""

from collections.abc import Mapping
from typing import Any

from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from tasks.foundation.state.layout import stored_name, tree_of

# The key of the graph, a string among the tensors.
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def object_graph_of(variable_names: Mapping[str, str]) -> bytes:
    """The graph of the tree of plain dicts that `tree_of` makes, as `tf.train.Checkpoint(**tree).write` has it.

    Args:
        variable_names: key to the name of the variable.

    Returns:
        A serialized `TrackableObjectGraph`. Nodes are in breadth-first order, the root first.
    """
    graph = TrackableObjectGraph()
    tree = tree_of({key: _Variable(key, name) for key, name in variable_names.items()})
    waiting: list[Any] = [dict(sorted(tree.items()))]
    for item in waiting:  # grows meanwhile
        node = graph.nodes.add()
        node.has_checkpoint_values.value = True
        if isinstance(item, _Variable):
            node.attributes.add(name="VARIABLE_VALUE", full_name=item.name, checkpoint_key=stored_name(item.key))
            continue
        for name, child in item.items():
            node.children.add(node_id=len(waiting), local_name=name)
            waiting.append(child)
    data: bytes = graph.SerializeToString()
    return data


class _Variable:
    def __init__(self, key: str, name: str) -> None:
        self.key = key
        self.name = name
