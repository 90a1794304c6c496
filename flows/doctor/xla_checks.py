"""Checks of the step as XLA compiles it: that it compiles, and that it fits into a replica's memory."""

import math
import time

from keras import tree

from flows.doctor.finding import Finding, Verdict
from flows.doctor.liveness import peak_bytes
from flows.doctor.model_checks import BuiltModel, count_of, is_parameter
from flows.doctor.run_file_checks import Target
from flows.doctor.xla_program import compiled_step
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.errors import ModelError
from tasks.foundation.model.variables import Leaf, layers_of
from tasks.foundation.telemetry.formatting import duration_words, size_words

# Shares of a replica's memory.
_COMFORTABLE, _FULL = 0.7, 0.95
# A CPU has no bfloat16, so XLA's program for it also keeps a float32 copy of such values: up to three times the memory.
_OVERESTIMATE = 3
_BFLOAT16_NOTE = f", which also keeps bfloat16 values as float32: up to {_OVERESTIMATE} times too much"


def check_xla(run: RunFile, target: Target, built: BuiltModel) -> Finding:
    """Compile the step with XLA; the finding's value is the step's peak memory in bytes, without its arguments.

    Args:
        run: the run file.
        target: the accelerator to train on.
        built: the model.

    Raises:
        ModelError: XLA refuses the step, and the target is a TPU.
    """
    began = time.monotonic()
    try:
        hlo = compiled_step(built.step, built.arguments, reference=run.spec.model.build, layers=built.layers)
    except ModelError as error:
        if target.is_tpu:
            raise
        return Finding(check="xla", verdict="warn", text=str(error))
    text = f"XLA compiles the step, in {duration_words(time.monotonic() - began)} for this CPU"
    return Finding(check="xla", verdict="pass", text=text, value=peak_bytes(hlo))


def check_memory(built: BuiltModel, peak: int | None, target: Target) -> Finding:
    """Estimate the memory of one replica; the finding's value is the bytes needed.

    Variables are counted exactly. The memory of activations, gradients and other temporary values is the peak from
    `liveness.peak_bytes`. The padding and the better fusions of a TPU are not considered. For a model that computes in
    bfloat16 the peak may be three times too high, so the check fails only if a third of it does not fit either.
    Evaluating takes no more, because it uses the same variables. A commit copies what it saves into the host's memory.

    Args:
        built: the model.
        peak: peak memory of the step in bytes, from `check_xla`; None if unknown.
        target: the accelerator to train on.
    """
    variables = sum(_bytes(leaf) for leaf in built.state.leaves)
    model = sum(_bytes(leaf) for leaf in built.state.leaves if is_parameter(leaf))
    batch = sum(math.prod(each.shape) * each.dtype.size for each in tree.flatten(built.arguments))
    text = f"{size_words(model)} of parameters, {size_words(variables - model)} of optimizer and metrics, "
    if peak is None:
        return Finding(check="memory", verdict="skipped", text=f"{text}activations unknown: XLA refused the step")
    needed = variables + batch + peak
    snapshot = sum(_bytes(leaf) * (target.replicas if leaf.per_replica else 1) for leaf in built.state.leaves)
    is_half = any(layer.dtype_policy.compute_dtype == "bfloat16" for layer in layers_of(built.state.model))
    method = "by liveness over XLA's CPU program" + (_BFLOAT16_NOTE if is_half else "")
    text += f"about {size_words(batch + peak)} of batch, activations and gradients ({method})"
    text += f"; a commit keeps {size_words(snapshot)} in the host's memory while it is written"
    if target.tpu is None:
        return Finding(check="memory", verdict="pass", text=f"{text}; no TPU type given to compare with", value=needed)
    share = needed / target.tpu.hbm_bytes
    text += f": {_percent(share)} of a replica's {size_words(target.tpu.hbm_bytes)}"
    if share <= _COMFORTABLE:
        return Finding(check="memory", verdict="pass", text=text, value=needed)
    remedy = "use a smaller train.global_batch_size, mixed_bfloat16, keras.RematScope, or a TPU with more memory"
    if variables > _FULL * target.tpu.hbm_bytes:
        remedy = "use a smaller model or optimizer, or a TPU with more memory: every replica holds all variables"
    # The peak may be overestimated; fail only if the lower bound does not fit.
    least = (variables + batch + peak // (_OVERESTIMATE if is_half else 1)) / target.tpu.hbm_bytes
    verdict: Verdict = "fail" if least > _FULL else "warn"
    return Finding(check="memory", verdict=verdict, text=text, remedy=remedy, value=needed)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "under 0.1%"  # noqa: PLR2004 - the smallest share with one digit


def _bytes(leaf: Leaf) -> int:
    return count_of(leaf) * int(leaf.components[0].dtype.size)
