"""Variables of a traced function that a checkpoint would miss, however a strategy wraps them."""

from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from tasks.foundation.model.variables import Leaf, untracked_variables


def of_graph(*variables: Any) -> Any:
    return SimpleNamespace(graph=SimpleNamespace(variables=variables))


def test_variable_is_tracked_if_all_its_copies_are() -> None:
    first, second, other = (tf.Variable(1.0) for _ in range(3))
    mirrored = SimpleNamespace(name="w", values=(first, second))
    leaf = Leaf(path="w", variable=mirrored, per_replica=False)
    packed = SimpleNamespace(name="w/packed", _distributed_variables=[first, second])
    half = SimpleNamespace(name="half", _distributed_variables=[first, other])
    assert untracked_variables(of_graph(first, second, mirrored, packed), [leaf]) == ()
    assert untracked_variables(of_graph(half, packed), [leaf]) == ("half",)
    assert untracked_variables(of_graph(other), [leaf]) == (other.name,)
