"""A function of the run file that transforms examples or batches: loads it, calls it, checks what it returns.

It receives and returns an example as a source gives it: x, (x, y) or (x, y, sample_weight). Several inputs or outputs
are a flat dict, or a list: a bare tuple would look like (x, y). Errors of its operations, which TensorFlow raises in
the training loop, get the user's line.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tasks.foundation.contracts.data_spec import DataSpec
from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.dataset.features import unflatten
from tasks.foundation.errors import ModelError
from tasks.foundation.messages import listed, message
from tasks.foundation.model.isolated_build import preserved_global_state
from tasks.foundation.model.train_step import op_errors_as_model_error
from tasks.foundation.transforms.stateless_call import RANDOM_HINT, call_stateless, draws_in_python
from tasks.foundation.user_code import load_function

_PARTS = ("x", "y", "sample_weight")


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


_FORM = "it must be a function of one example, and of seed if it draws: def augment(example, *, seed)"


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
            features: of what it receives.
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
        reference: its value.
        code_folder: the run file's folder.
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


# TensorFlow names the operation that waited for the batch, and not the dataset's.
_NEXT_BATCH = "IteratorGetNext"


@contextmanager
def transform_errors(data: DataSpec, where: str) -> Iterator[None]:
    """Use around running the training loop: names the transforms if an operation failed while a batch was made.

    Args:
        data: of the run file.
        where: the steps, for the message.

    Raises:
        ModelError: an operation of a transform failed.
    """
    try:
        yield
    except tf.errors.OpError as fault:
        if not data.transforms or _NEXT_BATCH not in str(fault):
            raise
        with op_errors_as_model_error(f"{listed(data.transforms)} failed {where}"):
            raise
