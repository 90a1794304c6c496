"""Checks of the user's model: it builds and traces, a TPU supports its operations and dtypes, and one step works.

Find the operations of a train step that run on a CPU but not on a TPU: strings, Python code, dynamic shapes.

XLA on a CPU compiles some operations with dynamic shapes that fail on a TPU, or that a TPU pads and recompiles
repeatedly. TensorFlow's shape inference shows where a dynamic shape starts: at an operation whose output has an unknown
size although the sizes of all its inputs are known.
"""

import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import keras
import tensorflow as tf
from keras import tree

from baton.flows.doctor.data_checks import DataSample, first_batch
from baton.flows.doctor.run_file_checks import Finding, Target, Verdict, examples_per_replica
from baton.tasks.foundation.contracts.identity import require_same_identity
from baton.tasks.foundation.contracts.placement import AcceleratorSpec
from baton.tasks.foundation.contracts.run_file import RunFile
from baton.tasks.foundation.contracts.run_spec import with_examples
from baton.tasks.foundation.dataset.manifest import zero_examples
from baton.tasks.foundation.dataset.model_inputs import ModelInputs, apply_class_weight, model_inputs
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.machine.devices import Accelerator, acquire
from baton.tasks.foundation.model.build import require_test_step
from baton.tasks.foundation.model.code_changes import CodeReason
from baton.tasks.foundation.model.keras_steps import tracing_hints
from baton.tasks.foundation.model.randomness import PYTHON_OPERATIONS, require_exact_draws
from baton.tasks.foundation.model.step import (
    build_train_step,
    op_errors_as_model_error,
    require_xla_step,
    run_train_step,
    trace_train_step,
)
from baton.tasks.foundation.model.user_callbacks import large_state_words
from baton.tasks.foundation.model.variables import Leaf, layers_of, stateful_layers_warning
from baton.tasks.foundation.state.train_state import TrainState, build_train_state
from baton.tasks.foundation.telemetry.events import Silent
from baton.tasks.foundation.telemetry.formatting import duration_words, number_words, size_words
from baton.tasks.foundation.text import counted
from baton.tasks.init_or_restore.model_requirements import (
    build_state_from_examples,
    extremes_of,
    require_best,
    require_callbacks,
    require_evaluation,
    require_extremes,
)
from baton.tasks.init_or_restore.new_run import user_code_identity
from baton.tasks.init_or_restore.weights.loading import load_weights
from baton.tasks.train_segment.fingerprint import nondeterminism_warnings

Kind = Literal["string", "python", "dynamic shape", "float64"]

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
    if node.op in PYTHON_OPERATIONS:
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


