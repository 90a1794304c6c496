"""Checks for the device: that XLA compiles the step, and that what is certain fits into a replica's memory.

Compile a train step with XLA for the CPU, without running it. XLA also compiles every program for a TPU.
"""

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from keras import tree
from tensorflow.python.framework import config as tf_config

from baton.flows.doctor.model_checks import BuiltModel, count_of, is_parameter, layer_of
from baton.flows.doctor.run_file_checks import Finding, Target
from baton.tasks.foundation.contracts.run_file import RunFile
from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.machine.environment import silent_stderr
from baton.tasks.foundation.model.step import flat_xla_function
from baton.tasks.foundation.model.variables import Leaf
from baton.tasks.foundation.telemetry.formatting import duration_words, size_words

_NODE = re.compile(r"\{\{node ([^}\s]+)\}\}|to node `([^`]+)`")
_OP = re.compile(r"No registered '(\w+)' OpKernel|with op (\w+)|(?:^|[ :])(\w+) \(No registered")
_NO_VARIABLE = "variable.var()"
_LONGEST_TEXT = 300


def compile_step(step: Any, arguments: Sequence[Any], *, reference: str, layers: Sequence[str]) -> None:
    """Compile a train step with XLA for the CPU.

    Args:
        step: Python function of tensors that takes one train step.
        arguments: `tf.TensorSpec`s of static shapes, or flat dicts of them.
        reference: the model's name in the run file, for messages.
        layers: names of the model's layers.

    Raises:
        ModelError: XLA refuses the step; the message names the layer and the operation if XLA names them.
    """
    try:
        with _as_on_a_tpu():
            function, flat = flat_xla_function(step, arguments, autograph=False)
            with silent_stderr():
                _start_xla()
                ir = function.experimental_get_compiler_ir(*flat)
                # The default platform on a machine with a GPU would be the GPU.
                ir(stage="optimized_hlo", platform_name="CPU")
    except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(
            f"{reference}: XLA refuses to compile the train step, so no TPU can run it: "
            f"{explain_failure(str(error), layers)}. Move this work into the input pipeline (data.source), or use "
            "operations that XLA supports"
        ) from error


@contextmanager
def _as_on_a_tpu() -> Iterator[None]:
    """Turn deterministic operations off, because TPUs run without them; see `strategy.acquire`."""
    if not tf_config.is_op_determinism_enabled():
        yield
        return
    tf_config.disable_op_determinism()
    try:
        yield
    finally:
        tf_config.enable_op_determinism()


def _start_xla() -> None:
    compiled = tf.function(lambda value: value + 1, jit_compile=True, autograph=False)
    compiled.experimental_get_compiler_ir(tf.TensorSpec([], tf.float32))()


def explain_failure(text: str, layers: Sequence[str]) -> str:
    """Return the layer, operation and node that XLA's message names, and the message's first line."""
    # The cause is in the first line, even where a long graph name wraps.
    lines = text.removeprefix("Failed getting HLO text: ").strip("'\"").splitlines() or [""]
    message = " ".join(lines[0].split())
    if _NO_VARIABLE in message:
        return "it uses a resource that is no variable, such as a lookup table"
    message = message if len(message) <= _LONGEST_TEXT else f"{message[: _LONGEST_TEXT - 1]}…"
    node = next((first or second for first, second in _NODE.findall(text)), None)
    if node is None:
        return message
    op = next((name for names in _OP.findall(text) for name in names if name), None)
    layer = layer_of(node, layers)
    where = f"layer {layer}, " if layer else ""
    return f"{where}operation {op or node.rsplit('/', 1)[-1]} (node {node}): {message}"


# Share of a replica's memory that leaves room for activations.
_COMFORTABLE = 0.7


def check_xla(run: RunFile, target: Target, built: BuiltModel) -> Finding:
    """Compile the step with XLA.

    Args:
        target: the accelerator to train on.

    Raises:
        ModelError: XLA refuses the step, and the target is a TPU.
    """
    began = time.monotonic()
    try:
        compile_step(built.step, built.arguments, reference=run.spec.model.build, layers=built.layers)
    except ModelError as error:
        if target.is_tpu:
            raise
        return Finding(verdict="warn", text=str(error))
    text = f"XLA compiles the step, in {duration_words(time.monotonic() - began)} for this CPU"
    return Finding(verdict="pass", text=text)


def check_memory(built: BuiltModel, target: Target) -> Finding:
    """Compare the memory that a replica needs at least with what it has; the finding's value is those bytes.

    Counted exactly: every variable that a replica holds (parameters, optimizer, metrics), the gradients of the trained
    ones, and its share of a batch. Activations come on top; how much they are is known only where the step runs.
    Evaluating takes no more, because it uses the same variables. A commit copies what it saves into the host's memory.

    Args:
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
        return Finding(verdict="pass", text=f"{text}; no TPU type given to compare with", value=least)
    share = least / target.tpu.hbm_bytes
    text += f": {_percent(share)} of a replica's {size_words(target.tpu.hbm_bytes)}"
    if share <= _COMFORTABLE:
        return Finding(verdict="pass", text=text, value=least)
    remedy = "use a smaller model or optimizer, or a TPU with more memory: every replica holds all variables"
    return Finding(verdict="fail" if share > 1 else "warn", text=text, remedy=remedy, value=least)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "under 0.1%"  # noqa: PLR2004 - the smallest share with one digit


def _bytes(leaf: Leaf) -> int:
    return count_of(leaf) * int(leaf.components[0].dtype.size)
