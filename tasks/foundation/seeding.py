"""Make the random numbers of user code a function of `train.seed`, during its import and while it yields examples.

Without this, a layer that a module creates at import would start with other weights in every process. NumPy seeds
`np.random.default_rng()` from the operating system, so while user code runs it draws from the run's seed instead.
"""

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@contextmanager
def numpy_entropy_from(source: random.Random) -> Iterator[None]:
    """Make NumPy's unseeded generators take their seeds from `source`, in this thread, during the block.

    Args:
        source: the next seeds; it moves on with each generator that is made.
    """
    if find_spec("numpy") is None:
        yield
        return
    from numpy.random import bit_generator  # no public function sets the source of seeds

    drawn = getattr(bit_generator, "randbits", None)
    if drawn is None:
        yield
        return
    user = threading.get_ident()

    def randbits(bits: int) -> int:
        from_source = threading.get_ident() == user
        return source.getrandbits(bits) if from_source else int(drawn(bits))

    bit_generator.randbits = randbits  # type: ignore[attr-defined]
    try:
        yield
    finally:
        bit_generator.randbits = drawn  # type: ignore[attr-defined]


_SEEDS = 2**31

# States of the process's generators right after the import of a user module, by module, folder and seed. A module is
# imported once per process, so this is a module global.
_states_after_import: dict[tuple[str, Path, int], Any] = {}


@contextmanager
def seeded_import(module: str, folder: Path, seed: int, *, tensorflow: bool = True) -> Iterator[None]:
    """Seed all generators during the import of a module, and restore them afterwards.

    This covers the generators of Python, NumPy and TensorFlow, and the source of Keras's seeds. If another thread draws
    from Python's or NumPy's generator during the import, the module gets other numbers.

    Args:
        module: as the run file names it, `model.py` or `package.module`.
        seed: `train.seed`.
        tensorflow: whether the module may use TensorFlow or Keras, which are imported for their generators.
    """
    before = _states(tensorflow=tensorflow)
    number = _derive_seed(module, seed)
    _seed(number, tensorflow=tensorflow)
    try:
        fresh = numpy_entropy_from(random.Random(number))  # noqa: S311 - must be reproducible
        source = random.Random(number)  # noqa: S311
        with keras_seeds_from(source) if tensorflow else nullcontext(), fresh:
            yield
        _states_after_import[module, folder, seed] = _states(tensorflow=tensorflow)
    finally:
        _restore(before)


def seed_as_after_import(module: str, folder: Path, seed: int) -> None:
    """Set the generators to their state after the module's import, which includes seeds that the module set itself."""
    states = _states_after_import.get((module, folder, seed))
    number = _derive_seed(module, seed)
    if states is None:  # something else imported the module, or another seed was used
        _seed(number)
    else:
        _restore(states)
    if find_spec("keras") is not None:
        from keras.src.random import seed_generator

        seed_generator.python_random = random.Random(number)  # noqa: S311 - must be reproducible


@contextmanager
def keras_seeds_from(source: random.Random) -> Iterator[None]:
    """Make Keras draw its automatic seeds from `source`, within the block and after it, until it is set again.

    Keras takes these seeds from Python's global generator, which other threads use too (Prefect's client draws its
    retry delays from it). A single draw during a build would change the initial weights of all later layers. A source
    with the same seed yields the same numbers as the global generator. User code may seed the global generator, as
    `keras.utils.set_random_seed` does; within the block this also seeds `source`.
    """
    if find_spec("keras") is None:
        yield
        return
    from keras.src.random import seed_generator  # no public function sets the source of seeds

    seed_generator.python_random = source
    seed, builder = random.seed, threading.get_ident()

    def seed_both(*args: Any, **kwargs: Any) -> None:
        seed(*args, **kwargs)
        if threading.get_ident() == builder:
            source.seed(*args, **kwargs)

    random.seed = seed_both
    try:
        yield
    finally:
        random.seed = seed


def random_source(module: str, seed: int) -> random.Random:
    """Return a generator for seeds that a user module draws: a function of the module's name and `train.seed`."""
    return random.Random(_derive_seed(module, seed))  # noqa: S311 - must be reproducible


def _derive_seed(module: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed} {module}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % _SEEDS


def _seed(number: int, *, tensorflow: bool = True) -> None:
    random.seed(number)
    if find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(number)  # noqa: NPY002 - user code draws from the global generator
    if tensorflow and find_spec("tensorflow") is not None:
        import tensorflow as tf  # missing in images that only move files

        tf.random.set_seed(number)


def _states(*, tensorflow: bool) -> tuple[Any, ...]:
    """Return the states of all generators and Keras's source of seeds; None for packages that are missing or unused."""
    numpy = seed = source = None
    if find_spec("numpy") is not None:
        import numpy as np

        numpy = np.random.get_state()  # noqa: NPY002
    if tensorflow and find_spec("tensorflow") is not None:
        from keras.src.random import seed_generator
        from tensorflow.python.eager import context  # no public function returns the seed

        seed, source = context.global_seed(), seed_generator.python_random
    return random.getstate(), numpy, seed, source


def _restore(states: tuple[Any, ...]) -> None:
    python, numpy, seed, source = states  # the last two are None without TensorFlow
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
