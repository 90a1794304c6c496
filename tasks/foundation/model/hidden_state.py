"""Refuses a traced step that computes with state which no checkpoint holds.

The variables of the train state are saved. What else an operation keeps from one call to the next is lost when the run
is cut: the position of an iterator, what waits in a queue, what was written into a table. So TensorFlow's stateful
operations are refused, but for those that keep nothing, or keep it in a variable. What a step has captured is looked at
too. Values, and tables that nobody can write, are the same in every process that reads the same: `captured_contents`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.model.keras_steps import place_of
from baton.tasks.foundation.model.randomness import CLOCK, PYTHON_KERNELS, RANDOM_KERNELS
from baton.tasks.foundation.model.variables import components
from baton.tasks.foundation.text import message

# Stateful operations that keep nothing between two calls, keep it in a variable, or only write to the outside; by the
# beginning of their names.
_KEEP_NOTHING = (
    "_",  # added by TensorFlow's runtime
    "Assert",
    "Assign",
    "Case",
    "CheckNumerics",
    "Collective",
    "CudnnRNN",
    "Debug",
    "DeepCopy",
    "DeviceIndex",
    "DisableCopyOnRead",
    "Empty",
    "FlushSummaryWriter",
    "GuaranteeConst",
    "If",
    "Infeed",
    "IteratorGetNext",  # of the training data; one that the step has captured is refused
    "LookupTable",  # a table that can be written is refused
    "MultiDeviceIteratorGetNext",
    "Nccl",
    "Outfeed",
    "PartitionedCall",
    "Print",
    "ReadVariable",
    "Recv",
    "RemoteCall",
    "Resource",
    "Rng",
    "Send",
    "StackV2",
    "StackP",
    "StackClose",
    "Stateful",
    "StatelessRandomGet",
    "SyncDevice",
    "TensorArray",
    "VarIsInitialized",
    "VariableShape",
    "While",
    "Write",
    "Xla",
)
# Datasets that are made, and read to their end, within one call.
_DATASETS = frozenset(
    {
        "AnonymousIteratorV3",
        "DatasetToSingleElement",
        "DeleteIterator",
        "ListDataset",
        "MakeIterator",
        "RangeDataset",
        "ReduceDataset",
        "TensorDataset",
        "TensorSliceDataset",
    }
)
# Of the names above.
_KEEP_SOMETHING = frozenset({"ResourceConditionalAccumulator"})
_KEEP_SOMETHING_PREFIX = "ResourceAccumulator"
# Of these, the ones that may use a resource which is neither a variable nor a table: a writer of summaries, or the
# token that keeps collectives in order.
_USE_RESOURCES = ("Collective", "FlushSummaryWriter", "Write")
# What reading a table raises that nobody has filled yet.
NOT_FILLED = (tf.errors.AbortedError, tf.errors.FailedPreconditionError)
# The attributes that name the functions.
_PASS_INPUTS_TO = {
    "Case": ("branches",),
    "If": ("then_branch", "else_branch"),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "TPUPartitionedCall": ("f",),
    "While": ("cond", "body"),
}

_REMEDIES = (
    "keep what changes in variables of a layer or of the model, which a checkpoint holds",
    "or move it into the input: data.source and data.transform",
)


@dataclass(frozen=True, slots=True)
class Content:
    """A value, or a table's content, that a traced function has captured.

    Attributes:
        what: describes it for messages.
        operation: one that reads it, a `tf.Operation`.
        values: arrays with all that it holds.
    """

    what: str
    operation: Any
    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.what}{place_of(self.operation)}"


def require_no_hidden_state(function: Any, what: str) -> None:
    """Refuse a traced step with operations whose state no checkpoint holds.

    Random operations and Python code are left to `randomness.py`, variables to `untracked_variables`.

    Args:
        function: a concrete function. What is passed to it, such as the iterator of the training data, may have state.
        what: completes "... uses state that no checkpoint holds", for the message.

    Raises:
        ModelError: names the operations, with the user's lines where they are known.
    """
    graphs = graphs_of(function)
    found = [
        f"{operation.type}{place_of(operation)}"
        for graph in graphs.values()
        for operation in graph.get_operations()
        if operation.op_def.is_stateful and _keeps_state(operation)
    ]
    for tensor, inside in _captures(function):
        if tensor.dtype not in {tf.resource, tf.variant}:
            continue
        readers = list(_readers(inside, graphs))
        if (reader := _reader_of_state(tensor, readers)) is not None:
            found.append(f"{reader.type}{place_of(reader)}")
    if found:
        raise ModelError(
            message(
                f"{what} uses state that no checkpoint holds, so a resumed run would differ",
                details=list(dict.fromkeys(found)),
                hints=_REMEDIES,
            )
        )


def captured_contents(function: Any) -> Iterator[Content]:
    """Yield the tensors, and the contents of the tables, that a concrete function has captured, in their order."""
    graphs = graphs_of(function)
    for tensor, inside in _captures(function):
        readers = list(_readers(inside, graphs))
        # A small value became a constant of the graph.
        if not readers or tensor.dtype == tf.variant or inside.op.type == "Const":
            continue
        if tensor.dtype != tf.resource:
            yield Content(f"{tensor.dtype.name}{list(tensor.shape)}", readers[0], (tensor.numpy(),))
        elif (table := _table(tensor, readers)) is not None:
            yield Content(f"table of {len(table[0])} entries", readers[0], table)


def graphs_of(function: Any) -> dict[str, Any]:
    """The graph of a concrete function, under an empty name, and those of the functions that it calls, by name."""
    library = function.graph._functions
    return {"": function.graph, **{name: each.graph for name, each in library.items() if hasattr(each, "graph")}}


def sorted_table(keys: Any, values: Any) -> tuple[Any, Any]:
    """The content of a table in an order that depends on nothing else: by value, then by key."""
    keys, values = keys.numpy(), values.numpy()
    order = sorted(range(len(keys)), key=lambda index: (values[index], keys[index]))
    return keys[order], values[order]


def _captures(function: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what a function has captured, as tensors outside and inside of it, without its variables."""
    variables = {id(part.handle) for variable in function.graph.variables for part in _with_handles(variable)}
    for tensor, inside in function.graph.captures:
        if id(tensor) not in variables and isinstance(tensor, tf.Tensor) and hasattr(tensor, "numpy"):
            yield tensor, inside


