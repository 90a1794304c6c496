"""A function of the run file that transforms examples or batches: loads it, calls it, checks what it returns.

It receives and returns an example as a source gives it: x, (x, y) or (x, y, sample_weight). Several inputs or outputs
are a flat dict, or a list: a bare tuple would look like (x, y). Errors of its operations, which TensorFlow raises in
the training loop, get the user's line.

It is traced so that what it draws depends on its seed alone. TensorFlow's stateful random operations, and other
operations with hidden state, are refused as they are created, with the line that creates them. Keras's seed generators
are state too. During the trace each draw from one of them is replaced by a seed that follows from the function's own
seed, so that Keras's random layers can be used as they are. A function is traced once per start and not once per
example. So random numbers that it takes from Python become constants, and a resumed run would get other ones; it is
noticed and refused.
"""

import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api
from tensorflow.python.framework import op_callbacks, op_def_registry

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.contracts.dataset import Feature
from baton.tasks.foundation.dataset.features import unflatten
from baton.tasks.foundation.errors import BatonError, ModelError
from baton.tasks.foundation.model.build import preserved_global_state, preserved_random_states
from baton.tasks.foundation.model.keras_steps import in_while_loop, line_that_made
from baton.tasks.foundation.model.randomness import PYTHON_KERNELS, nodes_of
from baton.tasks.foundation.model.step import op_errors_as_model_error
from baton.tasks.foundation.text import listed, message
from baton.tasks.foundation.user_functions import load_function
from baton.tasks.foundation.user_traceback import user_error

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
RANDOM_HINT = (
    "draw with tf.random.stateless_uniform(shape, seed) or tf.image.stateless_random_*(image, …, seed=seed); several "
    "draws: tf.random.experimental.stateless_split(seed, n)"
)
_NO_TENSORFLOW_TEXT = (
    "in a transform, KerasHub's tokenizers run on the package tensorflow-text, which is not installed; call them in "
    "data.source, in a function such as data.py:load, where they run in Python"
)
_PARTS = ("x", "y", "sample_weight")
_FORM = "it must be a function of one example, and of seed if it draws: def augment(example, *, seed)"
# TensorFlow names the operation that gets the batch, not the dataset's. After another's failure, `…Next/_19` waited.
_NEXT_BATCH = "IteratorGetNext"


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
    return Counter((node.op, _constant(node)) for node in nodes_of(concrete))


def _constant(node: Any) -> bytes:
    return bytes(node.attr["value"].tensor.SerializeToString(deterministic=True)) if node.op == "Const" else b""


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
        raise ModelError(user_error(f"{where} raised", fault, hints=_hints(fault))) from fault


def _hints(fault: BaseException) -> list[str]:
    """The remedy if a text layer of KerasHub lacks tensorflow-text, which it needs in a graph only.

    Some of its layers say so; others use the package without a look whether it is there.
    """
    text = str(fault)
    lacks = "tensorflow-text" in text or ("keras_hub" in text and "'NoneType' object has no attribute" in text)
    return [_NO_TENSORFLOW_TEXT] if lacks and find_spec("tensorflow_text") is None else []


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
        self, op_type: str, _inputs: Any, _attributes: Any, _outputs: Any, op_name: Any = None, graph: Any = None
    ) -> None:
        definition = op_def_registry.get(op_type)
        if graph is None or definition is None or not definition.is_stateful or op_type in _HARMLESS:
            return
        line = line_that_made(graph.get_operation_by_name(op_name))
        if op_type in PYTHON_KERNELS:
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
        if in_while_loop():
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


def as_user_sees(parts: tuple[Any, ...]) -> Any:
    """Convert (x,), (x, y) or (x, y, sample_weight) to the example that a transform receives: (x,) becomes x."""
    seen = tuple(list(part) if isinstance(part, tuple) else part for part in parts)
    return seen[0] if len(seen) == 1 else seen


