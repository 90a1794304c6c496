"""What of a train step a TPU would not run, though a CPU does: strings, Python code, sizes that the data decide.

XLA on a CPU compiles some operations with dynamic shapes all the same, so that it passes over what fails, or is padded
and compiled again and again, on a TPU. TensorFlow's own shape inference tells where they begin: at an operation whose
result has an unknown size although the sizes of all it reads are known.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

Kind = Literal["string", "python", "dynamic shape", "float64"]

_PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc", "NumpyFunction"})
# The size of their result is a matter of the data, by what they are.
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
# XLA leaves assertions out, with all that only they read.
_DROPPED = frozenset({"Assert", "NoOp"})
# Sizes of shapes: worked out when the program is compiled.
_OF_SHAPES = frozenset({"BroadcastGradientArgs"})
_NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """An operation of the step, and what is the matter with it.

    Attributes:
        kind: what a TPU cannot do with it.
        op: its type, such as Where.
        node: its name in the graph.
        layer: name of the Keras layer that it belongs to; empty if none is known.
    """

    kind: Kind
    op: str
    node: str
    layer: str

    def __str__(self) -> str:
        where = f"layer {self.layer}" if self.layer else f"node {self.node}"
        return f"{where}: {self.op} ({self.kind})"


def scan(function: Any, layers: Sequence[str]) -> tuple[Suspect, ...]:
    """What a TPU would not run of the operations that the step needs, loops and branches included; one a layer and op.

    Args:
        function: the concrete function of a train step, traced with static shapes.
        layers: names of the model's layers.
    """
    graph = function.graph.as_graph_def(add_shapes=True)
    roots = [tensor.op.name for tensor in function.graph.outputs]
    roots += [op.name for op in function.graph.control_outputs if op.type not in _DROPPED]
    library = {each.signature.name: each.node_def for each in graph.library.function}
    found: dict[tuple[str, str, str], Suspect] = {}
    for nodes in _reached(graph.node, roots, library):
        known = {node.name: node for node in nodes}
        for node in nodes:
            kind = _kind(node, known)
            if kind is not None:
                layer = layer_of(node.name, layers)
                suspect = Suspect(kind=kind, op=node.op, node=node.name, layer=layer)
                found.setdefault((kind, node.op, layer or node.name), suspect)
    return tuple(found.values())


def layer_of(node: str, layers: Sequence[str]) -> str:
    """The innermost Keras layer in a node's name, `functional_1/mask_1/boolean_mask/Where`; empty if none is there."""
    for part in reversed(node.split("/")[:-1]):
        for name in (part, _NUMBER.sub("", part)):
            if name in layers:
                return name
    return ""


def _reached(nodes: Sequence[Any], roots: Iterable[str], library: dict[str, Any]) -> Iterator[list[Any]]:
    """The nodes that something depends on, of the graph and then of each function that one of them calls."""
    by_name = {node.name: node for node in nodes}
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in seen or name not in by_name or by_name[name].op in _DROPPED:
            continue
        seen.add(name)
        waiting.extend(_source(read) for read in by_name[name].input)
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


def _source(read: str) -> str:
    """The node of an input such as `a/b:1`, `^a/b`, or `a/b:output:0` within a function."""
    return read.lstrip("^").partition(":")[0]


def _called(node: Any) -> list[str]:
    return [
        each.name for value in node.attr.values() for each in ([value.func] if value.func.name else value.list.func)
    ]


def _kind(node: Any, known: dict[str, Any]) -> Kind | None:
    if node.op in _PYTHON:
        return "python"
    if _is_of_strings(node):
        return "string"
    if node.op in _DYNAMIC or _begins_a_dynamic_shape(node, known):
        return "dynamic shape"
    if node.op != "Const" and any(value.type == tf.float64.as_datatype_enum for value in node.attr.values()):
        return "float64"
    return None


def _is_of_strings(node: Any) -> bool:
    if _STRING.search(node.op):
        return True
    # Texts of assertions are constants, handed to functions that hold the assertion.
    return node.op not in {"Const", "Placeholder", "Identity"} and any(
        value.type == tf.string.as_datatype_enum for value in node.attr.values()
    )


def _begins_a_dynamic_shape(node: Any, known: dict[str, Any]) -> bool:
    if node.op in _OF_SHAPES or not _is_dynamic(node):
        return False
    return not any(_source(read) in known and _is_dynamic(known[_source(read)]) for read in node.input)


def _is_dynamic(node: Any) -> bool:
    if node.op in _OF_SHAPES:
        return False
    shapes = node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr else ()
    return any(shape.unknown_rank or any(size.size < 0 for size in shape.dim) for shape in shapes)
