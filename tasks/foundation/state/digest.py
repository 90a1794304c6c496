"""The digest of a train state: sha256 over the sorted (path, dtype, shape, bytes) of its keys."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


def digest_of(keys: Iterable[str], value_of: Callable[[str], npt.NDArray[Any]]) -> str:
    """Compute the digest.

    Args:
        keys: in any order.
        value_of: the value of a key. Called for one key after the other, so memory holds one value at a time.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for key in sorted(keys):
        value = np.asarray(value_of(key))
        digest.update(f"{key}\0{value.dtype.name}\0{list(value.shape)}\0".encode())
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)  # its bytes, without a copy
    return digest.hexdigest()
