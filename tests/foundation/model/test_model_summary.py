"""The summary of a model says what Keras's own summary says."""

from typing import Any

import keras
import pytest

from baton.tasks.foundation.model.model_identity import summarize


def compiled(model: Any) -> Any:
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def sequential() -> Any:
    layers = keras.layers
    return keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)])


def shared() -> Any:
    x, z = keras.Input((3,)), keras.Input((3,))
    dense = keras.layers.Dense(2, name="shared")
    return keras.Model([x, z], keras.layers.Concatenate()([dense(x), dense(z)]))


class Subclassed(keras.Model):
    """It counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(2, name="out")
        self.calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return self.out(x)


def subclassed() -> Any:
    model = Subclassed()
    model(keras.ops.zeros((1, 3)))
    return model


@pytest.mark.parametrize("build", [sequential, shared, subclassed])
def test_numbers_are_those_of_keras(build: Any) -> None:
    model = compiled(build())
    lines: list[str] = []
    model.summary(print_fn=lines.append, line_length=78)
    text = "".join(lines)
    summary = summarize(model)
    assert summary.parameters == model.count_params()
    assert f"Trainable params: {summary.trainable:,} " in text
    assert f"Non-trainable params: {summary.frozen:,} " in text
    assert f"Optimizer params: {summary.optimizer:,} " in text
    assert f"Total params: {summary.parameters + summary.optimizer:,} " in text
    assert all(f"{layer.parameters:,}" in text for layer in summary.layers)


def test_layers_have_their_shapes() -> None:
    layers = summarize(compiled(sequential())).layers
    assert [(layer.kind, layer.output_shape, layer.parameters) for layer in layers] == [
        ("Dense", "(None, 4)", 28),
        ("BatchNormalization", "(None, 4)", 16),
        ("Dense", "(None, 2)", 10),
    ]
    assert summarize(compiled(sequential())).frozen == 8
    assert {layer.name: layer.output_shape for layer in summarize(compiled(shared())).layers}["shared"] == "(None, 2)"


def test_layers_of_a_subclassed_model_have_no_shape_and_run_no_code() -> None:
    model = compiled(subclassed())
    calls = model.calls
    (out,) = summarize(model).layers
    assert (out.name, out.output_shape, out.parameters) == ("out", None, 8)
    assert model.calls == calls
