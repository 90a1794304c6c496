"""Find the operations of a train step that run on a CPU but not on a TPU: strings, Python code, dynamic shapes.

XLA on a CPU compiles some operations with dynamic shapes that fail on a TPU, or that a TPU pads and recompiles
repeatedly. TensorFlow's shape inference shows where a dynamic shape starts: at an operation whose output has an unknown
size although the sizes of all its inputs are known.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

Kind = Literal["string", "python", "dynamic shape", "float64"]

_PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc", "NumpyFunction"})
# Operations whose output size depends on the values of their inputs.
_DYNAMIC = frozenset(
    {
        "DynamicPartition",
        "ListDiff",
        "NonMaxSuppression",
        "NonMaxSuppressionV2",
        "NonMaxSuppressionV3",
        "RaggedGather",
        "RaggedRange",
        "RaggedTensorFromVariant",
        "SparseFillEmptyRows",
        "Unique",
        "UniqueV2",
        "UniqueWithCounts",
        "UniqueWithCountsV2",
        "Where",
    }
)
_STRING = re.compile(
    r"String|Regex|Substr|Base64|DecodeRaw|ParseExample|PrintV2|ReadFile|WriteFile|Decode(Jpeg|Png|Image)"
)
# XLA removes assertions, and all operations whose results only assertions use.
_DROPPED = frozenset({"Assert", "NoOp"})
# An operation on shapes, which XLA evaluates at compile time.
_SHAPE_OPS = frozenset({"BroadcastGradientArgs"})
_NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedOp:
    """An operation that a TPU cannot run.

    Attributes:
        kind: why a TPU cannot run it.
        op: type of the operation, such as Where.
        node: the operation's name in the graph.
        layer: name of the Keras layer that contains it; empty if unknown.
    """

    kind: Kind
    op: str
    node: str
    layer: str

    def __str__(self) -> str:
        where = f"layer {self.layer}" if self.layer else f"node {self.node}"
        return f"{where}: {self.op} ({self.kind})"


def find_unsupported_ops(function: Any, layers: Sequence[str]) -> tuple[UnsupportedOp, ...]:
    """Find the operations in a step that a TPU cannot run, inside loops and branches too.

    Args:
        function: concrete function of a train step, traced with static shapes.
        layers: names of the model's layers.

    Returns:
        One entry for each kind, layer and operation type.
    """
    graph = function.graph.as_graph_def(add_shapes=True)
    roots = [tensor.op.name for tensor in function.graph.outputs]
    roots += [op.name for op in function.graph.control_outputs if op.type not in _DROPPED]
    library = {each.signature.name: each.node_def for each in graph.library.function}
    found: dict[tuple[str, str, str], UnsupportedOp] = {}
    for nodes in _reachable(graph.node, roots, library):
        known = {node.name: node for node in nodes}
        for node in nodes:
            kind = _kind(node, known)
            if kind is not None:
                layer = layer_of(node.name, layers)
                unsupported = UnsupportedOp(kind=kind, op=node.op, node=node.name, layer=layer)
                found.setdefault((kind, node.op, layer or node.name), unsupported)
    return tuple(found.values())


def layer_of(node: str, layers: Sequence[str]) -> str:
    """Return the innermost Keras layer in a node name such as `functional_1/mask_1/boolean_mask/Where`, or ""."""
    for part in reversed(node.split("/")[:-1]):
        for name in (part, _NUMBER.sub("", part)):
            if name in layers:
                return name
    return ""


def _reachable(nodes: Sequence[Any], roots: Iterable[str], library: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield the nodes that the roots depend on, then the nodes of every function that these nodes call."""
    by_name = {node.name: node for node in nodes}
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in seen or name not in by_name or by_name[name].op in _DROPPED:
            continue
        seen.add(name)
        waiting.extend(_node_name(name) for name in by_name[name].input)
    reached = [node for node in nodes if node.name in seen]
    yield reached
    called = [name for node in reached for name in _called(node)]
    done: set[str] = set()
    while called:
        name = called.pop()
        if name not in done and name in library:
            done.add(name)
            inner = [node for node in library[name] if node.op not in _DROPPED]
            yield inner
            called.extend(name for node in inner for name in _called(node))


def _node_name(tensor: str) -> str:
    """Return the node of a tensor name: `a/b:1`, `^a/b`, or `a/b:output:0` within a function."""
    return tensor.lstrip("^").partition(":")[0]


def _called(node: Any) -> list[str]:
    return [
        each.name for value in node.attr.values() for each in ([value.func] if value.func.name else value.list.func)
    ]


def _kind(node: Any, known: dict[str, Any]) -> Kind | None:
    if node.op in _PYTHON:
        return "python"
    if _uses_strings(node):
        return "string"
    if node.op in _DYNAMIC or _starts_dynamic_shape(node, known):
        return "dynamic shape"
    if node.op != "Const" and any(value.type == tf.float64.as_datatype_enum for value in node.attr.values()):
        return "float64"
    return None


def _uses_strings(node: Any) -> bool:
    if _STRING.search(node.op):
        return True
    # The messages of assertions are string constants that the graph passes to functions with assertions.
    return node.op not in {"Const", "Placeholder", "Identity"} and any(
        value.type == tf.string.as_datatype_enum for value in node.attr.values()
    )


def _starts_dynamic_shape(node: Any, known: dict[str, Any]) -> bool:
    if node.op in _SHAPE_OPS or not _is_dynamic(node):
        return False
    return not any(_node_name(name) in known and _is_dynamic(known[_node_name(name)]) for name in node.input)


def _is_dynamic(node: Any) -> bool:
    if node.op in _SHAPE_OPS:
        return False
    shapes = node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr else ()
    return any(shape.unknown_rank or any(size.size < 0 for size in shape.dim) for shape in shapes)