_SHOWN = 4
_REMEDIES = {
    "string": "turn strings into numbers in the input pipeline, and remove tf.print",
    "python": "write it with TensorFlow or Keras operations, or move it into the input pipeline",
    "dynamic shape": "keep shapes fixed: multiply by a mask, or use tf.where with three arguments, instead of "
    "selecting elements",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """The model built for one replica.

    Attributes:
        state: the train state at its initial values.
        step: Python function of the parts of a batch that takes one train step.
        traced: the step as a concrete function.
        arguments: `tf.TensorSpec`s of the parts of one replica's batch.
        layers: names of the model's layers.
        seconds: time to build the model and trace its step.
    """

    state: TrainState
    step: Callable[..., Any]
    traced: Any
    arguments: tuple[Any, ...]
    layers: tuple[str, ...]
    seconds: float


def acquire_cpu(run: RunFile, log: RunLog | None) -> Accelerator:
    """Acquire one replica on the CPU as the accelerator of this process, also for a run that trains on TPUs or GPUs.

    Call it before the user's modules are imported: TensorFlow fixes devices and threads at its first use.

    Args:
        log: the run's log; None if it has none yet.
    """
    head = None if log is None else log.head_seen()
    spec = run.spec.accelerator
    return acquire(
        AcceleratorSpec(kind="cpu", intra_op_threads=spec.intra_op_threads, inter_op_threads=spec.inter_op_threads),
        None if head is None else head.environment,
        deterministic=run.spec.train.deterministic,
    )


def check_model(run: RunFile, target: Target, sample: DataSample, *, log: RunLog | None) -> Finding:
    """Import and build the model for one replica on the CPU and trace its train step; the value is a `BuiltModel`.

    Args:
        target: the accelerator to train on.
        log: the run's log; None if it has none yet.

    Raises:
        SourceError: the source yields batches, or probably does.
        ModelError: the user's code or model is invalid.
        IdentityChanged: the code builds another model than the run has been trained with.
    """
    # Of a long source, the number of examples is not known; the sample's is as good to build the model.
    spec = run.spec if run.spec.train.epoch_examples else with_examples(run.spec, _enough(run, sample))
    cpu = acquire_cpu(run, log)
    began = time.monotonic()
    # Keras refuses some models on several replicas, so they are refused here although this process has one replica.
    as_target = replace(cpu, environment=cpu.environment.model_copy(update={"replicas": target.replicas}))
    inputs = model_inputs(spec, sample.manifest.features, run.folder)
    size = examples_per_replica(run, target)
    unweighted = zero_examples(inputs.validation, size)
    batch = apply_class_weight(zero_examples(inputs.train, size), spec.train.class_weight)
    build: dict[str, Any] = {"code_folder": run.folder, "accelerator": as_target, "training": True}
    if log is None:
        state = build_state_from_examples(spec, inputs.train, batch, reading=sample.manifest.reading, **build)
    else:
        state = build_train_state(spec, batch=batch, **build)
        if _divides(run, target):  # or the check of the batch has said it
            now, recorded = user_code_identity(spec, state, run.folder), log.require_head().identity
            code = CodeReason(home=log.home, recorded=recorded, spec=spec, folder=run.folder)
            require_same_identity(recorded, now, home=log.home.uri, code=code)
    state.accelerator = cpu
    doubtful = _check_start(replace(run, spec=spec), state, sample, batch, unweighted, inputs=inputs)
    train_step = build_train_step(
        state.model,
        batch,
        spec.train.accumulate,
        reference=spec.model.build,
        draws=state.draws,
        returned=state.returned,
    )

    def step(*parts: Any) -> Any:
        return run_train_step(train_step, parts, state.draws)[0]

    tensors = tree.map_structure(tf.convert_to_tensor, batch)
    traced = trace_train_step(
        tf.function(step, jit_compile=False),
        tensors,
        leaves=state.leaves,
        draws=state.draws,
        reference=spec.model.build,
        hints=partial(tracing_hints, state.model, batch),
    )
    if not target.is_tpu:
        require_xla_step(state.model, train_step, batch, reference=spec.model.build, draws=state.draws)
    if log is None:  # an existing run goes on with a warning
        require_exact_draws(traced, state.draws, f"{spec.model.build}: train_step")
    built = BuiltModel(
        state=state,
        step=step,
        traced=traced,
        arguments=tree.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), tensors),
        layers=tuple(layer.name for layer in layers_of(state.model)),
        seconds=time.monotonic() - began,
    )
    parameters = sum(count_of(leaf) for leaf in state.leaves if is_parameter(leaf))
    text = f"{spec.model.build}: {parameters:,} parameters; built and traced in {duration_words(built.seconds)}"
    if warning := stateful_layers_warning(state.model, shuffle=spec.data.shuffle):
        doubtful = [*doubtful, warning]
    verdict: Verdict = "warn" if doubtful else "pass"
    return Finding(verdict=verdict, text="; ".join([text, *doubtful]), value=built)


def _divides(run: RunFile, target: Target) -> bool:
    """Whether each replica gets equal parts of a batch."""
    return run.spec.train.global_batch_size % (target.replicas * run.spec.train.accumulate) == 0


def _enough(run: RunFile, sample: DataSample) -> int:
    """The sample's number of examples, or a batch of them: the run itself refuses an epoch without a whole batch."""
    return max(sample.manifest.train_examples, run.spec.train.global_batch_size)


def _check_start(
    run: RunFile,
    state: TrainState,
    sample: DataSample,
    batch: Sequence[Any],
    unweighted: Sequence[Any],
    *,
    inputs: ModelInputs,
) -> list[str]:
    """Check metrics, callbacks, the test step and initial weights as a run does at its start; return warnings."""
    spec = run.spec
    if spec.data.is_evaluated_on:
        require_best(spec, state, unweighted)
        require_test_step(state.model, unweighted, reference=spec.model.build, draws=state.draws)
        if sample.validation_examples:
            require_evaluation(spec, state, inputs.validation, sample.validation_examples)
    extremes = extremes_of(spec, sample.ref, sample.storage)
    require_extremes(state, extremes, reference=spec.model.build, size=len(tree.flatten(tuple(batch))[0]))
    callbacks: tuple[keras.callbacks.Callback, ...] = ()
    if spec.train.callbacks is not None:
        callbacks = require_callbacks(spec, state, batch, unweighted, code_folder=run.folder).callbacks
    load_weights(state, spec.init, code_folder=run.folder, telemetry=Silent(), seed=spec.train.seed)
    return list(filter(None, map(large_state_words, callbacks)))


