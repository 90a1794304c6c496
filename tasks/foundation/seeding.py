"""What user code draws when it is imported, and while it gives examples, follows from `train.seed`.

Without this, a layer that a module makes when it is imported begins with other weights in every process.
"""

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_SEEDS = 2**31

# What the generators of the process were right after a module of the user's was imported, by module, folder and seed.
_left: dict[tuple[str, Path, int], Any] = {}


@contextmanager
def seeded_import(module: str, folder: Path, seed: int) -> Iterator[None]:
    """Around the import of a module: its draws are the same in every process, and others' stay as they would be.

    Python's, NumPy's and TensorFlow's generators and Keras's source of seeds are seeded; afterwards they are as they
    were before. Other threads that draw from Python's or NumPy's generator meanwhile change what the module draws.

    Args:
        module: as the run file names it, `model.py` or `package.module`.
        folder: the run file's folder.
        seed: `train.seed`.
    """
    before = _states()
    number = _derived(module, seed)
    _seed(number)
    try:
        with own_seeds(random.Random(number)):  # noqa: S311 - to be drawn again
            yield
        _left[module, folder, seed] = _states()
    finally:
        _put_back(before)


def seed_for_reading(module: str, folder: Path, seed: int) -> None:
    """Have the generators where the module's import left them: also where the module has seeded them itself."""
    left = _left.get((module, folder, seed))
    number = _derived(module, seed)
    if left is None:  # imported by somebody else, or for another seed
        _seed(number)
    else:
        _put_back(left)
    if find_spec("keras") is not None:
        from keras.src.random import seed_generator

        seed_generator.python_random = random.Random(number)  # noqa: S311 - to be drawn again


@contextmanager
def own_seeds(source: random.Random) -> Iterator[None]:
    """Have Keras draw the seeds that nobody gave from `source`, also after the block, until somebody else sets it.

    Keras takes them from Python's one generator of the process, and so do other threads (Prefect's client draws its
    pauses there): one draw during a build and every layer from there on begins with other weights. Seeded alike, this
    source gives the numbers that the process's would give. User code may seed that one, as
    `keras.utils.set_random_seed` does; within the block that seeds this source too.
    """
    if find_spec("keras") is None:
        yield
        return
    from keras.src.random import seed_generator  # nothing public says where seeds come from

    seed_generator.python_random = source
    seed, builder = random.seed, threading.get_ident()

    def seed_both(*given: Any, **named: Any) -> None:
        seed(*given, **named)
        if threading.get_ident() == builder:
            source.seed(*given, **named)

    random.seed = seed_both
    try:
        yield
    finally:
        random.seed = seed


def _derived(module: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed} {module}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % _SEEDS


def _seed(number: int) -> None:
    random.seed(number)
    if find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(number)  # noqa: NPY002 - the generator that users' code draws from
    if find_spec("tensorflow") is not None:
        import tensorflow as tf  # images that only move files have neither

        tf.random.set_seed(number)


def _states() -> tuple[Any, ...]:
    """Of Python's, NumPy's and TensorFlow's generators, and where Keras takes seeds from; None for what is missing."""
    numpy = seed = source = None
    if find_spec("numpy") is not None:
        import numpy as np

        numpy = np.random.get_state()  # noqa: NPY002
    if find_spec("tensorflow") is not None:
        from keras.src.random import seed_generator
        from tensorflow.python.eager import context  # nothing public tells the seed

        seed, source = context.global_seed(), seed_generator.python_random
    return random.getstate(), numpy, seed, source


def _put_back(states: tuple[Any, ...]) -> None:
    python, numpy, seed, source = states
    random.setstate(python)
    if numpy is not None:
        import numpy as np

        np.random.set_state(numpy)  # noqa: NPY002
    if source is not None:
        from keras.src.random import seed_generator

        seed_generator.python_random = source
    if seed is not None:
        import tensorflow as tf

        tf.random.set_seed(seed)
