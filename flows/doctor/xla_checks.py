"""Checks for the device: that XLA compiles the step, and that what is certain fits into a replica's memory."""

import math
import time

from keras import tree

from flows.doctor.finding import Finding
from flows.doctor.model_checks import BuiltModel, count_of, is_parameter
from flows.doctor.run_file_checks import Target
from flows.doctor.xla_program import compile_step
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.errors import ModelError
from tasks.foundation.model.variables import Leaf
from tasks.foundation.telemetry.formatting import duration_words, size_words

# Share of a replica's memory that leaves room for activations.
_COMFORTABLE = 0.7


def check_xla(run: RunFile, target: Target, built: BuiltModel) -> Finding:
    """Compile the step with XLA.

    Args:
        run: the run file.
        target: the accelerator to train on.
        built: the model.

    Raises:
        ModelError: XLA refuses the step, and the target is a TPU.
    """
    began = time.monotonic()
    try:
        compile_step(built.step, built.arguments, reference=run.spec.model.build, layers=built.layers)
    except ModelError as error:
        if target.is_tpu:
            raise
        return Finding(check="xla", verdict="warn", text=str(error))
    text = f"XLA compiles the step, in {duration_words(time.monotonic() - began)} for this CPU"
    return Finding(check="xla", verdict="pass", text=text)


def check_memory(built: BuiltModel, target: Target) -> Finding:
    """Compare the memory that a replica needs at least with what it has; the finding's value is those bytes.

    Counted exactly: every variable that a replica holds (parameters, optimizer, metrics), the gradients of the trained
    ones, and its share of a batch. Activations come on top; how much they are is known only where the step runs.
    Evaluating takes no more, because it uses the same variables. A commit copies what it saves into the host's memory.

    Args:
        built: the model.
        target: the accelerator to train on.
    """
    leaves = built.state.leaves
    variables = sum(_bytes(leaf) for leaf in leaves)
    model = sum(_bytes(leaf) for leaf in leaves if is_parameter(leaf))
    gradients = sum(_bytes(leaf) for leaf in leaves if leaf.trainable)
    batch = sum(math.prod(each.shape) * each.dtype.size for each in tree.flatten(built.arguments))
    least = variables + gradients + batch
    snapshot = sum(_bytes(leaf) * (target.replicas if leaf.per_replica else 1) for leaf in leaves)
    text = (
        f"{size_words(model)} of parameters, {size_words(variables - model)} of optimizer and metrics, "
        f"{size_words(gradients)} of gradients, {size_words(batch)} of batch: at least {size_words(least)} besides "
        f"activations; a commit keeps {size_words(snapshot)} in the host's memory while it is written"
    )
    if target.tpu is None:
        return Finding(check="memory", verdict="pass", text=f"{text}; no TPU type given to compare with", value=least)
    share = least / target.tpu.hbm_bytes
    text += f": {_percent(share)} of a replica's {size_words(target.tpu.hbm_bytes)}"
    if share <= _COMFORTABLE:
        return Finding(check="memory", verdict="pass", text=text, value=least)
    remedy = "use a smaller model or optimizer, or a TPU with more memory: every replica holds all variables"
    return Finding(check="memory", verdict="fail" if share > 1 else "warn", text=text, remedy=remedy, value=least)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "under 0.1%"  # noqa: PLR2004 - the smallest share with one digit


def _bytes(leaf: Leaf) -> int:
    return count_of(leaf) * int(leaf.components[0].dtype.size)
