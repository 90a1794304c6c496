"""Messages about a changed environment."""

from types import SimpleNamespace
from typing import Any

import keras
import pytest

from tasks.foundation.contracts.log_entry import Environment
from tasks.init_or_restore.changes import _environment_words


def on(replicas: int, intra: int = 1) -> Environment:
    return Environment(accelerator="cpu", replicas=replicas, intra_op_threads=intra, inter_op_threads=1, versions={})


def words(before: Environment, now: Environment, *layers: Any) -> str:
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return _environment_words(before, now, SimpleNamespace(model=model))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "follows"),
    [(0.0, "losses continue as before, to float tolerance"), (0.1, "depend on which examples share a replica")],
)
def test_change_of_replicas_is_described(rate: float, follows: str) -> None:
    text = words(on(4), on(2), keras.layers.Dropout(rate, name="drop"))
    assert "replicas: 4 -> 2. 4 replicas became 2: the same examples form the same global batches" in text
    assert follows in text
    assert ("drop (random" in text) == bool(rate)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (False, "from here on TensorFlow uses deterministic operations only"),
        (True, "from here on TensorFlow may use non-deterministic operations (train.deterministic: false)"),
    ],
)
def test_change_of_determinism_is_described(before: bool, expected: str) -> None:
    one, other = (on(1).model_copy(update={"deterministic": value}) for value in (before, not before))
    text = words(one, other)
    assert expected in text
    assert "False" not in text


def test_equal_replicas_are_not_mentioned() -> None:
    text = words(on(4), on(4, intra=2), keras.layers.Dropout(0.1))
    assert text.endswith("intra_op_threads: 1 -> 2")
