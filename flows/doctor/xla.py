"""Would XLA, which makes every program that a TPU runs, take this step? Asked of XLA on the CPU; nothing is run."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from keras import tree
from tensorflow.python.framework import config as tf_config  # nothing public turns determinism off

from flows.doctor.graph_scan import layer_of
from tasks.foundation.errors import ModelError

_NODE = re.compile(r"\{\{node ([^}\s]+)\}\}|to node `([^`]+)`")
_OP = re.compile(r"No registered '(\w+)' OpKernel|with op (\w+)|(?:^|[ :])(\w+) \(No registered")
_LONGEST_TEXT = 300


def compiled_step(step: Any, arguments: Sequence[Any], *, reference: str, layers: Sequence[str]) -> str:
    """XLA's program for a train step, as text: optimized and scheduled, for the CPU.

    Args:
        step: a Python function of tensors that takes one train step, as `stepping.take_step` does.
        arguments: `tf.TensorSpec`s of static shapes, or flat dicts of them.
        reference: what the user calls the model, for messages.
        layers: names of the model's layers.

    Raises:
        ModelError: XLA refuses the step; names the layer and the operation to blame, where XLA does.
    """
    try:
        with _as_on_a_tpu():
            _start_quietly()
            # It takes tensors one by one, and no dicts of them.
            flat = tree.flatten(tuple(arguments))
            function = tf.function(
                lambda *parts: step(*tree.pack_sequence_as(tuple(arguments), list(parts))),
                jit_compile=True,
                autograph=False,
            )
            ir = function.experimental_get_compiler_ir(*flat)
            # On a machine with a GPU it would be for that.
            return str(ir(stage="optimized_hlo", platform_name="CPU"))
    except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as fault:
        raise ModelError(
            f"{reference}: XLA, which compiles for TPUs, refuses the train step: {blamed(str(fault), layers)}. Move "
            "such work into the input pipeline (data.source), or use operations that XLA knows"
        ) from fault


@contextmanager
def _as_on_a_tpu() -> Iterator[None]:
    """TPUs are not asked for deterministic operations, see `strategy.acquire`; this process may be."""
    if not tf_config.is_op_determinism_enabled():
        yield
        return
    tf_config.disable_op_determinism()
    try:
        yield
    finally:
        tf_config.enable_op_determinism()


def _start_quietly() -> None:
    """Have XLA write what it says of itself at its first use, and nothing else, where nobody reads it."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        nothing = tf.function(lambda value: value + 1, jit_compile=True, autograph=False)
        nothing.experimental_get_compiler_ir(tf.TensorSpec([], tf.float32))()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def blamed(text: str, layers: Sequence[str]) -> str:
    """The layer, the operation and its node out of XLA's message, and what XLA says first."""
    # Where the message wraps the graph's name, the first line is the one about the matter.
    said = " ".join(text.removeprefix("Failed getting HLO text: ").strip("'\"").splitlines()[0].split()) if text else ""
    said = said if len(said) <= _LONGEST_TEXT else f"{said[: _LONGEST_TEXT - 1]}…"
    node = next((first or second for first, second in _NODE.findall(text)), None)
    if node is None:
        return said
    op = next((name for names in _OP.findall(text) for name in names if name), None)
    layer = layer_of(node, layers)
    where = f"layer {layer}, " if layer else ""
    return f"{where}operation {op or node.rsplit('/', 1)[-1]} (node {node}): {said}"
