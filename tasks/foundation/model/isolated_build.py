"""Isolates a model build from other work: a build seeds all random generators, and clears Keras's global state."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from keras.src.backend.common import global_state  # no public call restores it
from keras.src.random import seed_generator
from tensorflow.python.eager import context  # no public call reads TensorFlow's global seed


@contextmanager
def preserved_global_state() -> Iterator[None]:
    """Restore random generators and Keras's global state after the block.

    A user's `load` function that is being read must yield the same examples, although a model is built meanwhile.
    """
    of_python, of_numpy, of_layers = random.getstate(), np.random.get_state(), seed_generator.python_random  # noqa: NPY002
    of_keras = global_state.GLOBAL_STATE_TRACKER, global_state.GLOBAL_SETTINGS_TRACKER
    eager = context.context()
    seed, source = eager._seed, getattr(eager, "_rng", None)
    drawn = None if source is None else source.getstate()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        seed_generator.python_random = of_layers
        global_state.GLOBAL_STATE_TRACKER, global_state.GLOBAL_SETTINGS_TRACKER = of_keras
        eager._seed = seed
        if source is not None:
            source.setstate(drawn)
            eager._rng = source
