"""The two smallest and the two largest values of what may be an index are known when the data is prepared."""

import time
from typing import Any

import numpy as np
import pytest

from baton.tasks.prepare_data.example_checks import Extremes


def found_in(values: list[Any], name: str = "y") -> list[tuple[float, str]]:
    extremes = Extremes()
    for number, value in enumerate(values):
        extremes.add(f"example {number}", {name: np.asarray(value)})
    return [(each.value, each.where) for each in extremes.found() if each.feature == name]


@pytest.mark.parametrize("seed", range(20))
def test_extremes_are_those_of_all_values(seed: int) -> None:
    draw = np.random.default_rng(seed)
    few = int(draw.integers(1, 12))
    arrays = draw.integers(-few, few, size=(30, int(draw.integers(1, 9)))).astype(draw.choice(["i1", "i4", "i8"]))
    distinct = np.unique(arrays).tolist()
    expected = distinct if len(distinct) <= 4 else [*distinct[:2], *distinct[-2:]]
    found = found_in(list(arrays))
    assert [value for value, _ in found] == expected
    for value, where in found:
        first = int(np.flatnonzero((arrays == value).any(axis=1))[0])
        assert where == f"example {first}", "the first example that has it"


@pytest.mark.parametrize(
    ("values", "name", "expected"),
    [
        ([np.int64(3), np.int64(1), np.int64(3)], "y", [1, 3]),
        ([np.float32(2.0), np.float32("nan"), np.float32(-0.5)], "y", [-0.5, 2.0]),
        ([np.float32(2.0)], "x", []),
        ([np.ones(3, "f4")], "y", []),
        ([True], "y", []),
        ([np.uint64(2**64 - 1)], "x", [2**64 - 1]),
        ([np.zeros((300, 300), "u1")], "x", []),
        ([np.zeros(0, "i8"), np.int64([5])], "x", [5]),
    ],
)
def test_indices_and_labels_are_looked_at(values: list[Any], name: str, expected: list[float]) -> None:
    assert [value for value, _ in found_in(values, name)] == expected


def test_it_takes_little_time() -> None:
    extremes, label = Extremes(), np.asarray(np.int64(1))
    tokens = np.random.default_rng(0).integers(0, 50_000, 512)
    extremes.add("first", {"x": tokens, "y": label})
    began = time.process_time()
    for _ in range(1000):
        extremes.add("later", {"x": tokens, "y": label})
    assert time.process_time() - began < 1.0  # 30 ms
