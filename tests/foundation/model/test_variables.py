"""Variables of a traced function that a checkpoint would miss, however a strategy wraps them."""

from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from baton.tasks.foundation.model.variables import Leaf, untracked_variables, values_in_file


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


def test_what_a_file_lacks_is_found_by_loading_it() -> None:
    has, lacks, more = (tf.Variable(value) for value in ([0.0, 1.0], [0.0, 2.0], [3.0, 0.0]))
    leaves = {name: Leaf(path=name, variable=each, per_replica=False) for name, each in (("a", has), ("b", lacks))}
    everything = [*leaves.values(), Leaf(path="c", variable=more, per_replica=False)]

    def load() -> None:
        has.assign([0.0, 1.0])
        more.assign([5.0, 5.0])

    found = values_in_file(leaves, everything, load)
    assert {name: value.tolist() for name, value in found.items()} == {"a": [0, 1]}
    assert [each.numpy().tolist() for each in (has, lacks, more)] == [[0, 1], [0, 2], [3, 0]]
