"""Where variables lie, in one line."""

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tasks.foundation.model.variable_placement import placement_words


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
def test_placement_in_words(variables: list[Any], words: str) -> None:
    assert placement_words(variables) == words


def test_a_variable_of_tensorflows_own() -> None:
    assert placement_words([tf.Variable(1.0)]) == "variables: 1 on CPU:0"