def parts_of(returned: object, *, where: str) -> tuple[Any, ...]:
    """Convert what a transform returned to (x,), (x, y) or (x, y, sample_weight) of tensors, flat dicts or tuples.

    Args:
        returned: x, (x, y) or (x, y, sample_weight); each a tensor, an array, a number, or a flat dict or list of them.
        where: begins the message.

    Raises:
        ModelError: it has another form.
    """
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= len(_PARTS):
        raise ModelError(
            f"{where} returned a tuple of {len(parts)}; return x, (x, y) or (x, y, sample_weight), as the source does"
        )
    return tuple(_tensors(part, content, where) for part, content in zip(_PARTS, parts, strict=False))


def features_of(parts: tuple[Any, ...], *, where: str, batch: int | None = None) -> tuple[Feature, ...]:
    """Describe what a transform returned, as a manifest describes examples.

    Args:
        parts: from `parts_of`.
        where: begins the message.
        batch: the size of the first dimension, which is left out; None: the tensors are those of one example.

    Raises:
        ModelError: a shape is not static, a dtype has no NumPy counterpart, or the first dimension is not `batch`.
    """
    found = []
    for name, tensor in _named(parts):
        shape = tensor.shape
        if not shape.is_fully_defined():
            raise ModelError(
                f"{where} returned {name} with the shape {shape}; the model needs a static shape: end with "
                "tf.ensure_shape, or give the size as Python numbers"
            )
        sizes = tuple(int(size) for size in shape)
        if batch is not None:
            if not sizes or sizes[0] != batch:
                raise ModelError(
                    f"{where} returned {name} with the shape {list(sizes)} for a batch of {batch}; keep the number of "
                    "examples"
                )
            sizes = sizes[1:]
        found.append(Feature(name=name, dtype=_numpy_name(tensor.dtype, name, where), shape=sizes))
    return tuple(found)


def _tensors(part: str, content: object, where: str) -> Any:
    if isinstance(content, Mapping) and content and part != "sample_weight":
        wrong = [key for key in content if not isinstance(key, str) or not key]
        if wrong:
            raise ModelError(f"{where} returned {part} with the key {wrong[0]!r}; use non-empty strings")
        return {key: _tensor(f"{part}/{key}", value, where) for key, value in content.items()}
    if isinstance(content, list | tuple) and content:
        return tuple(_tensor(f"{part}[{number}]", value, where) for number, value in enumerate(content))
    return _tensor(part, content, where)


def _tensor(name: str, value: object, where: str) -> Any:
    plain = isinstance(value, bool | int | float | np.ndarray | np.generic | tf.Tensor)
    if not plain and not hasattr(value, "__tf_tensor__"):
        raise ModelError(
            f"{where} returned {name} as {type(value).__name__}; return tensors: x, (x, y) or (x, y, sample_weight), "
            "each also as a list, x and y also as flat dicts"
        )
    return tf.convert_to_tensor(value)


