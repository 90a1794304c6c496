"""Traces a user's function so that what it draws depends on its seed alone.

TensorFlow's stateful random operations, and other operations with hidden state, are refused as they are created, with
the line that creates them. Keras's seed generators are state too. During the trace each draw from one of them is
replaced by a seed that follows from the function's own seed, so that Keras's random layers can be used as they are.

A function is traced once per start and not once per example. So random numbers that it takes from Python become
constants, and a resumed run would get other ones; it is noticed and refused.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api
from tensorflow.python.framework import op_callbacks, op_def_registry

from tasks.foundation.errors import BatonError, ModelError
from tasks.foundation.messages import message
from tasks.foundation.model.isolated_build import preserved_random_states
from tasks.foundation.model.keras_steps import line_that_made
from tasks.foundation.user_errors import user_error


def seed_python(number: int) -> None:
    """Seed the global generators of Python and NumPy with the number of the trace, so that two traces differ."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - user code draws from the global generator


def draws_in_python(trace: Callable[[], Any]) -> bool:
    """Whether a function becomes another graph each time it is traced.

    The first trace may build layers, so two traces that differ are followed by a third.

    Args:
        trace: traces the function anew, and returns the concrete function.
    """
    first, second = _content(trace()), _content(trace())
    return first != second and second != _content(trace())


def _content(concrete: Any) -> Counter[tuple[str, bytes]]:
    """Count the operations of a graph and the functions that it calls; constants with their values."""
    graph = concrete.graph.as_graph_def()
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    return Counter((node.op, _constant(node)) for node in nodes)


def _constant(node: Any) -> bytes:
    return bytes(node.attr["value"].tensor.SerializeToString(deterministic=True)) if node.op == "Const" else b""


_SEED_STATE = "seed_generator_state"
_KERAS_GENERATOR = "global_seed_generator"
_NEW_VARIABLES = "uninitialized_variables"

# Operations that TensorFlow calls stateful, but whose results follow from their inputs.
_HARMLESS = frozenset(
    {
        "Assert",
        "Case",
        "CheckNumerics",
        "CheckNumericsV2",
        "If",
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "PartitionedCall",
        "PrintV2",
        "ReadFile",
        "ReadVariableOp",
        "ResourceGather",
        "StatefulPartitionedCall",
        "StatelessRandomGetAlg",
        "StatelessRandomGetKeyCounter",
        "StatelessRandomGetKeyCounterAlg",
        "While",
    }
)
_PYTHON = frozenset({"EagerPyFunc", "PyFunc"})
RANDOM_HINT = (
    "draw with tf.random.stateless_uniform(shape, seed) or tf.image.stateless_random_*(image, …, seed=seed); several "
    "draws: tf.random.experimental.stateless_split(seed, n)"
)


def call_stateless(
    function: Callable[..., object],
    example: Any,
    seed: Any,
    *,
    takes_seed: bool,
    where: str,
    generator: Any,
    number: int,
) -> object:
    """Call a user's function inside a graph that is being traced.

    AutoGraph converts the function, as in `tf.data.Dataset.map`.

    Args:
        function: the user's.
        example: passed to it.
        seed: int32 tensor [2]; passed as `seed` if the function takes it.
        takes_seed: whether it does.
        where: the key and the function's name, for messages.
        generator: a `keras.random.SeedGenerator` that stands in for Keras's global one.
        number: of the trace; Python's generators are seeded with it.

    Returns:
        What the function returned.

    Raises:
        ModelError: the function raised, creates an operation or a variable with state, or changes one.
    """
    guard = _Guard(where)
    converted = api.tf_convert(function, ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED))
    try:
        with (
            preserved_random_states(),
            _keras_global_generator(generator),
            _no_new_variables(where),
            guard.watching(),
            _SeedScope(seed, guard),
        ):
            # Without a seed, deterministic TensorFlow refuses a random operation before its line is known.
            tf.random.set_seed(0)
            seed_python(number)
            return converted(example, seed=seed) if takes_seed else converted(example)
    except (Exception, SystemExit) as fault:
        if guard.refusal is not None:
            raise guard.refusal from None
        if isinstance(fault, BatonError):
            raise
        raise ModelError(user_error(f"{where} raised", fault)) from fault


