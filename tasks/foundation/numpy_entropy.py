"""Makes `np.random.default_rng()` without a seed draw from the run's seed, while user code runs.

NumPy seeds such a generator from the operating system, so each process would get other examples.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


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
