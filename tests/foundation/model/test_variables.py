"""Which variables of a traced function no checkpoint would hold, however a strategy wraps them."""

from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from tasks.foundation.model.variables import Leaf, uncovered


def of_graph(*variables: Any) -> Any:
    return SimpleNamespace(graph=SimpleNamespace(variables=variables))


def test_a_variable_is_covered_where_all_its_copies_are() -> None:
    first, second, other = (tf.Variable(1.0) for _ in range(3))
    mirrored = SimpleNamespace(name="w", values=(first, second))
    leaf = Leaf(path="w", variable=mirrored, per_replica=False)
    packed = SimpleNamespace(name="w/packed", _distributed_variables=[first, second])
    half = SimpleNamespace(name="half", _distributed_variables=[first, other])
    assert uncovered(of_graph(first, second, mirrored, packed), [leaf]) == ()
    assert uncovered(of_graph(half, packed), [leaf]) == ("half",)
    assert uncovered(of_graph(other), [leaf]) == (other.name,)
