"""Messages about a changed environment."""

from types import SimpleNamespace
from typing import Any

import keras
import pytest

from baton.tasks.foundation.contracts.log_entry import Environment, KerasConfig
from baton.tasks.init_or_restore.stage import _environment_words


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


ISA = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
DEFAULT = KerasConfig(epsilon=1e-7, floatx="float32", image_data_format="channels_last")


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"variables": {}}, {"variables": ISA}, "ONEDNN_MAX_CPU_ISA: none -> AVX2"),
        ({"variables": ISA}, {"variables": {}}, "ONEDNN_MAX_CPU_ISA: AVX2 -> none"),
        (
            {"variables": ISA, "processor": "Xeon"},
            {"variables": {"XLA_FLAGS": "--x=1"}, "processor": "EPYC"},
            "processor: Xeon -> EPYC; XLA_FLAGS: none -> --x=1; ONEDNN_MAX_CPU_ISA: AVX2 -> none",
        ),
        ({"cpu_features": "avx avx2"}, {"cpu_features": "avx"}, "cpu_features: avx avx2 -> avx"),
        ({"versions": {"keras": "3.1", "numpy": "2"}}, {"versions": {"numpy": "2"}}, "version of keras: 3.1 -> none"),
        (
            {"keras": DEFAULT},
            {"keras": DEFAULT.model_copy(update={"epsilon": 0.001})},
            "epsilon of Keras: 1e-07 -> 0.001",
        ),
    ],
)
def test_each_difference_has_its_name_and_both_values(
    before: dict[str, Any], now: dict[str, Any], expected: str
) -> None:
    one, other = (on(1).model_copy(update=values) for values in (before, now))
    assert words(one, other).partition("uninterrupted run: ")[2] == expected


def test_what_an_older_log_does_not_know_is_no_change() -> None:
    here = on(1).model_copy(
        update={"hash_seed": 0, "processor": "EPYC", "cpu_features": "avx", "variables": ISA, "keras": DEFAULT}
    )
    assert here.in_run_of(on(1)) == on(1)
    known = on(1).model_copy(update={"processor": "Xeon", "cpu_features": "avx", "variables": {}, "keras": DEFAULT})
    assert list(known.changes_to(here.in_run_of(known))) == ["processor", "ONEDNN_MAX_CPU_ISA"]
