"""The scan of a step's graph, XLA's word on it, and the peak of memory by liveness."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as tf_config

from flows.doctor.graph_scan import layer_of, scan
from flows.doctor.liveness import peak_bytes, size_of
from flows.doctor.xla import blamed, compiled_step
from tasks.foundation.errors import ModelError
from tasks.foundation.model.variables import layers_of


@pytest.fixture(autouse=True)
def _usual_policy() -> None:
    """Whatever dtype policy an earlier test's model has left."""
    keras.config.set_dtype_policy("float32")


HLO = """\
HloModule step, is_scheduled=true, input_output_alias={ {1}: (1, {}, may-alias) }, entry_computation_layout={(f32[4])}

%body (p.1: (f32[100])) -> (f32[100]) {
  %p.1 = (f32[100]{0}) parameter(0)
  %g.1 = f32[100]{0} get-tuple-element(%p.1), index=0
  %big.1 = f32[500]{0} broadcast(%g.1), dimensions={0}
  %small.1 = f32[100]{0} slice(%big.1), slice={[0:100]}
  ROOT %t.1 = (f32[100]{0}) tuple(%small.1)
}

ENTRY %main (x: f32[4], w: f32[1000]) -> (f32[], f32[1000]) {
  %x = f32[4]{0} parameter(0)
  %w = f32[1000]{0} parameter(1)
  %first = f32[100]{0} fusion(%x), kind=kLoop, calls=%other
  %second = bf16[200]{0} fusion(%first), kind=kLoop, calls=%other
  %view = bf16[2,100]{1,0} bitcast(%second)
  %init = (f32[100]{0}) tuple(%first)
  %loop = (f32[100]{0}) while(%init), condition=%cond, body=%body
  %last = f32[100]{0} get-tuple-element(%loop), index=0
  %loss = f32[] fusion(%last, %view), kind=kLoop, calls=%other
  %updated = f32[1000]{0} fusion(%w, %loss), kind=kLoop, calls=%other
  ROOT %result = (f32[], f32[1000]{0}) tuple(%loss, %updated)
}
"""


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[16,8]{1,0}", 512),
        ("pred[]", 1),
        ("(bf16[3], s64[2,2]{1,0})", 38),
        ("f32[<=10,2]", 80),
        ("c64[2]", 16),
        ("token[]", 0),
        ("s4[8]", 4),
        ("f8e4m3fn[8]", 8),
    ],
)
def test_sizes_of_shapes(shape: str, size: int) -> None:
    assert size_of(shape) == size


def test_the_peak_of_a_program_worked_out_by_hand() -> None:
    # In the loop: first (400), second (400, a view of it is read later), and big and small within, of which small is
    # the loop's own result, which lies in the memory of first.
    assert peak_bytes(HLO) == 400 + 400 + 2000
    # With nothing in the loop's body, the peak is at the end: what is updated lies where it lay.
    assert peak_bytes(HLO.replace("f32[500]", "f32[1]")) == 400 + 400 + 4
    # Without the alias, it needs memory of its own.
    assert peak_bytes(HLO.replace(", input_output_alias={ {1}: (1, {}, may-alias) }", "")) == 4000 + 4


def test_a_text_without_a_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        peak_bytes("HloModule nothing\n")


def batch_of(*shapes: tuple[int, ...], dtype: str = "float32") -> tuple[Any, ...]:
    return tuple(np.ones(shape, dtype) for shape in shapes)


def step_of(model: keras.Model, batch: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any], list[str]]:
    """Everything exists; the step, what it takes, and names of layers."""
    predictions = model(batch[0], training=False)
    model.optimizer.build(model.trainable_variables)
    model.compute_metrics(batch[0], batch[1], predictions, sample_weight=None)
    specs = [tf.TensorSpec(part.shape, part.dtype) for part in batch]
    return (lambda *parts: model.train_step(parts)["loss"]), specs, [layer.name for layer in layers_of(model)]


