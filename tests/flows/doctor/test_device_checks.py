"""Compiling a train step with XLA and reading its error messages; the memory that a replica needs at least."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as tf_config

from baton.flows.doctor.device_checks import compile_step, explain_failure
from baton.flows.doctor.run_file_checks import check_accelerator
from baton.tasks.foundation.errors import ModelError
from tests.support.faulty_runs import V5E, load_faulty_run
from tests.support.step_models import ApplyLayer, batch_of, step_of


def leaf(gigabytes: int, *, trainable: bool) -> Any:
    component = SimpleNamespace(dtype=tf.float32, shape=tf.TensorShape([gigabytes * 10**9 // 4]))
    path = "model/kernel" if trainable else "optimizer/momentum"
    return SimpleNamespace(path=path, trainable=trainable, seed=False, per_replica=False, components=(component,))


@pytest.mark.parametrize(("parameters", "slots", "verdict"), [(2, 4, "pass"), (4, 4, "warn"), (6, 6, "fail")])
def test_memory_counts_gradients_once_more(parameters: int, slots: int, verdict: str, tmp_path: Path) -> None:
    from baton.flows.doctor.device_checks import check_memory

    leaves = (leaf(parameters, trainable=True), leaf(slots, trainable=False))
    built: Any = SimpleNamespace(state=SimpleNamespace(leaves=leaves), arguments=())
    found = check_memory(built, check_accelerator(load_faulty_run(tmp_path), V5E).value)
    assert (found.verdict, found.value) == (verdict, (2 * parameters + slots) * 10**9)
    assert bool(found.remedy) == (verdict != "pass")
    assert found.text.endswith("of a replica's 16.0 GB")


@pytest.fixture(autouse=True)
def _float32_policy() -> None:
    """Earlier tests may have left another dtype policy."""
    keras.config.set_dtype_policy("float32")


def test_error_names_layer_and_operation() -> None:
    x = keras.Input((4,))
    work = ApplyLayer(lambda x: x + tf.cast(tf.strings.length(tf.strings.as_string(x)), x.dtype), name="bad")
    model = keras.Model(x, keras.layers.Dense(1)(work(x)))
    model.compile("sgd", "mse")
    step, specs, layers = step_of(model, batch_of((16, 4), (16, 1)))
    words = r"XLA refuses to compile the train step.*: layer bad, operation AsString \(node .*/bad"
    with pytest.raises(ModelError, match=words):
        compile_step(step, specs, reference="model.py:build", layers=layers)


def test_lookup_table_is_named_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    words = tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2]), tf.constant([3, 4]))
    table = tf.lookup.StaticHashTable(words, 0)
    with pytest.raises(ModelError, match="it uses a resource that is no variable, such as a lookup table"):
        compile_step(table.lookup, (tf.TensorSpec((4,), tf.int32),), reference="model.py:build", layers=())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Input 1 to node `a/bad_1/range` with op Range must be constant.\nMore", "layer bad, operation Range (node a"),
        ("Something else\nMore", "Something else"),
        ("", ""),
    ],
)
def test_xla_messages_are_explained(text: str, expected: str) -> None:
    assert explain_failure(text, ["bad"]).startswith(expected)


def test_compiling_keeps_op_determinism_on() -> None:
    def pooled(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.nn.max_pool2d(x, 2, 2, "VALID"))
        return tape.gradient(y, x)

    was_on = tf_config.is_op_determinism_enabled()
    tf_config.enable_op_determinism()
    try:
        compile_step(pooled, (tf.TensorSpec((1, 4, 4, 1), tf.float32),), reference="m:build", layers=())
        assert tf_config.is_op_determinism_enabled()
    finally:
        if not was_on:
            tf_config.disable_op_determinism()
