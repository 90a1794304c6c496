"""Isolates a model build from other work, and sets its dtype policy (`train.precision`).

A build seeds all random generators, and clears Keras's global state. Variables stay float32 whatever the policy.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.eager import context

from tasks.foundation.contracts.log_entry import KerasConfig
from tasks.foundation.contracts.run_spec import TrainSpec
from tasks.foundation.errors import ModelError
from tasks.foundation.model.variables import layers_of
from tasks.foundation.user_code import keras_config, set_keras_config


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStates:
    """The states of all random generators of the process, the dtype policy of the thread, and Keras's configuration.

    Code that is traced later than it was built, or in another thread, gets them back: what it draws while it is traced
    becomes part of the graph.
    """

    python: Any
    numpy: Any
    keras_source: Any
    keras_drawn: Any
    tensorflow_seed: int | None
    tensorflow_drawn: Any
    dtype_policy: Any
    keras_config: KerasConfig

    @classmethod
    def now(cls) -> "RandomStates":
        """The current states."""
        eager = context.context()
        drawn = getattr(eager, "_rng", None)
        source = seed_generator.python_random
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(),  # noqa: NPY002 - user code draws from the global generator
            keras_source=source,
            keras_drawn=source.getstate(),
            tensorflow_seed=eager._seed,
            tensorflow_drawn=None if drawn is None else drawn.getstate(),
            # Not `keras.config.dtype_policy()`, which fixes a policy where none is set.
            dtype_policy=global_state.get_global_attribute("dtype_policy"),
            keras_config=keras_config(),
        )

    def restore(self) -> None:
        """Set all generators, this thread's dtype policy and Keras's configuration to these states."""
        eager = context.context()
        seed_generator.python_random = self.keras_source
        self.keras_source.setstate(self.keras_drawn)
        random.setstate(self.python)  # after Keras's source, which may be the same generator
        np.random.set_state(self.numpy)  # noqa: NPY002
        eager._seed = self.tensorflow_seed
        if self.tensorflow_drawn is not None:
            eager._rng = random.Random()  # noqa: S311 - must be reproducible
            eager._rng.setstate(self.tensorflow_drawn)
        set_keras_config(self.keras_config)
        global_state.set_global_attribute("dtype_policy", self.dtype_policy)


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Restore the random generators, the dtype policy and Keras's configuration after the block."""
    states = RandomStates.now()
    try:
        yield
    finally:
        states.restore()


@contextmanager
def preserved_global_state() -> Iterator[None]:
    """Restore random generators and Keras's global state after the block.

    A user's `load` function that is being read must yield the same examples, although a model is built meanwhile.
    """
    of_keras = global_state.GLOBAL_STATE_TRACKER, global_state.GLOBAL_SETTINGS_TRACKER
    with preserved_random_states():
        try:
            yield
        finally:
            global_state.GLOBAL_STATE_TRACKER, global_state.GLOBAL_SETTINGS_TRACKER = of_keras


_POLICIES: Final[Mapping[str, str]] = {"float32": "float32", "bfloat16": "mixed_bfloat16"}


def dtype_policy_for_build(train: TrainSpec, of_module: Any, *, reference: str) -> Any:
    """Return the policy to set before the user's function is called.

    Args:
        train: with `precision`; None keeps the module's policy.
        of_module: the policy right after the module's import.
        reference: the function's name in the run file, for messages.

    Raises:
        ModelError: the module sets another policy itself.
    """
    if train.precision is None:
        return of_module
    wanted = _POLICIES[train.precision]
    if of_module.name not in {wanted, keras.config.floatx()}:
        raise _two_policies(train, of_module.name, reference)
    return wanted


def require_precision(model: keras.Model, train: TrainSpec, *, reference: str) -> None:
    """Check that the model computes in the precision that `train.precision` sets.

    Args:
        model: as the user's function returned it.
        train: with `precision`; None checks nothing.
        reference: the function's name in the run file, for messages.

    Raises:
        ModelError: the function sets another policy, or no layer uses the policy.
    """
    if train.precision is None:
        return
    now = keras.config.dtype_policy().name
    if now != _POLICIES[train.precision]:
        raise _two_policies(train, now, reference)
    # Nested models and inputs compute nothing themselves.
    computing = {
        layer.compute_dtype
        for layer in layers_of(model)
        if not isinstance(layer, keras.Model | keras.layers.InputLayer)
    }
    if computing and train.precision not in computing:
        raise ModelError(
            f"train.precision = {train.precision}, but no layer of {reference} computes in it; the layers compute in "
            f"{', '.join(sorted(map(str, computing)))}, because each was created or loaded with its own dtype; remove "
            "train.precision, or create the layers without dtype"
        )


def _two_policies(train: TrainSpec, other: str, reference: str) -> ModelError:
    return ModelError(
        f"train.precision = {train.precision}, but {reference} sets the dtype policy {other} itself; remove one of them"
    )