class _Guard:
    """Refuses operations with state while a function is traced. AutoGraph rewrites errors, so it keeps its own."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.refusal: ModelError | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        op_callbacks.add_op_callback(self._look_at)
        try:
            yield
        finally:
            op_callbacks.remove_op_callback(self._look_at)

    def refuse(self, text: str, hint: str) -> ModelError:
        self.refusal = self.refusal or ModelError(message(f"{self._where} {text}", hints=[hint]))
        return self.refusal

    def _look_at(
        self, op_type: str, _inputs: Any, _attributes: Any, _outputs: Any, *, op_name: Any = None, graph: Any = None
    ) -> None:
        definition = op_def_registry.get(op_type)
        if graph is None or definition is None or not definition.is_stateful or op_type in _HARMLESS:
            return
        line = line_that_made(graph.get_operation_by_name(op_name))
        if op_type in _PYTHON:
            text = f"runs Python code ({op_type}{line}), whose state no checkpoint holds"
            raise self.refuse(text, "write it in TensorFlow operations, or prepare it once in data.source")
        if op_type.startswith("Assign") or op_type.endswith("AssignVariableOp"):
            text = f"changes a variable ({op_type}{line}): its result would depend on the order of the calls"
            raise self.refuse(text, "return everything that the function computes; keep state in the model")
        text = f"uses {op_type}{line}, whose state no checkpoint holds: a resumed run would see other examples"
        raise self.refuse(text, RANDOM_HINT)


class _SeedScope(keras.StatelessScope):  # type: ignore[misc]
    """Gives each draw from a Keras seed generator its own seed, a function of the given one."""

    def __init__(self, seed: Any, guard: _Guard) -> None:
        super().__init__(initialize_variables=False)
        self._seed = seed
        self._guard = guard
        self._draws = 0

    def get_current_value(self, variable: Any) -> Any:
        """Return another seed for each read of a generator's state; None, the variable's own value, for all others.

        The number of a draw is its place in the trace. So no value of one branch of a condition is used in another.
        """
        if variable.name != _SEED_STATE:
            return None
        if _in_loop():
            raise self._guard.refuse(
                "draws from a Keras random layer or keras.random inside a TensorFlow loop, which would draw the same "
                "numbers in each turn",
                "loop in Python, or use tf.random.stateless_* with tf.random.experimental.stateless_fold_in(seed, i)",
            )
        self._draws += 1
        return tf.cast(tf.random.experimental.stateless_fold_in(self._seed, self._draws), variable.dtype)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Drop the next state of a generator; refuse a change of any other variable."""
        variable = update[0]
        if variable.name != _SEED_STATE:
            raise self._guard.refuse(
                f"changes the variable {variable.path}: its result would depend on the order of the calls",
                "call layers with training=False where they keep statistics; keep state in the model",
            )


def _in_loop() -> bool:
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if type(graph).__name__ == "WhileBodyFuncGraph":
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


@contextmanager
def _keras_global_generator(generator: Any) -> Iterator[None]:
    """Make `keras.random` functions without a seed draw from `generator`, which the scope replaces."""
    before = global_state.get_global_attribute(_KERAS_GENERATOR)
    global_state.set_global_attribute(_KERAS_GENERATOR, generator)
    try:
        yield
    finally:
        global_state.set_global_attribute(_KERAS_GENERATOR, before)


@contextmanager
def _no_new_variables(where: str) -> Iterator[None]:
    """Refuse a function that creates Keras variables: they would have no values, and another name each time."""
    before = list(global_state.get_global_attribute(_NEW_VARIABLES, []))
    yield
    created = global_state.get_global_attribute(_NEW_VARIABLES, [])[len(before) :]
    if created:
        global_state.set_global_attribute(_NEW_VARIABLES, before)
        text = f"{where} creates the Keras variable {created[0].path}"
        raise ModelError(message(text, hints=["create layers and seed generators once, outside the function"]))
