"""Numbers in messages are short; the compared and stored values are exact."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as some

from baton.tasks.foundation.contracts.identity import difference_words, differences, readable


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float32(0.001), "0.001"),
        (float32(0.1), "0.1"),
        (float32(1e-7), "1e-07"),
        (float32(0.9990000128746033), "0.999"),
        (0.001, "0.001"),
        (0.1 + 0.2, "0.30000000000000004"),  # a double, not a float32
        (2000.0, "2000.0"),
        (16777216.0, "16777216.0"),
        (999999986991104.0, "999999986991104.0"),
        (math.pi, "3.141592653589793"),
        (0.0, "0.0"),
        (1e300, "1e+300"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (True, "True"),
        (3, "3"),
        (None, "None"),
        ("0.0010000000474974513", "0.0010000000474974513"),
        ({"rates": [float32(0.3), {"b": (float32(0.7),)}]}, "{'rates': [0.3, {'b': [0.7]}]}"),
    ],
)
def test_values_are_readable(value: object, shown: str) -> None:
    assert str(readable(value)) == shown


@given(some.floats(width=32, allow_nan=False))
def test_readable_value_is_the_same_float32(value: float) -> None:
    assert math.isinf(value) or float32(readable(value)) == value
    assert len(repr(readable(value))) <= len(repr(value))


@given(some.floats(allow_nan=False))
def test_doubles_are_unchanged(value: float) -> None:
    if math.isfinite(value) and abs(value) < 3e38 and float32(value) != value:
        assert readable(value) == value


def test_identity_differences_are_exact_and_readable() -> None:
    def rate(value: float) -> dict[str, object]:
        return {"compile.optimizer": {"config": {"learning_rate": value}}}

    key = "compile.optimizer.config.learning_rate"
    assert difference_words(differences(rate(float32(0.001)), rate(float32(0.01)))) == f"{key}: 0.001 -> 0.01"
    # These two differ, so the message must not show both as 0.001.
    assert difference_words(differences(rate(float32(0.001)), rate(0.001))) == f"{key}: 0.0010000000474974513 -> 0.001"
    assert differences(rate(0.25), rate(0.25)) == ()


def test_long_values_are_shortened_to_the_difference() -> None:
    before, after = ({"model.code": f"{'a' * 100}{end}"} for end in ("before", "after"))
    assert difference_words(differences(before, after)) == f"model.code: ...{'a' * 20}before -> ...{'a' * 20}after"
