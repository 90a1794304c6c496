"""Compile a train step with XLA for the CPU, without running it. XLA also compiles every program for a TPU."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import config as tf_config  # no public function turns determinism off

from flows.doctor.graph_scan import layer_of
from tasks.foundation.errors import ModelError
from tasks.foundation.model.compile_settings import flat_xla_function

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
            with _silent():
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


@contextmanager
def _silent() -> Iterator[None]:
    """Discard what XLA writes to standard error: lines at its first use, and a trace of its stack for some refusals."""
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


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
