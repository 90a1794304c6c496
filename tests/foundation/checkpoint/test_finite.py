"""NaN and infinity are found in weights of every floating dtype, wherever they are."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from baton.tasks.foundation.checkpoint import snapshot
from baton.tasks.foundation.checkpoint.snapshot import all_finite

DTYPES = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 99, 100, 249])
def test_one_value_is_enough(monkeypatch: pytest.MonkeyPatch, dtype: Any, value: float, at: int) -> None:
    monkeypatch.setattr(snapshot, "_BLOCK", 100)
    array = np.ones(250, dtype)
    array[at] = value
    assert not all_finite(array.reshape(25, 10))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_are_finite(dtype: Any) -> None:
    limits = ml_dtypes.finfo(dtype)
    values = [limits.max, -limits.max, limits.smallest_subnormal, 0, -0.0]
    assert all_finite(np.array(values, dtype))
    assert all_finite(np.array(limits.max, dtype))
    assert all_finite(np.zeros(0, dtype))
