"""The operations of a train step that a TPU cannot run."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from baton.flows.doctor.model_checks import find_unsupported_ops, layer_of
from tests.support.step_models import ApplyLayer, batch_of, step_of


@pytest.fixture(autouse=True)
def _float32_policy() -> None:
    """Earlier tests may have left another dtype policy."""
    keras.config.set_dtype_policy("float32")


def unsupported_in(work: Callable[[Any], Any]) -> list[tuple[str, str, str]]:
    x = keras.Input((4,))
    model = keras.Model(x, keras.layers.Dense(1)(ApplyLayer(work, name="bad")(x)))
    model.compile("sgd", "mse")
    step, specs, layers = step_of(model, batch_of((16, 4), (16, 1)))
    concrete = tf.function(step, jit_compile=False).get_concrete_function(*specs)
    return [(each.kind, each.op, each.layer) for each in find_unsupported_ops(concrete, layers)]


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda x: x + 1, []),
        (lambda x: tf.where(x > 0, x, 0.0), []),
        (lambda x: tf.reshape(tf.reshape(x, [tf.shape(x)[0] * 4]), [-1, 4]), []),
        (lambda x: x + tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0)), [("dynamic shape", "Where", "bad")]),
        (
            lambda x: x + tf.map_fn(lambda row: tf.reduce_sum(tf.boolean_mask(row, row > 0)), x)[:, None],
            [("dynamic shape", "Where", "bad")],
        ),
        (
            lambda x: x + tf.reduce_sum(tf.cast(tf.range(tf.cast(x[0, 0], tf.int32)), tf.float32)),
            [("dynamic shape", "Range", "bad")],
        ),
        (
            lambda x: x + tf.cast(tf.strings.length(tf.strings.as_string(x)), tf.float32),
            [("string", "AsString", "bad"), ("string", "StringLength", "bad")],
        ),
        (
            lambda x: x + tf.ensure_shape(tf.numpy_function(lambda v: v, [x], tf.float32), x.shape),
            [("python", "PyFunc", "bad")],
        ),
        (lambda x: tf.cast(tf.cast(x, tf.float64) * 2, tf.float32), [("float64", "Cast", "bad")]),
        (
            lambda x: x + tf.reduce_sum(tf.unique(tf.stop_gradient(tf.reshape(x, [-1])))[0]),
            [("dynamic shape", "Unique", "bad")],
        ),
        (
            lambda x: x + tf.reduce_sum(x[: tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.int32))]),
            [("dynamic shape", "StridedSlice", "bad")],
        ),
    ],
)
def test_unsupported_ops_are_found_with_their_layer(
    work: Callable[[Any], Any], expected: list[tuple[str, str, str]]
) -> None:
    found = unsupported_in(work)
    assert [each for each in found if each[1] != "Mul"] == expected


def test_assertions_and_unused_ops_are_ignored() -> None:
    def work(x: Any) -> Any:
        tf.boolean_mask(x, x[:, 0] > 0)
        tf.debugging.assert_greater(x, -1e9, message="too small")
        return tf.debugging.check_numerics(x, "not finite")

    assert unsupported_in(work) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Layer 'reshape':UserWarning")
def test_common_layers_and_metrics_are_supported() -> None:
    tokens = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(10, 4, mask_zero=True)(tokens)
    x = keras.layers.MultiHeadAttention(2, 2, dropout=0.1)(x, x, use_causal_mask=True)
    x = keras.layers.LSTM(4, return_sequences=True)(x)
    x = keras.layers.Bidirectional(keras.layers.GRU(3, return_sequences=True))(x)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Reshape((8, 6, 1))(x)
    x = keras.layers.Conv2D(4, 3, padding="same")(x)
    x = keras.layers.SeparableConv2D(4, 3)(keras.layers.BatchNormalization()(x))
    x = keras.layers.GaussianNoise(0.1)(keras.layers.SpatialDropout2D(0.2)(x))
    x = keras.layers.Flatten()(keras.layers.MaxPooling2D()(keras.layers.UpSampling2D()(x)))
    model = keras.Model(tokens, keras.layers.Dense(1, activation="sigmoid")(keras.layers.Dropout(0.2)(x)))
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10, warmup_steps=3, warmup_target=0.2)
    metrics = [keras.metrics.AUC(), "accuracy", keras.metrics.Precision(), keras.metrics.F1Score(threshold=0.5)]
    model.compile(keras.optimizers.AdamW(schedule, clipnorm=1.0, use_ema=True), "binary_crossentropy", metrics=metrics)
    step, specs, layers = step_of(model, (np.ones((16, 8), "int32"), np.ones((16, 1), "float32")))
    concrete = tf.function(step, jit_compile=False).get_concrete_function(*specs)
    assert find_unsupported_ops(concrete, layers) == ()
    classes = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    top = keras.metrics.SparseTopKCategoricalAccuracy(2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    classes.compile("nadam", loss, metrics=["accuracy", top], weighted_metrics=["accuracy"])
    step, specs, layers = step_of(classes, (np.ones((16, 4), "float32"), np.ones((16,), "int64")))
    assert find_unsupported_ops(tf.function(step, jit_compile=False).get_concrete_function(*specs), layers) == ()


@pytest.mark.parametrize(
    ("node", "layer"),
    [
        ("functional_1/bad_1/Where", "bad"),
        ("gradient_tape/functional_1/outer_1/conv2d_2/Conv2D/Op", "conv2d_2"),
        ("functional_1/conv2d_2_1/Conv2D", "conv2d_2"),
        ("compile_loss/mse/sub", ""),
        ("bad", ""),
    ],
)
def test_layer_is_found_in_node_name(node: str, layer: str) -> None:
    assert layer_of(node, ["bad", "outer", "conv2d_2", "conv2d"]) == layer