def _with_handles(variable: Any) -> tuple[Any, ...]:
    """The variables whose handles a graph has for a variable; TPUStrategy packs those of all replicas into one."""
    packed = getattr(variable, "_distributed_variables", None)
    return components(variable) if packed is None else (variable, *packed)


def _keeps_state(operation: Any) -> bool:
    kind = operation.type
    if kind in RANDOM_KERNELS or kind in PYTHON_KERNELS or kind in _DATASETS or CLOCK in operation.name:
        return False
    if kind in _KEEP_SOMETHING or kind.startswith(_KEEP_SOMETHING_PREFIX):
        return True
    return not (kind.startswith(_KEEP_NOTHING) or "TPU" in kind)


def _reader_of_state(tensor: Any, readers: Sequence[Any]) -> Any | None:
    """The operation that uses state of a captured resource or variant; None if it has none that can change."""
    of_tables = [reader for reader in readers if reader.type.startswith("LookupTable")]
    others = [reader for reader in readers if reader not in of_tables and not reader.type.startswith(_USE_RESOURCES)]
    writers = [reader for reader in of_tables if reader.type in {"LookupTableInsertV2", "LookupTableRemoveV2"}]
    if others or writers:
        return (others or writers)[0]
    types = _types(of_tables)
    return of_tables[0] if types is not None and _can_be_written(tensor, *types) else None


def _types(readers: Iterable[Any]) -> tuple[Any, Any] | None:
    """The dtypes of a table's keys and values, as operations on it know them; None if they only ask for its size."""
    for reader in readers:
        attributes = reader.node_def.attr
        if reader.type.startswith("LookupTable") and "Tin" in attributes and "Tout" in attributes:
            return reader.get_attr("Tin"), reader.get_attr("Tout")
    return None


def _can_be_written(table: Any, keys: Any, values: Any) -> bool:
    """Whether a lookup table is mutable: inserting nothing is an error where it is not."""
    try:
        tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=tf.zeros([0], keys), values=tf.zeros([0], values))
    except tf.errors.UnimplementedError:
        return False
    except tf.errors.OpError:
        return True
    return True


def _table(handle: Any, readers: Sequence[Any]) -> tuple[Any, Any] | None:
    """Keys and values of a table, sorted; None if the resource is no table, or is filled within the step."""
    types = _types(readers)
    if types is None:
        return None
    try:
        return sorted_table(*tf.raw_ops.LookupTableExportV2(table_handle=handle, Tkeys=types[0], Tvalues=types[1]))
    except NOT_FILLED:
        return None


def _readers(tensor: Any, graphs: dict[str, Any]) -> Iterator[Any]:
    """Yield the operations that read a tensor of a graph, in the functions that it is passed to as well."""
    for operation in tensor.consumers():
        if operation.type == "Identity":
            yield from _readers(operation.outputs[0], graphs)
            continue
        called = [graphs[name] for name in _called(operation) if name in graphs]
        if not called:
            yield operation
            continue
        first = 1 if operation.type in {"If", "StatelessIf", "Case", "StatelessCase"} else 0  # the condition
        for position, given in enumerate(operation.inputs):
            if given is tensor and position >= first:
                for graph in called:
                    yield from _readers(graph.inputs[position - first], graphs)


def _called(operation: Any) -> Iterator[str]:
    """Yield the names of the functions that an operation passes its inputs to."""
    attributes = operation.node_def.attr
    for key in _PASS_INPUTS_TO.get(operation.type.removeprefix("Stateless"), ()):
        value = attributes[key]
        yield from [value.func.name] if value.HasField("func") else [each.name for each in value.list.func]
