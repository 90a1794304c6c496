"""The description of the devices that hold variables."""

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from baton.tasks.foundation.model.variables import describe_placement


def on(*devices: str) -> Any:
    parts = [SimpleNamespace(device=f"/job:localhost/replica:0/task:0/device:{device}") for device in devices]
    return parts[0] if len(parts) == 1 else SimpleNamespace(values=tuple(parts))


CORES = tuple(f"TPU:{index}" for index in range(16))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ([on("CPU:0")], "variables: 1 on CPU:0"),
        ([on("TPU:0", "TPU:1"), on("TPU:0", "TPU:1"), on("CPU:0")], "variables: 1 on CPU:0; 2 on each of TPU:0, TPU:1"),
        ([on("GPU:0", "GPU:1"), on("GPU:0")], "variables: 2 on GPU:0; 1 on GPU:1"),
        ([on(*CORES)] * 3, "variables: 3 on each of TPU:0 to TPU:15 (16 devices)"),
    ],
)
def test_placement_is_described(variables: list[Any], words: str) -> None:
    assert describe_placement(variables) == words


def test_placement_of_a_tensorflow_variable() -> None:
    assert describe_placement([tf.Variable(1.0)]) == "variables: 1 on CPU:0"
