"""The step as XLA compiles it: does it, and does what it needs fit into a replica's memory?"""

import math
import time

from keras import tree

from flows.doctor.finding import Finding, Verdict
from flows.doctor.liveness import peak_bytes
from flows.doctor.model_checks import Built, count_of, is_parameter
from flows.doctor.run_file_checks import Target
from flows.doctor.xla import compiled_step
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.errors import ModelError
from tasks.foundation.model.variables import Leaf, layers_of
from tasks.foundation.telemetry.formatting import duration_words, size_words

# Shares of a replica's memory.
_COMFORTABLE, _FULL = 0.7, 0.95
# A CPU has no bfloat16: XLA's program for it keeps such values as float32 besides, and measured so much more.
_TOO_MUCH = 3
_HALF = f", which keeps bfloat16 as float32 besides: up to {_TOO_MUCH} times too much"


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
    model = sum(_bytes(leaf) for leaf in built.state.leaves if is_parameter(leaf))
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


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "under 0.1%"  # noqa: PLR2004 - what one digit shows


def _bytes(leaf: Leaf) -> int:
    return count_of(leaf) * int(leaf.components[0].dtype.size)
