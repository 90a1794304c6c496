"""What an evaluation changes in the train state. `state/held_values.py` puts it back.

An evaluation uses the model that training uses. It resets and updates metrics, may draw random numbers or assign
variables in the user's own `test_step`, and evaluates the averages of `use_ema`. All of that is put back, bit for bit.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from tensorflow.python.framework import auto_control_deps_utils  # no public call tells what a graph writes

from tasks.foundation.model.variables import Leaf, handle_ids

# Operations that run Python code, which may assign any variable.
_PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})


def changed_leaves(leaves: Iterable[Leaf], graphs: Sequence[Any], *, averages: bool) -> tuple[Leaf, ...]:
    """Return the leaves that an evaluation may change.

    Args:
        leaves: of the train state.
        graphs: of the traced validation loops.
        averages: whether the averages of `use_ema` replace the weights.
    """
    if any(_runs_python(graph) for graph in graphs):
        return tuple(leaves)
    written = set().union(*(_written_handles(graph) for graph in graphs))
    return tuple(
        leaf
        for leaf in leaves
        if leaf.path.startswith("metrics/")  # reset outside of the loops
        or (averages and leaf.trainable)
        or not written.isdisjoint(handle_ids(leaf.variable))
    )


def _written_handles(graph: Any) -> set[int]:
    """Ids of the handles of all captured variables that the graph does not only read."""
    read_only = set(auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph))
    index_of = {id(inside): index for index, inside in enumerate(graph.inputs)}
    return {id(outside) for outside, inside in graph.captures if index_of[id(inside)] not in read_only}


def _runs_python(graph: Any) -> bool:
    definition = graph.as_graph_def()
    nodes = (*definition.node, *(node for inner in definition.library.function for node in inner.node_def))
    return any(node.op in _PYTHON for node in nodes)
