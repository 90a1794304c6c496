"""Models as LiteRT, ONNX and OpenVINO files: inputs and outputs by name, and how predictions are compared."""

import logging
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.evaluate.serving import (
    PredictionComparison,
    Value,
    difference,
    model_inputs_of,
    read_back,
    require_no_text,
    serving_json,
    write_for_runtime,
)
from baton.tasks.foundation.contracts.dataset import Feature
from baton.tasks.foundation.dataset.features import unflatten
from baton.tasks.foundation.errors import InvalidInput, ModelError

FORMS = ["litert", "onnx", "openvino"]


def feature(name: str, *shape: int, dtype: str = "float32") -> Feature:
    return Feature(name=name, dtype=dtype, shape=shape)


def written(
    model: keras.Model, features: list[Feature], form: str, folder: Path
) -> tuple[list[str], PredictionComparison]:
    draw = np.random.default_rng(3)
    batch = {each.name: tf.constant(draw.normal(0, 20, (7, *each.shape)).astype(each.dtype)) for each in features}
    inputs = model_inputs_of(model, features, form)
    name = {"litert": "m.tflite", "onnx": "m.onnx", "openvino": "m"}[form]
    done = write_for_runtime(
        model, inputs, unflatten(batch)[0], form=form, path=folder / name, tolerance=1e-3, reference="model.py:build"
    )
    return [each.name for each in inputs.values()], done


def two_inputs(*, named: bool) -> keras.Model:
    """Inputs and outputs of the same shapes, so that only their names and places tell them apart."""
    b, a = keras.Input((3,), name="b"), keras.Input((3,), name="a")
    outputs = [keras.layers.Dense(2)(b + place * a) for place in range(11)]  # converters sort them: 0, 1, 10, 2
    if named:
        return keras.Model({"the b": b, "a": a}, dict(zip("zyxwvutsrqp", outputs, strict=True)))
    return keras.Model([b, a], outputs)


@pytest.mark.parametrize("form", FORMS)
def test_inputs_and_outputs_are_found_by_name(form: str, tmp_path: Path) -> None:
    names, done = written(two_inputs(named=True), [feature("x/the b", 3), feature("x/a", 3)], form, tmp_path)
    assert names == ["the b" if form == "openvino" else "the_b", "a"]
    assert [each.name for each in done.outputs] == list("pqrstuvwxyz")
    assert done.outputs[0] == Value(name="p", shape=(None, 2), dtype="float32")
    assert (done.examples, done.largest_difference < 1e-5) == (7, True)


@pytest.mark.parametrize("form", FORMS)
def test_outputs_without_names_keep_their_order(form: str, tmp_path: Path) -> None:
    names, done = written(two_inputs(named=False), [feature("x[0]", 3), feature("x[1]", 3)], form, tmp_path)
    assert names == ["b", "a"]
    last = [each.name.removesuffix(":0") for each in done.outputs][-2:]
    assert last in (["output_9", "output_10"], ["Identity_9", "Identity_10"])
    assert done.largest_difference < 1e-5


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x["a"]) - self.dense(x["b"])


def test_inputs_are_those_that_the_model_declares() -> None:
    own = keras.Input((None,), dtype="int64", name="tokens")
    layered = keras.Model(own, keras.layers.Embedding(9, 2)(own))
    assert model_inputs_of(layered, [feature("x", 5, dtype="int32"), feature("y")], "onnx") == {
        "x": Value(name="tokens", shape=(None, None), dtype="int64")
    }
    sequential = keras.Sequential([keras.layers.Dense(3)])
    sequential.build((None, 6))
    assert model_inputs_of(sequential, [feature("x", 6, dtype="uint8")], "onnx") == {
        "x": Value(name="x", shape=(None, 6), dtype="float32")
    }
    subclassed = Subclassed()
    subclassed({"a": np.zeros((1, 4)), "b": np.zeros((1, 4))})
    features = [feature("x/b", 4, dtype="float64"), feature("x/a", 4, dtype="int32")]
    assert [*model_inputs_of(subclassed, features, "onnx").values()] == [
        Value(name="b", shape=(None, 4), dtype="float32"),
        Value(name="a", shape=(None, 4), dtype="int32"),
    ]


@pytest.mark.parametrize("form", ["litert", "openvino"])
def test_model_that_a_runtime_lacks_operations_for_is_refused(form: str, tmp_path: Path) -> None:
    x = keras.Input((5, 4))
    model = keras.Model(x, keras.layers.LSTM(3)(x))
    level = logging.root.level
    with pytest.raises(ModelError, match=f"this model cannot be exported as {form}:") as caught:
        written(model, [feature("x", 5, 4)], form, tmp_path)
    assert "--format onnx" in str(caught.value).partition("hint: ")[2]
    assert logging.root.level == level


def test_differences_are_relative_to_the_largest_number() -> None:
    def of(expected: list[float], found: list[float]) -> float:
        return difference(np.array(expected, np.float32), np.array(found, np.float32))

    assert of([0.5, 0.25], [0.5, 0.5]) == 0.25
    assert of([100.0, -200.0], [101.0, -200.0]) == pytest.approx(0.005)
    assert of([math.inf, math.nan, 1.0], [math.inf, math.nan, 1.0]) == 0
    assert of([math.inf, 1.0], [1e38, 1.0]) == math.inf
    assert of([1.0], [math.nan]) == math.inf
    assert of([], []) == 0
    assert difference(np.zeros((2, 1)), np.zeros((2,))) == math.inf
    assert difference(np.array([1, 2]), np.array([1, 3])) == 0.5
    assert difference(np.array([b"a"]), np.array([b"a"])) == 0
    assert difference(np.array([b"a"], object), np.array([b"b"], object)) == math.inf


@pytest.mark.slow
@pytest.mark.usefixtures("forked_reading")
@pytest.mark.parametrize("named", [True, False])
def test_saved_model_is_read_back_by_names_of_inputs(named: bool, tmp_path: Path) -> None:
    """Its signature has float32, and no input that the model does not take."""
    b, a = keras.Input((3,), name="b"), keras.Input((3,), name="a")
    model = keras.Model({"b": b, "a": a} if named else [b, a], keras.layers.Dense(2)(b + 2 * a))
    model.export(tmp_path / "saved", verbose=False)
    draw = np.random.default_rng(3)
    x = {name: tf.constant(draw.normal(size=(5, 3))) for name in ("a", "b", "unused")}
    lines = ("import tensorflow as tf", f"tf.saved_model.load({str(tmp_path / 'saved')!r})")
    found = read_back(lines, x, folder=tmp_path)
    assert len(found.variables) == 2
    assert found.outputs is not None
    (outputs,) = found.outputs
    assert outputs.dtype == np.float64
    assert difference(np.asarray(model({"a": x["a"], "b": x["b"]})), outputs) < 1e-6
    with pytest.raises(ModelError, match="OSError: SavedModel file does not exist at: nowhere"):
        read_back(("import tensorflow as tf", "tf.saved_model.load('nowhere')"), x, folder=tmp_path)


def test_text_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"--format onnx: the model's input x/words is text.*--format saved_model"):
        require_no_text([feature("x/words", dtype="string"), feature("x/a", 3)], "onnx")
    require_no_text([feature("x", 3), feature("y", dtype="string")], "onnx")


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    assert b'"loss": null' in serving_json({}, [], None, {"loss": math.nan})
