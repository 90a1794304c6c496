"""A function of the run file that transforms examples or batches: loads it, calls it, checks what it returns."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.dataset.features import unflatten
from tasks.foundation.errors import ModelError
from tasks.foundation.messages import message
from tasks.foundation.model.isolated_build import preserved_global_state
from tasks.foundation.transforms.example_form import as_user_sees, features_of, parts_of
from tasks.foundation.transforms.python_draws import draws_in_python
from tasks.foundation.transforms.stateless_call import RANDOM_HINT, call_stateless
from tasks.foundation.user_code import load_function

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
