"""The user's model: does it build and trace, can a TPU run its step, does it fit, and does one step work?"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from flows.doctor.finding import Finding, Verdict
from flows.doctor.planning import Target, examples_each
from flows.doctor.sampling import Sample, first_batch
from tasks.foundation.accelerator.strategy import acquire
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.contracts.run_spec import AcceleratorSpec
from tasks.foundation.errors import ModelError
from tasks.foundation.model.graph_scan import Suspect, scan
from tasks.foundation.model.liveness import peak_bytes
from tasks.foundation.model.stepping import step_failures, take_step, trace_step
from tasks.foundation.model.variables import Leaf, layers_of
from tasks.foundation.model.xla import compiled_step
from tasks.foundation.state.train_state import TrainState, build_train_state
from tasks.foundation.telemetry.wording import duration_words, number_words, size_words

# Shares of a replica's memory.
_COMFORTABLE, _FULL = 0.7, 0.95
_SHOWN = 4
# A CPU has no bfloat16: XLA's program for it keeps such values as float32 besides, and measured so much more.
_TOO_MUCH = 3
_HALF = f", which keeps bfloat16 as float32 besides: up to {_TOO_MUCH} times too much"
_REMEDIES = {
    "string": "turn strings into numbers in the input pipeline, and leave tf.print out",
    "python": "write it with TensorFlow or Keras operations, or move it into the input pipeline",
    "dynamic shape": "keep shapes fixed: multiply by a mask, or use tf.where with three arguments, instead of picking "
    "elements out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model as one replica has it.

    Attributes:
        state: the train state, at its initial values.
        step: a Python function of the parts of a batch.
        traced: the same as a concrete function.
        arguments: `tf.TensorSpec`s of the parts, for one replica's batch.
        layers: names of the model's layers.
        seconds: to build and to trace.
    """

    state: TrainState
    step: Callable[..., Any]
    traced: Any
    arguments: tuple[Any, ...]
    layers: tuple[str, ...]
    seconds: float


def builds(run: RunFile, target: Target, sample: Sample) -> Finding:
    """Imports and builds the model for one replica on the CPU, and traces its train step; its value is `Built`.

    Raises:
        ModelError: the user's code or model cannot be used.
    """
    spec = run.spec
    asked = spec.accelerator
    # One replica on the CPU, whatever the run is to train on: the process's only accelerator.
    own = acquire(
        AcceleratorSpec(kind="cpu", intra_op_threads=asked.intra_op_threads, inter_op_threads=asked.inter_op_threads),
        None,
    )
    began = time.monotonic()
    # What Keras cannot do on several replicas is to be refused here.
    pretended = replace(own, environment=own.environment.model_copy(update={"replicas": target.replicas}))
    batch = sample.zeros(examples_each(run, target))
    state = build_train_state(spec, code_folder=run.folder, accelerator=pretended, batch=batch)
    state.accelerator = own

    def step(*parts: Any) -> Any:
        return take_step(state.model, own.strategy, parts)

    tensors = tree.map_structure(tf.convert_to_tensor, batch)
    traced = trace_step(tf.function(step, jit_compile=False), tensors, leaves=state.leaves, reference=spec.model.build)
    built = Built(
        state=state,
        step=step,
        traced=traced,
        arguments=tree.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), tensors),
        layers=tuple(layer.name for layer in layers_of(state.model)),
        seconds=time.monotonic() - began,
    )
    parameters = sum(_count(leaf) for leaf in state.leaves if leaf.path.startswith("model/"))
    text = f"{spec.model.build}: {parameters:,} parameters; built and traced in {duration_words(built.seconds)}"
    return Finding(check="model", verdict="pass", text=text, value=built)


def dtypes(built: Built, target: Target) -> Finding:
    """The dtype policies of the layers, and what computes in float64."""
    model = built.state.model
    policies = Counter(layer.dtype_policy.name for layer in layers_of(model) if layer is not model)
    told = ", ".join(name for name, _ in policies.most_common())
    doubles = [leaf.path for leaf in built.state.leaves if leaf.trainable and _dtype(leaf) == "float64"]
    if "float64" in policies or doubles:
        return Finding(
            check="dtype",
            verdict="fail" if target.is_tpu else "warn",
            text=f"{told}: a TPU has no float64 and imitates it, at a small share of its speed",
            remedy="use float32, or mixed_bfloat16: keras.config.set_dtype_policy",
        )
    found = [each for each in scan(built.traced, built.layers) if each.kind == "float64"]
    if found and target.is_tpu:
        return Finding(
            check="dtype",
            verdict="warn",
            text=f"{told}; but {_listed(found)} compute in float64, which a TPU only imitates",
            remedy="cast to float32",
        )
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if scaled or any("float16" in name and "bfloat16" not in name for name in policies):
        return Finding(
            check="dtype",
            verdict="warn",
            text=f"{told}: float16 needs its loss scaled, and what overflows skips steps",
            remedy="use mixed_bfloat16, which TPUs compute in and which needs no scaling",
        )
    is_full = target.is_tpu and set(policies) == {"float32"}
    remedy = "the policy mixed_bfloat16 would halve the activations, and TPUs compute in it anyway" if is_full else ""
    return Finding(check="dtype", verdict="pass", text=told or "no layers", remedy=remedy)


