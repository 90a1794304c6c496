"""Notices a function that takes random numbers from Python while it is traced, where they become constants.

A function is traced once per start and not once per example, so a resumed run would get other constants.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np


def seed_python(number: int) -> None:
    """Seed the global generators of Python and NumPy with the number of the trace, so that two traces differ."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - user code draws from the global generator


def draws_in_python(trace: Callable[[], Any]) -> bool:
    """Whether a function becomes another graph each time it is traced.

    The first trace may build layers, so two traces that differ are followed by a third.

    Args:
        trace: traces the function anew, and returns the concrete function.
    """
    first, second = _content(trace()), _content(trace())
    return first != second and second != _content(trace())


def _content(concrete: Any) -> Counter[tuple[str, bytes]]:
    """Count the operations of a graph and the functions that it calls; constants with their values."""
    graph = concrete.graph.as_graph_def()
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    return Counter((node.op, _constant(node)) for node in nodes)


def _constant(node: Any) -> bytes:
    return bytes(node.attr["value"].tensor.SerializeToString(deterministic=True)) if node.op == "Const" else b""
