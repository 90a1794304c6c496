"""Isolates a model build from other work: a build seeds all random generators, and clears Keras's global state."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras.src.backend.common import global_state  # no public call restores it
from keras.src.random import seed_generator
from tensorflow.python.eager import context  # no public call reads TensorFlow's global seed

from tasks.foundation.contracts.log_entry import KerasConfig
from tasks.foundation.keras_config import keras_config, set_keras_config


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
