"""The user's model: does it build and trace, are its shapes and dtypes a TPU's, and does one step work?"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from flows.doctor.data_sample import Sample
from flows.doctor.finding import Finding
from flows.doctor.graph_scan import Suspect, scan
from flows.doctor.input_speed import first_batch
from flows.doctor.run_file_checks import Target, examples_each
from tasks.foundation.accelerator.strategy import Accelerator, acquire
from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.dataset.class_weight import weighed
from tasks.foundation.model.build import require_test_step
from tasks.foundation.model.keras_steps import hints_about
from tasks.foundation.model.train_step import step_failures, step_of, take_step, trace_step
from tasks.foundation.model.variables import Leaf, layers_of
from tasks.foundation.state.train_state import TrainState, build_train_state
from tasks.foundation.telemetry.events import Silent
from tasks.foundation.telemetry.formatting import duration_words, number_words, size_words
from tasks.init_or_restore.batch_or_example import state_of_examples
from tasks.init_or_restore.model_requirements import require_best, require_callbacks, require_evaluation
from tasks.init_or_restore.weights.loading import load_weights
from tasks.train_segment.loop import may_differ_words

_SHOWN = 4
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


def devices(run: RunFile) -> Accelerator:
    """One replica on the CPU, whatever the run is to train on: the process's only accelerator.

    TensorFlow fixes devices and threads at its first use, which may be in the user's own modules.
    """
    asked = run.spec.accelerator
    return acquire(
        AcceleratorSpec(kind="cpu", intra_op_threads=asked.intra_op_threads, inter_op_threads=asked.inter_op_threads),
        None,
        deterministic=run.spec.train.deterministic,
    )


def builds(run: RunFile, target: Target, sample: Sample, *, begins: bool) -> Finding:
    """Imports and builds the model for one replica on the CPU, and traces its train step; its value is `Built`.

    Args:
        run: the run file.
        target: what it is to train on.
        sample: of its data.
        begins: whether nothing of the run is there yet.

    Raises:
        SourceError: the source yields batches, or may do so.
        ModelError: the user's code or model cannot be used.
    """
    spec = run.spec
    own = devices(run)
    began = time.monotonic()
    # What Keras cannot do on several replicas is to be refused here.
    pretended = replace(own, environment=own.environment.model_copy(update={"replicas": target.replicas}))
    unweighed = sample.zeros(examples_each(run, target))
    batch = weighed(unweighed, spec.train.class_weight)
    if begins:
        features = sample.manifest.features
        state = state_of_examples(spec, features, batch, code_folder=run.folder, accelerator=pretended, training=True)
    else:
        state = build_train_state(spec, code_folder=run.folder, accelerator=pretended, batch=batch, training=True)
    state.accelerator = own
    _require_what_a_beginning_does(run, state, sample, batch, unweighed)
    own_step = step_of(
        state.model,
        batch,
        spec.train.accumulate,
        reference=spec.model.build,
        accelerator=pretended,
        returned=state.returned,
    )

    def step(*parts: Any) -> Any:
        return take_step(own_step, own.strategy, parts)[0]

    tensors = tree.map_structure(tf.convert_to_tensor, batch)
    traced = trace_step(
        tf.function(step, jit_compile=False),
        tensors,
        leaves=state.leaves,
        reference=spec.model.build,
        hints=partial(hints_about, state.model, batch),
    )
    built = Built(
        state=state,
        step=step,
        traced=traced,
        arguments=tree.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), tensors),
        layers=tuple(layer.name for layer in layers_of(state.model)),
        seconds=time.monotonic() - began,
    )
    parameters = sum(count_of(leaf) for leaf in state.leaves if is_parameter(leaf))
    text = f"{spec.model.build}: {parameters:,} parameters; built and traced in {duration_words(built.seconds)}"
    return Finding(check="model", verdict="pass", text=text, value=built)


def _require_what_a_beginning_does(
    run: RunFile, state: TrainState, sample: Sample, batch: Sequence[Any], unweighed: Sequence[Any]
) -> None:
    """Metrics, callbacks, the test step and initial weights, as the run would refuse them when it begins."""
    spec, own = run.spec, state.accelerator
    if spec.data.validation_fraction > 0:
        require_best(spec, state, unweighed)
        require_test_step(state.model, unweighed, reference=spec.model.build, accelerator=own)
        if sample.validation_examples is not None:
            require_evaluation(spec, state, sample.manifest.features, sample.validation_examples)
    if spec.train.callbacks is not None:
        require_callbacks(spec, state, batch, unweighed, code_folder=run.folder)
    load_weights(state, spec.init, code_folder=run.folder, telemetry=Silent(), seed=spec.train.seed)


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
    """Operations of the step that a TPU does not run, though a CPU does, and those whose state no checkpoint holds."""
    found = [each for each in scan(built.traced, built.layers) if each.kind != "float64"]
    threads = built.state.accelerator.environment.intra_op_threads
    unsure = may_differ_words(built.traced, intra_op_threads=threads)
    if not found and unsure:
        return Finding(check="graph", verdict="warn", text="; and ".join(unsure))
    if not found:
        return Finding(check="graph", verdict="pass", text="no strings, no Python code, all shapes static")
    kinds = list(dict.fromkeys(each.kind for each in found))
    return Finding(
        check="graph",
        verdict="fail" if target.is_tpu else "warn",
        text="; and ".join((f"a TPU cannot run {_listed(found)}", *unsure)),
        remedy="; ".join(_REMEDIES[kind] for kind in kinds),
    )


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


def _listed(found: Sequence[Suspect]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(map(str, found[:_SHOWN])) + more


def is_parameter(leaf: Leaf) -> bool:
    """Whether it is the model's own, and not the state of a random source."""
    return leaf.path.startswith("model/") and not leaf.seed


def count_of(leaf: Leaf) -> int:
    """Values of one replica's copy."""
    return int(leaf.components[0].shape.num_elements() or 0)


def _dtype(leaf: Leaf) -> str:
    return str(leaf.components[0].dtype.name)
