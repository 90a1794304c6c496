"""The step as it was traced: its fingerprint, which shows that another process traced another step, and its warnings.

Python code in a model runs while its step is traced. Values that it reads, such as the time, a counter or a file,
become part of the step: as constants of its graph, or as tensors and tables that the graph has captured. So a process
that resumes the run may trace another step without an error. The log has three digests of the step of each commit: of
the whole graph, of its operations without the values, and, in some groups, of the values. Where only values differ, the
run would go on as another one without a word, so it is refused, and the groups tell where.

What Python code reads in the input pipeline is in no traced step. Of several hosts, each could train on other examples:
all of them pass the same few through their pipelines before the first step, and compare.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from baton.tasks.foundation.contracts.log_entry import Commit, Environment, TracedStep
from baton.tasks.foundation.dataset.evaluation_sets import set_batches
from baton.tasks.foundation.dataset.model_inputs import ModelInputs, map_class_weight
from baton.tasks.foundation.dataset.read import training_dataset
from baton.tasks.foundation.dataset.shards import finished, original_read_errors
from baton.tasks.foundation.dataset.transforms import transform_errors
from baton.tasks.foundation.errors import IdentityChanged, ModelError
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.model.hidden_state import captured_contents, graphs_of
from baton.tasks.foundation.model.keras_steps import IN_THE_GRAPH, place_of, summed_gradients_words
from baton.tasks.foundation.model.metrics import MOST_VALUES
from baton.tasks.foundation.model.randomness import nodes_of, stateful_operations
from baton.tasks.foundation.model.step import compile_words
from baton.tasks.foundation.state.train_state import TrainState
from baton.tasks.foundation.state.warm_state import Recipe, peek_results
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.telemetry.events import Note, Sink
from baton.tasks.foundation.text import command, listed, message

# Attributes with names and counters of a process, and those that only placement and debugging use.
_NOT_COMPUTED = frozenset(
    {
        "_class",
        "_gradient_op_type",
        "_user_specified_name",
        "config",
        "config_proto",
        "container",
        "executor_type",
        "shared_name",
        "token",
    }
)
_NUMBER = re.compile(rb"\d+")
# TensorFlow's constant of a replica's number, which differs between hosts that trace the same step.
_REPLICA_NUMBER = re.compile(r"(^|/)replica_id_in_sync_group(_\d+)?$")
_DIGITS = 32
# Number of log entries to read back for a commit of another process.
_MAX_ENTRIES = 16
# The contents are recorded as so many digests at most, each of some neighbors, so that a difference can be found.
_MOST_GROUPS = 32
_GROUP_DIGITS = 8
_SHOWN = 3
_ACCEPTED = "model."
_COMPARED = 8  # examples that hosts compare
_NOT_OF_TRACES = {
    *("intra_op_threads", "inter_op_threads", "hash_seed", "processor", "cpu_features", "variables", "keras"),
}

_READ_WHILE_TRACED = (
    "let the code read what it read then; what it reads while the step is traced becomes part of it: a file, the order "
    "of a set (use sorted), the time, a random number, a counter"
)
_REMEDIES = (
    _READ_WHILE_TRACED,
    "or keep the value in a variable of a layer, which a checkpoint holds",
    "or continue with the change from the newest checkpoint: " + command("run", ("accept", "model")),
)


@dataclass(frozen=True, slots=True)
class _StepConstant:
    """A constant of a traced step, or what it has captured."""

    digest: bytes
    described: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced step: what the log records of it, and what it computes with besides variables."""

    step: TracedStep
    contents: tuple[_StepConstant, ...]

    def difference_from(self, recorded: TracedStep) -> str:
        """The first contents that differ from those of a step with the same structure, as they are now."""
        number, _, groups = recorded.contents.partition(":")
        if number != str(len(self.contents)):
            return f"{number} constants and captured values became {len(self.contents)}"
        size = _size_of_group(len(self.contents))
        now = self.step.contents.partition(":")[2]
        for group in range(len(now) // _GROUP_DIGITS):
            place = slice(group * _GROUP_DIGITS, (group + 1) * _GROUP_DIGITS)
            if groups[place] != now[place]:
                found = [each.described() for each in self.contents[group * size : (group + 1) * size]]
                # Those of the user's lines, if there are any.
                shown = [each for each in found if not each.endswith(IN_THE_GRAPH)] or found
                return "; or ".join(dict.fromkeys(shown[:_SHOWN]))
        return "nothing"


def traced_step(function: Any, *, environment: Environment, identity: dict[str, Any]) -> Traced:
    """Compute the fingerprint of a concrete function, and a digest of the environment and identity it was traced for.

    Args:
        function: the traced loop.
    """
    # Threads, processor and variables do not influence tracing; another hash seed or configuration of Keras must not
    # hide what it changes.
    kept = environment.model_dump(exclude=_NOT_OF_TRACES)
    circumstances = json.dumps([kept, identity], sort_keys=True, default=str).encode()
    graph = function.graph.as_graph_def()
    digests = _Digests({each.signature.name: each for each in graph.library.function})
    whole, structure = digests.of_nodes(graph.node, arguments=(), results=(), function="")
    contents = (
        *(_StepConstant(_digest_of(each.values), partial(str, each)) for each in captured_contents(function)),
        *(_StepConstant(digest, partial(_constant_words, function, *place)) for place, digest in digests.constants),
    )
    return Traced(
        TracedStep(
            fingerprint=whole[:_DIGITS],
            circumstances=hashlib.sha256(circumstances).hexdigest()[:_DIGITS],
            structure=structure[:_DIGITS],
            contents=_recorded([each.digest for each in contents]),
        ),
        contents,
    )


def compare_with_log(
    log: RunLog, number: int, traced: Traced, *, reference: str, accept: Sequence[str] = (), telemetry: Sink
) -> IdentityChanged | None:
    """Compare with the newest commit that has the same environment and identity.

    A step with other operations causes a warning, one that computes with other values is refused.

    Args:
        number: the log entry to start with, reading backwards.
        reference: the user's name of the model, for messages.
        accept: identity keys that may differ; one of the model lets other values pass, with a note.
        telemetry: receives warnings.

    Returns:
        The refusal; None if training may go on.
    """
    now = traced.step
    for earlier in range(number, max(number - _MAX_ENTRIES, -1), -1):
        body = log.entry(earlier).body
        if not isinstance(body, Commit) or body.traced is None:
            continue
        before, step = body.traced, body.checkpoint.step
        if before.circumstances != now.circumstances:
            continue
        if before.structure == now.structure and before.contents != now.contents:
            what = (
                f"{reference}: the train step computes with other values than the one that committed step {step}, from "
                f"the same code and settings: {traced.difference_from(before)}"
            )
            if not any(key.startswith(_ACCEPTED) for key in accept):
                return IdentityChanged(message(what, hints=_REMEDIES))
            telemetry.emit(Note(text=f"from step {step} on, as accepted: {what}"))
        elif before.fingerprint != now.fingerprint:
            telemetry.emit(
                Note(
                    text=f"this process traced another train step than the one that committed step "
                    f"{step}, from the same code and settings: the run can differ from an "
                    "uninterrupted one. Python code of the model reads something that changes while the step is "
                    "traced, such as the time, a random number, a counter or a file; make it a constant or a variable",
                    warning=True,
                )
            )
        return None
    return None


def pipeline_digests(recipe: Recipe, inputs: ModelInputs, storage: Storage) -> dict[str, dict[str, str]]:
    """What this process's input pipelines make of the first examples, as if it fed all replicas.

    Args:
        recipe: what is trained, on which dataset.
        inputs: the transforms of the examples.

    Returns:
        A digest for x, y and sample_weight of the training and the validation examples; or the error of a transform.

    Raises:
        DamagedDataset, StorageError: the examples cannot be read.
    """
    spec, functions = recipe.spec, inputs.training_functions
    # A transform of batches needs a whole one.
    whole = functions is not None and functions.batch is not None
    training = training_dataset(
        storage,
        recipe.dataset,
        seed=spec.train.seed,
        global_batch_size=spec.train.global_batch_size if whole else min(_COMPARED, spec.train.global_batch_size),
        window_shards=1,  # one shard is enough
        first_batch=0,
        drop_remainder=spec.train.drop_remainder,
        shuffle=spec.data.shuffle,
        functions=functions,
    )
    sets = {"training": finished(map_class_weight(training, spec.train.class_weight).take(1), autotuned=False)}
    if spec.data.has_validation:
        of_one, seed = inputs.validation_function, spec.train.seed
        held_out = set_batches(storage, recipe.dataset, on="validation", batch_size=1, function=of_one, seed=seed)
        sets["validation"] = held_out.take(_COMPARED)
    try:
        with original_read_errors(), transform_errors(spec.data, "before the first step"):
            return {name: _digests_of_parts(list(batches)) for name, batches in sets.items()}
    except ModelError as fault:  # all hosts hear of it; where it is the same on all, the first step raises it
        return {"error": {"message": str(fault)}}


def _digests_of_parts(batches: Sequence[Any]) -> dict[str, str]:
    parts = zip(*batches, strict=True)
    return {
        name: _digest_of(value.numpy() for each in part for value in tf.nest.flatten(each)).hex()[:_DIGITS]
        for name, part in zip(("x", "y", "sample_weight"), parts, strict=False)
    }


def _size_of_group(number: int) -> int:
    return max(1, -(-number // _MOST_GROUPS))


def _recorded(digests: Sequence[bytes]) -> str:
    size = _size_of_group(len(digests))
    groups = [b"".join(digests[start : start + size]) for start in range(0, len(digests), size)]
    return f"{len(digests)}:" + "".join(hashlib.sha256(group).hexdigest()[:_GROUP_DIGITS] for group in groups)


def _digest_of(arrays: Iterable[Any]) -> bytes:
    """The sha256 of arrays of numbers or bytes."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        for part in array.ravel() if array.dtype == object else (array.tobytes(),):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _constant_words(function: Any, name_of_function: str, name: str) -> str:
    """A constant of a function's graph, and the line that made it, for a message."""
    graph = graphs_of(function).get(name_of_function)
    if graph is None:
        return f"a constant ({name} in the graph)"
    operation = graph.get_operation_by_name(name)
    value = tf.get_static_value(operation.outputs[0])
    if value is None:
        return f"a constant{place_of(operation)}"
    few = value.size <= _SHOWN
    return f"{value.tolist() if few else f'{value.dtype}{list(value.shape)}'}{place_of(operation)}"


class _Digests:
    """Digests of the functions of a graph, each computed once, with and without the values of its constants.

    They are equal in two processes that trace the same code. Functions and nodes are identified by operation and
    position. Their names are ignored, because these contain counters of the process.

    Attributes:
        constants: place and digest of each constant: the name of its function, and its own. In the order of the nodes,
            functions where they are used first.
    """

    def __init__(self, library: dict[str, Any]) -> None:
        self._library = library
        self._known: dict[str, tuple[str, str]] = {}
        self.constants: list[tuple[tuple[str, str], bytes]] = []

    def of_nodes(
        self, nodes: Sequence[Any], *, arguments: Iterable[str], results: Iterable[str], function: str
    ) -> tuple[str, str]:
        """Digests of a body with and without values: its nodes in order, their inputs by position, then its results."""
        positions = {name: f"a{index}" for index, name in enumerate(arguments)}
        positions |= {node.name: f"n{index}" for index, node in enumerate(nodes)}
        whole, structure = hashlib.sha256(), hashlib.sha256()

        def update(part: tuple[bytes, bytes]) -> None:
            whole.update(part[0])
            structure.update(part[1])

        for node in nodes:
            ops = self._function(node.op) if node.op in self._library else (node.op, node.op)
            device = _device(node.device)
            update((f"\n{ops[0]} {device}".encode(), f"\n{ops[1]} {device}".encode()))
            # Control inputs have no order.
            reads = [_by_position(read, positions) for read in node.input]
            waits = sorted(read for read in reads if read.startswith("^"))
            inputs = " ".join([*(read for read in reads if not read.startswith("^")), *waits]).encode()
            update((inputs, inputs))
            for key in sorted(node.attr):
                if key in _NOT_COMPUTED or (key == "value" and _REPLICA_NUMBER.search(node.name)):
                    continue
                name = f"\n{key}=".encode()
                update((name, name))
                if node.op == "Const" and key == "value":
                    value, shape = self._constant(node.attr[key].tensor)
                    self.constants.append(((function, node.name), hashlib.sha256(value).digest()))
                    update((self._value(node.attr[key])[0], shape))
                else:
                    update(self._value(node.attr[key]))
        end = "\n".join(_by_position(each, positions) for each in results).encode()
        update((end, end))
        return whole.hexdigest(), structure.hexdigest()

    def _function(self, name: str) -> tuple[str, str]:
        if name not in self._library:
            return "?", "?"
        if name not in self._known:
            self._known[name] = ("itself", "itself")
            function = self._library[name]
            self._known[name] = self.of_nodes(
                function.node_def,
                arguments=[argument.name for argument in function.signature.input_arg],
                results=[function.ret[output.name] for output in function.signature.output_arg],
                function=name,
            )
        return self._known[name]

    def _constant(self, tensor: Any) -> tuple[bytes, bytes]:
        """A constant's value, and its dtype and shape."""
        shape = f"{tensor.dtype} {[each.size for each in tensor.tensor_shape.dim]}".encode()
        if tensor.dtype == tf.string.as_datatype_enum and not tensor.tensor_shape.dim:
            return _without_numbers(tensor), shape
        return bytes(tensor.SerializeToString(deterministic=True)), shape

    def _value(self, value: Any) -> tuple[bytes, bytes]:
        if value.HasField("func"):
            whole, structure = self._function(value.func.name)
            return whole.encode(), structure.encode()
        if value.HasField("list") and value.list.func:
            found = [self._function(each.name) for each in value.list.func]
            return " ".join(each[0] for each in found).encode(), " ".join(each[1] for each in found).encode()
        if value.HasField("tensor") and value.tensor.dtype == tf.string.as_datatype_enum:
            text = _without_numbers(value.tensor)
            return text, text
        plain = bytes(value.SerializeToString(deterministic=True))
        return plain, plain


def _without_numbers(tensor: Any) -> bytes:
    """Strings as they are in every process: messages of assertions contain node names."""
    return b" ".join(_NUMBER.sub(b"#", text) for text in tensor.string_val)


def _by_position(read: str, positions: dict[str, str]) -> str:
    """An input, such as `a/b:1`, `^a/b`, or `a/b:output:0` in a function, by the position of its node."""
    mark = "^" if read.startswith("^") else ""
    name, colon, output = read.removeprefix("^").partition(":")
    return f"{mark}{positions.get(name, '?')}{colon}{output}"


def _device(name: str) -> str:
    """A device name without the part that identifies the process."""
    return name[name.find("/device:") :] if "/device:" in name else ""


# Kernels that add floats in the order in which their threads finish, even with deterministic operations turned on.
_UNORDERED_SUMS = frozenset({"Bincount", "DenseBincount", "RaggedBincount", "SparseBincount"})


def nondeterminism_warnings(function: Any, *, intra_op_threads: int) -> tuple[str, ...]:
    """Why a resumed or repeated run can differ: one message for each reason.

    Args:
        function: the traced loop, a concrete function.
        intra_op_threads: number of threads that one operation may use.
    """
    words = []
    unsaved = stateful_operations(function)
    if unsaved:
        words.append(
            f"{listed(unsaved)} draw from TensorFlow's own random state or run Python code, and no checkpoint holds "
            "that state: a resumed run can differ. Draw with keras.random and a SeedGenerator, or with "
            "tf.random.Generator; keep the state of Python code in variables"
        )
    unordered = sorted({node.name for node in nodes_of(function) if _sums_in_any_order(node)})
    if unordered and intra_op_threads > 1:
        words.append(
            f"{listed(unordered)}: a weighted bincount adds floats in the order in which its {intra_op_threads} "
            "threads finish, also with train.deterministic: two runs can differ. Use "
            "tf.math.unsorted_segment_sum, or set accelerator.intra_op_threads: 1"
        )
    return tuple(words)


def _sums_in_any_order(node: Any) -> bool:
    return node.op in _UNORDERED_SUMS and tf.as_dtype(node.attr["T"].type).is_floating


def step_notes(state: TrainState, divided: int, *, reference: str, masked: bool) -> Iterator[Note]:
    """Yield notes about a train step that has just been traced.

    Args:
        state: whose model's step it is.
        divided: number of losses that Keras divided by the number of replicas while it was traced.
        masked: whether a Keras mask reaches the loss of micro-batches.
    """
    summed = summed_gradients_words(state.model, divided, reference=reference, replicas=state.accelerator.replicas)
    if summed and state.step == 0:  # once in a run
        yield Note(text=summed)
    for words in compile_words(state.model, state.accelerator):
        yield Note(text=f"{reference}: {words}")
    ignored = () if state.returned is None else state.returned.ignored
    if ignored:
        yield Note(
            text=f"{reference}: train_step returns {listed(ignored)}, which are not logged: each is no number, has "
            f"one for each example, or more than {MOST_VALUES}; return their means",
            warning=True,
        )
    for words in peek_results(state).words():
        yield Note(text=f"{reference}: {words}")
    if masked:
        yield Note(
            text=f"{reference}: a Keras mask reaches the loss, which is then a mean over what the mask keeps of each "
            "micro-batch (train.accumulate), and not of the whole batch",
            warning=True,
        )
