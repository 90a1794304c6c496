"""Fixes the order in which a traced function adds three or more floats.

TensorFlow's kernel AddN starts with the input whose memory it can reuse: the first one that nothing else uses at this
moment. So the order of three or more inputs, and the last bits of their sum, depend on which threads have finished.
Gradients and `tf.add_n` are made of AddN. TensorFlow also rewrites sums that are written with `+` to AddN, so a loss of
three parts is one.

Here such sums stay as they are written, and AddN may not reuse memory: then it adds from first to last. Sums of two
values have the same bits in any order, and stay as they are.

Where a function needs more than four fifths of a device's memory, by TensorFlow's estimate, it replaces AddN by a
variable to which each input is added when it is ready. It takes a CPU's memory to be 256 MiB, so this happens to every
larger model. A setting of this process turns it off.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tensorflow.compat.v1 import ConfigProto, GraphOptions
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.eager import context

_ADDS = frozenset({"Add", "AddN", "AddV2"})
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
# TensorFlow removes them before it rewrites sums, the second ones if they change nothing: a mean of a scalar, a product
# with 1.
_TRANSPARENT = frozenset({"Identity", "PreventGradient", "StopGradient"})
_SOMETIMES_TRANSPARENT = re.compile(
    "BroadcastTo|Cast|EnsureShape|ExpandDims|Max|Mean|Min|Mul|Pad|PadV2|Prod|RealDiv|Reshape|Slice|Squeeze"
    "|StridedSlice|Sub|Sum|Tile|Transpose"
)
# They read a shape, which is known while tracing.
_SHAPES = frozenset({"OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"})

# TensorFlow marks sums that it has rewritten, and does not rewrite them again.
_NOT_REWRITTEN = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"
# Pairs of (input whose memory is reused, output); -2 stands for none.
_REUSED_MEMORY = "_forward_input"
_NONE = -2
# By default, TensorFlow swaps memory and schedules it, which replaces AddN. `tf.config.optimizer` has no such setting.
_MEMORY = RewriterConfig(memory_optimization=RewriterConfig.SWAPPING_HEURISTICS)
_WHOLE_SUMS = ConfigProto(graph_options=GraphOptions(rewrite_options=_MEMORY))

# Two values have the same sum, bit for bit, in both orders.
_ANY_ORDER = 2


def fix_sum_order(function: Any, strategy: Any) -> tuple[str, ...]:
    """Replace a traced function, and those that it calls, by ones that add in a fixed order.

    Call it before the function runs for the first time, in the thread that runs it. Its graph in Python stays the same.

    Args:
        function: a concrete function.
        strategy: whose replicas run it. On a TPU nothing changes: XLA adds in one order.

    Returns:
        Names of the operations that were fixed.
    """
    if type(strategy).__name__.startswith("TPUStrategy"):  # TPUStrategyV2
        return ()
    eager = context.context()
    eager._config = eager._config or ConfigProto()
    eager._config.MergeFrom(_WHOLE_SUMS)
    eager.function_call_options = None  # what this thread has made of the settings before
    library = list(function.graph._functions.values())
    graphs = {function.name: function.graph, **{each.name: each.graph for each in library if hasattr(each, "graph")}}
    # Neither the bodies of loops nor those of conditions.
    called = {
        operation.get_attr("f").name.encode()
        for graph in graphs.values()
        for operation in graph.get_operations()
        if operation.type in _CALLS
    }
    fixed = []
    for name, graph in graphs.items():
        unordered = unordered_sums(graph, is_called=name in called)
        if unordered or any(operation.type in _CALLS for operation in graph.get_operations()):
            _replace(name, unordered)
            fixed += sorted(unordered)
    for each in library:
        # A function of the kind before tf.function, as in tf.nn.ctc_loss, has no graph; all its sums are fixed.
        if not hasattr(each, "graph") and (sums := _sums_of(each.definition)):
            _replace(each.name.encode(), sums)
            fixed += sorted(sums)
    return tuple(fixed)


def _sums_of(definition: Any) -> frozenset[str]:
    return frozenset(node.name for node in definition.node_def if node.op in _ADDS)


def _replace(name: bytes, unordered: frozenset[str]) -> None:
    """Replace a function that has not run so far, with the order of these operations, and in its calls, fixed."""
    eager = context.context()
    definition = eager.get_function_def(name)
    for node in definition.node_def:
        if node.op in _CALLS:
            node.attr["config_proto"].s += _WHOLE_SUMS.SerializeToString()  # which merges both; used if not inlined
        if node.name in unordered:
            node.attr[_NOT_REWRITTEN].b = True
            if node.op == "AddN":
                node.attr[_REUSED_MEMORY].list.i.extend([_NONE, 0])
    eager.remove_function(name)
    eager.add_function_def(definition)


def unordered_sums(graph: Any, *, is_called: bool = False) -> frozenset[str]:
    """Names of the operations of a graph that TensorFlow may add in any order.

    Args:
        is_called: whether the function is called by another one, and not the body of a loop or of a condition. Its
            arguments may then be sums, because TensorFlow rewrites both together.
    """
    operations = graph.get_operations()
    numbers = _value_numbers(operations)
    uses = _uses(graph, operations, numbers)

    constants = _constants(operations)

    def joined(tensor: Any) -> list[Any] | None:
        """What TensorFlow may add in place of a tensor; None if it adds the tensor itself."""
        if len(uses.get(numbers[id(tensor)], ())) > 1:
            return None
        operation = tensor.op
        if operation.type in _ADDS:
            return list(operation.inputs)
        if operation.type in _TRANSPARENT:
            return [operation.inputs[0]]
        if _SOMETIMES_TRANSPARENT.fullmatch(operation.type):
            variable = [each for each in operation.inputs if each.op.name not in constants]
            same = [
                each for each in variable if each.dtype == tensor.dtype and each.shape.is_compatible_with(tensor.shape)
            ]
            return same if len(variable) == 1 and same else None
        return None

    seen: set[str] = set()
    found: set[str] = set()
    for root in reversed(operations):
        if root.name in seen or not _adds_floats(root):
            continue
        members, terms = _sum_of(root, joined)
        seen |= members
        is_long = root.type == "AddN" and len(root.inputs) > _ANY_ORDER
        if is_long or _most_of_one_shape(terms, is_called=is_called) > _ANY_ORDER:
            found |= members
    return frozenset(found)


def _sum_of(root: Any, joined: Callable[[Any], list[Any] | None]) -> tuple[set[str], list[Any]]:
    """The additions that TensorFlow joins to one sum, and its terms."""
    members, terms = {root.name}, []
    waiting = list(root.inputs)
    while waiting:
        tensor = waiting.pop()
        inside = joined(tensor)
        if inside is None:
            terms.append(tensor)
            continue
        if tensor.op.type in _ADDS:
            members.add(tensor.op.name)
        waiting.extend(inside)
    return members, terms


def _most_of_one_shape(terms: Sequence[Any], *, is_called: bool) -> int:
    """The largest number of terms of one shape; TensorFlow joins only these."""
    counts: dict[Any, int] = {}
    unknown = 0
    for term in terms:
        # A function that is called may return a sum, and be called with one.
        terms_in_it = 2 if term.op.type in _CALLS or (is_called and term.op.type == "Placeholder") else 1
        if term.shape.is_fully_defined():
            shape = tuple(term.shape.as_list())
            counts[shape] = counts.get(shape, 0) + terms_in_it
        else:
            unknown += terms_in_it
    return unknown + max(counts.values(), default=0)


def _adds_floats(operation: Any) -> bool:
    if operation.type not in _ADDS:
        return False
    dtype = operation.outputs[0].dtype
    return bool(dtype.is_floating or dtype.is_complex)


def _constants(operations: Sequence[Any]) -> set[str]:
    """Names of the operations whose results TensorFlow computes once, before the function runs."""
    constants: set[str] = set()
    for operation in operations:
        inputs = operation.inputs
        known = operation.type in _SHAPES or (len(inputs) > 0 and all(each.op.name in constants for each in inputs))
        if operation.type == "Const" or (known and not operation.op_def.is_stateful):
            constants.add(operation.name)
    return constants


def _value_numbers(operations: Sequence[Any]) -> dict[int, int]:
    """A number for each tensor; equal for those that TensorFlow computes only once. Keys are ids."""
    known: dict[Hashable, int] = {}
    numbers: dict[int, int] = {}
    for operation in operations:
        what: Hashable
        if operation.type == "Const":
            what = operation.get_attr("value").SerializeToString()
        elif operation.op_def.is_stateful or operation.type == "Placeholder":
            what = operation.name
        else:
            # Attributes are not compared, so this has more values equal than TensorFlow has.
            what = tuple(numbers.get(id(tensor), id(tensor)) for tensor in operation.inputs)
        for index, tensor in enumerate(operation.outputs):
            numbers[id(tensor)] = known.setdefault((operation.type, what, index), len(known))
    return numbers


def _uses(graph: Any, operations: Sequence[Any], numbers: dict[int, int]) -> dict[int, set[Hashable]]:
    """What reads each value, by its number."""
    needed = _needed(graph)
    uses: dict[int, set[Hashable]] = {}
    for operation in operations:
        if operation.name not in needed or operation.type in _SHAPES:
            continue
        results = [numbers[id(tensor)] for tensor in operation.outputs]
        reader: Hashable = results[0] if results else operation.name
        for position, tensor in enumerate(operation.inputs):
            uses.setdefault(numbers[id(tensor)], set()).add((reader, position))
    for position, tensor in enumerate(graph.outputs):
        uses.setdefault(numbers.get(id(tensor), -1), set()).add(("result", position))
    return uses


def _needed(graph: Any) -> set[str]:
    """Names of the operations that a function's results and changes of variables need."""
    needed: set[str] = set()
    waiting = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
    while waiting:
        operation = waiting.pop()
        if operation.name not in needed:
            needed.add(operation.name)
            waiting.extend(tensor.op for tensor in operation.inputs)
            waiting.extend(operation.control_inputs)
    return needed