def _named(parts: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    for part, content in zip(_PARTS, parts, strict=False):
        if isinstance(content, Mapping):
            yield from ((f"{part}/{key}", value) for key, value in content.items())
        elif isinstance(content, tuple):
            yield from ((f"{part}[{number}]", value) for number, value in enumerate(content))
        else:
            yield part, content


def _numpy_name(dtype: Any, name: str, where: str) -> str:
    if dtype == tf.string:
        return "string"
    # Other dtypes, such as bfloat16, have a NumPy type that only TensorFlow registers.
    if not (dtype.is_bool or dtype.is_integer or dtype.is_complex or dtype in {tf.float16, tf.float32, tf.float64}):
        raise ModelError(f"{where} returned {name} as {dtype.name}; cast it to numbers such as float32 or int64")
    return str(dtype.name)


class UserTransform:
    """A transform of the user. It is a function of (parts, seed), to be called inside a graph.

    Attributes:
        key: of the run file, such as data.transform.
        reference: the function's name in the run file.
        function: the user's.
    """

    def __init__(self, key: str, reference: str, function: Callable[..., object]) -> None:
        """Check the function's parameters.

        Raises:
            ModelError: it cannot be called with one example, with or without seed.
        """
        self.key = key
        self.reference = reference
        # A tf.function would reuse the graph of its first trace, with the seed of that one.
        self.function: Callable[..., object] = getattr(function, "python_function", function)
        self._takes_seed = _takes_seed(self.function, where=self.where)
        self._traces = 0
        # A graph cannot create it.
        with preserved_global_state():
            self._generator = keras.random.SeedGenerator(0)

    @property
    def where(self) -> str:
        """The key and the function, for messages."""
        return f"{self.key}: {self.reference}"

    def __call__(self, parts: tuple[Any, ...], seed: Any) -> tuple[Any, ...]:
        """Transform one example, or one batch, inside a graph.

        Args:
            parts: (x,), (x, y) or (x, y, sample_weight) of tensors, or flat dicts of them.
            seed: int32 tensor [2].

        Returns:
            One of these forms, with static shapes.

        Raises:
            ModelError: the function raised, has state, or returned something else.
        """
        self._traces += 1
        returned = call_stateless(
            self.function,
            as_user_sees(parts),
            seed,
            takes_seed=self._takes_seed,
            where=self.where,
            generator=self._generator,
            number=self._traces,
        )
        return parts_of(returned, where=self.where)

    def features(self, features: Sequence[Feature], *, batch: int | None = None) -> tuple[Feature, ...]:
        """Trace the function and return the features of what it returns.

        Args:
            batch: number of examples, if it transforms batches; None: it transforms single examples.

        Raises:
            ModelError: as for a call; or a shape is not static, or the function draws random numbers in Python.
        """
        first = () if batch is None else (batch,)
        specs = unflatten(
            {each.name: tf.TensorSpec((*first, *each.shape), tf.as_dtype(each.dtype)) for each in features}
        )
        found: list[tuple[Feature, ...]] = []

        def work(parts: tuple[Any, ...], seed: Any) -> tuple[Any, ...]:
            returned = self(parts, seed)
            found.append(features_of(returned, where=self.where, batch=batch))
            return returned

        def trace() -> Any:
            return tf.function(work, autograph=False).get_concrete_function(specs, tf.TensorSpec([2], tf.int32))

        if draws_in_python(trace):
            text = (
                f"{self.where} draws random numbers in Python (np.random or random), or takes other values from it "
                "each time it is traced: they would be the same for all examples, and others after a restart"
            )
            raise ModelError(message(text, hints=[RANDOM_HINT]))
        return found[0]


def load_transform(key: str, reference: str | None, code_folder: Path, *, seed: int) -> UserTransform | None:
    """Load a transform of the run file; None if it names none.

    Args:
        key: of the run file, such as data.transform.
        seed: `train.seed`.

    Raises:
        ModelError: the function is missing, or its import raises, or its parameters do not fit.
    """
    if reference is None:
        return None
    return UserTransform(key, reference, load_function(reference, code_folder, seed=seed))


def _takes_seed(function: Callable[..., object], *, where: str) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    for keywords in ({"seed": None}, {}):
        try:
            signature.bind(None, **keywords)
        except TypeError:
            continue
        return bool(keywords)
    raise ModelError(f"{where}{signature} cannot be called with an example; {_FORM}")


@contextmanager
def transform_errors(data: DataSpec, where: str) -> Iterator[None]:
    """Use around running the training loop: names the transforms if an operation failed while a batch was made.

    Args:
        where: the steps, for the message.

    Raises:
        ModelError: an operation of a transform failed.
    """
    try:
        yield
    except tf.errors.OpError as fault:
        # Of several root errors the first is the cause: when a step fails, batches that others wait for are cancelled.
        cause = str(fault).partition("\n  (1) ")[0].splitlines()
        if not data.transforms or not any(_NEXT_BATCH in line.rpartition("/")[2] for line in cause):
            raise
        with op_errors_as_model_error(f"{listed(data.transforms)} failed {where}"):
            raise