def check_dtype(built: BuiltModel, target: Target) -> Finding:
    """Check the dtype policies of the layers, and look for float64 operations."""
    model = built.state.model
    policies = Counter(layer.dtype_policy.name for layer in layers_of(model) if layer is not model)
    names = ", ".join(name for name, _ in policies.most_common())
    doubles = [leaf.path for leaf in built.state.leaves if leaf.trainable and _dtype(leaf) == "float64"]
    if "float64" in policies or doubles:
        return Finding(
            verdict="fail" if target.is_tpu else "warn",
            text=f"{names}: a TPU emulates float64, which is slow",
            remedy="use float32 or mixed_bfloat16, see keras.config.set_dtype_policy",
        )
    found = [each for each in find_unsupported_ops(built.traced, built.layers) if each.kind == "float64"]
    if found and target.is_tpu:
        return Finding(
            verdict="warn",
            text=f"{names}, but {_listed(found)} compute in float64, which a TPU emulates slowly",
            remedy="cast to float32",
        )
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if scaled or any("float16" in name and "bfloat16" not in name for name in policies):
        return Finding(
            verdict="warn",
            text=f"{names}: float16 needs loss scaling, and a step that overflows is skipped",
            remedy="use mixed_bfloat16, which TPUs compute in and which needs no loss scaling",
        )
    is_full = target.is_tpu and set(policies) == {"float32"}
    remedy = "mixed_bfloat16 would halve the activations; TPUs compute in bfloat16 anyway" if is_full else ""
    return Finding(verdict="pass", text=names or "no layers", remedy=remedy)


def check_graph(built: BuiltModel, target: Target) -> Finding:
    """Look for operations that a TPU cannot run, and for operations whose state no checkpoint saves."""
    found = [each for each in find_unsupported_ops(built.traced, built.layers) if each.kind != "float64"]
    threads = built.state.accelerator.environment.intra_op_threads
    may_differ = nondeterminism_warnings(built.traced, intra_op_threads=threads)
    if not found and may_differ:
        return Finding(verdict="warn", text="; and ".join(may_differ))
    if not found:
        return Finding(verdict="pass", text="no strings, no Python code, all shapes are static")
    kinds = list(dict.fromkeys(each.kind for each in found))
    return Finding(
        verdict="fail" if target.is_tpu else "warn",
        text="; and ".join((f"a TPU cannot run {_listed(found)}", *may_differ)),
        remedy="; ".join(_REMEDIES[kind] for kind in kinds),
    )


def check_step(run: RunFile, target: Target, sample: DataSample, built: BuiltModel, needed: int | None) -> Finding:
    """Take one training step with examples of the sample on this CPU.

    Args:
        target: the accelerator to train on.
        needed: bytes that the step needs; None if unknown.

    Raises:
        ModelError: an operation fails.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed is not None and needed > memory:
        text = f"the step needs {size_words(needed)}, and this machine has {size_words(memory)}"
        return Finding(verdict="skipped", text=text, remedy="run the doctor on a larger machine")
    per_replica = examples_per_replica(run, target)
    batch = first_batch(run, sample, per_replica=per_replica)
    began = time.monotonic()
    with op_errors_as_model_error(f"{run.spec.model.build}: train_step failed on the first batch of the sample"):
        loss = built.traced(*batch)
    seconds = time.monotonic() - began
    text = f"{counted(per_replica, 'example')} on this CPU in {duration_words(seconds)}"
    if loss is None:
        return Finding(verdict="pass", text=text)
    value = float(tf.reduce_sum(loss))
    if not math.isfinite(value):
        return Finding(
            verdict="fail",
            text=f"{text}: the loss is {value}",
            remedy="lower the learning rate, clip gradients, or check the data",
        )
    return Finding(verdict="pass", text=f"{text}: loss {number_words(value)}")


def _listed(found: Sequence[UnsupportedOp]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(map(str, found[:_SHOWN])) + more


def is_parameter(leaf: Leaf) -> bool:
    """Return whether the leaf belongs to the model and is not the state of a random generator."""
    return leaf.path.startswith("model/") and not leaf.seed


def count_of(leaf: Leaf) -> int:
    """Return the number of values in one replica's copy."""
    return int(leaf.components[0].shape.num_elements() or 0)


def _dtype(leaf: Leaf) -> str:
    return str(leaf.components[0].dtype.name)
