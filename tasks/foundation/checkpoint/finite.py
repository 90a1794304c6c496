"""Refuses weights that are not finite, before anything of them is written."""

from typing import Any

import numpy as np

from tasks.foundation.checkpoint.snapshot import Snapshot
from tasks.foundation.errors import NonFinite

_BLOCK = 1 << 18
# All bits of the exponent are set in NaN and infinity. NumPy is slow with these dtypes.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}


def require_finite(snapshot: Snapshot) -> None:
    """Check the trainable variables of a snapshot.

    Raises:
        NonFinite: one holds NaN or infinity.
    """
    values = {value.key: value.array for value in snapshot.values}
    for key, path in snapshot.trainable:
        if not all_finite(values[key]):
            raise NonFinite(
                f"step {snapshot.step}{snapshot.where}: {path} holds NaN or infinity, which is not committed. Lower "
                "the learning rate, clip gradients, or look at the data of these steps",
                step=snapshot.step,
            )


def all_finite(array: Any) -> bool:
    """Whether an array of any floating dtype holds neither NaN nor infinity."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return all(_block_is_finite(flat[begin : begin + _BLOCK]) for begin in range(0, len(flat), _BLOCK))


def _block_is_finite(block: Any) -> bool:
    exponent = _EXPONENTS.get(block.dtype.name)
    if exponent is not None:
        return not bool(np.any((block.view(np.uint16) & exponent) == exponent))
    return bool(np.isfinite(block).all())
