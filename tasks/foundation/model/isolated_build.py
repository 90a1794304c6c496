"""Building a model beside other work: it seeds every source of random numbers, and clears what Keras keeps."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from keras.src.backend.common import global_state  # nothing public gives it back
from keras.src.random import seed_generator
from tensorflow.python.eager import context  # nothing public tells the state of TensorFlow's own seed


@contextmanager
def undisturbed() -> Iterator[None]:
    """Random numbers and Keras's global state go on after the block as if nothing had happened in it.

    A user's `load` that is half read must not yield other examples because a model was built meanwhile.
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
