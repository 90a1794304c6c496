"""The digest of a train state: sha256 over the sorted (path, dtype, shape, bytes) of its keys."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class StateDigest:
    """Computes the digest value by value, in the order of the keys."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def begin(self, key: str, dtype: str, shape: Sequence[int]) -> None:
        """Begin the next value, whose bytes follow.

        Args:
            key: greater than the key before.
            dtype: NumPy's name of it.
            shape: of the value.
        """
        self._sha256.update(f"{key}\0{dtype}\0{list(shape)}\0".encode())

    def update(self, data: memoryview) -> None:
        """The next bytes of the value."""
        self._sha256.update(data)

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        return self._sha256.hexdigest()


def digest_of(keys: Iterable[str], value_of: Callable[[str], npt.NDArray[Any]]) -> str:
    """Compute the digest.

    Args:
        keys: in any order.
        value_of: the value of a key. Called for one key after the other, so memory holds one value at a time.

    Returns:
        64 hexadecimal digits.
    """
    digest = StateDigest()
    for key in sorted(keys):
        value = np.asarray(value_of(key))
        digest.begin(key, value.dtype.name, value.shape)
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)  # its bytes, without a copy
    return digest.hexdigest()