def test_the_activations_of_a_dense_network_within_a_factor_of_two() -> None:
    rows, width, depth = 512, 256, 6
    x = keras.Input((width,))
    hidden = x
    for _ in range(depth):
        hidden = keras.layers.Dense(width, activation="tanh")(hidden)
    model = keras.Model(x, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse")
    step, specs, layers = step_of(model, batch_of((rows, width), (rows, 1)))
    peak = peak_bytes(compiled_step(step, specs, reference="model.py:build", layers=layers))
    # The backward pass needs the output of every layer.
    activations = depth * rows * width * 4
    assert activations / 2 < peak < activations * 2


class Doing(keras.layers.Layer):
    def __init__(self, work: Callable[[Any], Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.work = work

    def call(self, x: Any) -> Any:
        return self.work(x)


def suspects_in(work: Callable[[Any], Any]) -> list[tuple[str, str, str]]:
    x = keras.Input((4,))
    model = keras.Model(x, keras.layers.Dense(1)(Doing(work, name="bad")(x)))
    model.compile("sgd", "mse")
    step, specs, layers = step_of(model, batch_of((16, 4), (16, 1)))
    concrete = tf.function(step, jit_compile=False).get_concrete_function(*specs)
    return [(each.kind, each.op, each.layer) for each in scan(concrete, layers)]


@pytest.mark.parametrize(
    ("work", "suspects"),
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
    ],
)
def test_what_is_found_and_where(work: Callable[[Any], Any], suspects: list[tuple[str, str, str]]) -> None:
    found = suspects_in(work)
    assert [each for each in found if each[1] != "Mul"] == suspects


def test_what_xla_leaves_out_and_what_nothing_reads_does_not_count() -> None:
    def work(x: Any) -> Any:
        tf.boolean_mask(x, x[:, 0] > 0)
        tf.debugging.assert_greater(x, -1e9, message="too small")
        return tf.debugging.check_numerics(x, "not finite")

    assert suspects_in(work) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Layer 'reshape':UserWarning")
def test_common_layers_and_metrics_pass() -> None:
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
    assert scan(concrete, layers) == ()
    classes = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    top = keras.metrics.SparseTopKCategoricalAccuracy(2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    classes.compile("nadam", loss, metrics=["accuracy", top], weighted_metrics=["accuracy"])
    step, specs, layers = step_of(classes, (np.ones((16, 4), "float32"), np.ones((16,), "int64")))
    assert scan(tf.function(step, jit_compile=False).get_concrete_function(*specs), layers) == ()


def test_xla_names_the_layer_and_the_operation() -> None:
    x = keras.Input((4,))
    work = Doing(lambda x: x + tf.cast(tf.strings.length(tf.strings.as_string(x)), x.dtype), name="bad")
    model = keras.Model(x, keras.layers.Dense(1)(work(x)))
    model.compile("sgd", "mse")
    step, specs, layers = step_of(model, batch_of((16, 4), (16, 1)))
    with pytest.raises(ModelError, match=r"XLA.* refuses the train step: layer bad, operation AsString \(node .*/bad"):
        compiled_step(step, specs, reference="model.py:build", layers=layers)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Input 1 to node `a/bad_1/range` with op Range must be constant.\nMore", "layer bad, operation Range (node a"),
        ("Something else\nMore", "Something else"),
        ("", ""),
    ],
)
def test_messages_of_xla(text: str, said: str) -> None:
    assert blamed(text, ["bad"]).startswith(said)


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
def test_the_layer_in_a_nodes_name(node: str, layer: str) -> None:
    assert layer_of(node, ["bad", "outer", "conv2d_2", "conv2d"]) == layer


def test_a_step_is_compiled_as_on_a_tpu_and_the_process_stays_deterministic() -> None:
    def pooled(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.nn.max_pool2d(x, 2, 2, "VALID"))
        return tape.gradient(y, x)

    was_on = tf_config.is_op_determinism_enabled()
    tf_config.enable_op_determinism()
    try:
        program = compiled_step(pooled, (tf.TensorSpec((1, 4, 4, 1), tf.float32),), reference="m:build", layers=())
        assert "ENTRY" in program
        assert tf_config.is_op_determinism_enabled()
    finally:
        if not was_on:
            tf_config.disable_op_determinism()