def static_shapes(built: Built, target: Target) -> Finding:
    """Operations of the step that a TPU does not run, though a CPU does."""
    found = [each for each in scan(built.traced, built.layers) if each.kind != "float64"]
    if not found:
        return Finding(check="graph", verdict="pass", text="no strings, no Python code, all shapes static")
    kinds = list(dict.fromkeys(each.kind for each in found))
    return Finding(
        check="graph",
        verdict="fail" if target.is_tpu else "warn",
        text=f"a TPU cannot run {_listed(found)}",
        remedy="; ".join(_REMEDIES[kind] for kind in kinds),
    )


def compiles(run: RunFile, target: Target, built: Built) -> Finding:
    """The step through XLA; its value is the peak of its memory in bytes.

    Raises:
        ModelError: XLA refuses the step, which is to run on a TPU.
    """
    began = time.monotonic()
    try:
        hlo = compiled_step(built.step, built.arguments, reference=run.spec.model.build, layers=built.layers)
    except ModelError as fault:
        if target.is_tpu:
            raise
        return Finding(check="xla", verdict="warn", text=str(fault))
    text = f"XLA compiles the step, for this CPU in {duration_words(time.monotonic() - began)}"
    return Finding(check="xla", verdict="pass", text=text, value=peak_bytes(hlo))


def fits(built: Built, peak: int | None, target: Target) -> Finding:
    """The memory of one replica; its value is the bytes needed.

    Variables are counted one by one. Activations, gradients and what else the step holds for a time are the peak of
    `liveness.peak_bytes`. Nothing is added for a TPU's padding, and nothing taken off for its better fusions; of a
    model that computes in bfloat16 the peak may be three times too much, and fails only if a third is too much, too.
    """
    variables = sum(_bytes(leaf) for leaf in built.state.leaves)
    model = sum(_bytes(leaf) for leaf in built.state.leaves if leaf.path.startswith("model/"))
    batch = sum(math.prod(each.shape) * each.dtype.size for each in tree.flatten(built.arguments))
    text = f"{size_words(model)} of parameters, {size_words(variables - model)} of optimizer and metrics, "
    if peak is None:
        return Finding(check="memory", verdict="skipped", text=f"{text}activations not known: XLA refused the step")
    needed = variables + batch + peak
    is_half = any(layer.dtype_policy.compute_dtype == "bfloat16" for layer in layers_of(built.state.model))
    method = "by liveness over XLA's CPU program" + (_HALF if is_half else "")
    text += f"about {size_words(batch + peak)} of batch, activations and gradients ({method})"
    if target.tpu is None:
        return Finding(check="memory", verdict="pass", text=f"{text}; no TPU type to compare with", value=needed)
    share = needed / target.tpu.hbm_bytes
    text += f": {_percent(share)} of a replica's {size_words(target.tpu.hbm_bytes)}"
    if share <= _COMFORTABLE:
        return Finding(check="memory", verdict="pass", text=text, value=needed)
    remedy = "a smaller train.global_batch_size, mixed_bfloat16, keras.RematScope, or a TPU with more memory a replica"
    if variables > _FULL * target.tpu.hbm_bytes:
        remedy = "a smaller model or optimizer, or a TPU with more memory a replica: every replica holds all variables"
    # What may be three times too much is no reason to refuse.
    least = (variables + batch + peak // (_TOO_MUCH if is_half else 1)) / target.tpu.hbm_bytes
    verdict: Verdict = "fail" if least > _FULL else "warn"
    return Finding(check="memory", verdict=verdict, text=text, remedy=remedy, value=needed)


def one_step(run: RunFile, target: Target, sample: Sample, built: Built, needed: int | None) -> Finding:
    """One step with examples of the sample, on this CPU.

    Raises:
        ModelError: an operation fails.
    """
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed is not None and needed > room:
        text = f"it needs {size_words(needed)}, and this machine has {size_words(room)}"
        return Finding(check="step", verdict="skipped", text=text, remedy="run the doctor on a larger machine")
    each = examples_each(run, target)
    batch = first_batch(run, sample, each=each)
    began = time.monotonic()
    with step_failures(f"{run.spec.model.build}: train_step failed on the first batch of the sample"):
        loss = built.traced(*batch)
    seconds = time.monotonic() - began
    text = f"{each} examples on this CPU in {duration_words(seconds)}"
    if loss is None:
        return Finding(check="step", verdict="pass", text=text)
    told = float(tf.reduce_sum(loss))
    if not math.isfinite(told):
        return Finding(
            check="step",
            verdict="fail",
            text=f"{text}: the loss is {told}",
            remedy="lower the learning rate, clip gradients, or look at the data",
        )
    return Finding(check="step", verdict="pass", text=f"{text}: loss {number_words(told)}")


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "under 0.1%"  # noqa: PLR2004 - what one digit shows


def _listed(found: Sequence[Suspect]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(map(str, found[:_SHOWN])) + more


def _count(leaf: Leaf) -> int:
    return int(leaf.components[0].shape.num_elements())


def _dtype(leaf: Leaf) -> str:
    return str(leaf.components[0].dtype.name)


def _bytes(leaf: Leaf) -> int:
    return _count(leaf) * int(leaf.components[0].dtype.size)
