"""`train.class_weight` weights the loss as Keras's `fit` does, and not the evaluation."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from baton.tasks.foundation.dataset.model_inputs import apply_class_weight
from baton.tasks.foundation.dataset.read import training_dataset
from baton.tasks.foundation.errors import RunFileError
from tests.support.lab import Lab, built, lab_of, spec_of

MODEL = """
def build():
    x = keras.Input((6,))
    y = keras.layers.Dense(3, activation="softmax")(x)
    model = keras.Model(x, y)
    loss, metrics = "sparse_categorical_crossentropy", ["accuracy"]
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics, weighted_metrics=metrics)
    return model
"""
WEIGHTS = {0: 1.0, 1: 5.0}


def weights_in(lab: Lab, spec: Any, ref: Any) -> list[Any]:
    tensors = lab.tensors(spec, ref)
    return [
        np.frombuffer(value[2], np.float32).reshape(value[1])
        for key, value in sorted(tensors.items())
        if key.startswith("model/")
    ]


@pytest.mark.slow
def test_one_step_equals_a_step_of_fit(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MODEL)
    spec = spec_of(
        "build", train__class_weight=WEIGHTS, train__global_batch_size=8, train__log_every_steps=1, train__steps=2
    )
    head = lab.begin(spec)
    one = lab.train(spec, head.tip, 1)
    # Give the same examples, read as in training, to fit.
    dataset = training_dataset(
        lab.storage,
        lab.prepare(spec),
        seed=0,
        global_batch_size=8,
        window_shards=spec.data.window_shards,
        first_batch=0,
    )
    x, y = next(iter(dataset))
    model = built(lab, spec).model
    without_weights = model.evaluate(x, y, batch_size=8, verbose=0)[0]
    of_fit = model.fit(x, y, batch_size=8, class_weight=WEIGHTS, shuffle=False, verbose=0).history
    assert len(set(y.numpy())) == 3
    wanted = sorted(((variable.path, variable.numpy()) for variable in model.weights), key=lambda each: each[0])
    for mine, (_, keras_own) in zip(weights_in(lab, spec, one.staged), wanted, strict=True):
        np.testing.assert_allclose(mine, keras_own, rtol=1e-6, atol=1e-7)
    assert one.history[0].metrics == pytest.approx({name: values[0] for name, values in of_fit.items()}, rel=1e-6)
    assert one.history[0].metrics["loss"] != pytest.approx(without_weights, rel=1e-3)
    # Evaluation uses no weights, and restores the same variables.
    metrics = lab.evaluate(spec, one.staged)
    assert metrics["accuracy"] == metrics["weighted_accuracy"]


@pytest.mark.parametrize(
    ("y", "wanted"),
    [
        (np.array([0, 1, 2, 7, -1]), [2, 3, 1, 1, 1]),
        (np.array([[0], [1], [2]], np.int32), [2, 3, 1]),
        (np.array([0.0, 1.0, 1.9], np.float32), [2, 3, 1]),
        (np.eye(3, dtype=np.float32)[[1, 0, 2]], [3, 2, 1]),
    ],
)
def test_labels_are_mapped_to_weights(y: Any, wanted: list[float]) -> None:
    x, same, weights = apply_class_weight((y, y), {1: 3.0, 0: 2.0})
    assert weights.numpy().tolist() == wanted
    assert weights.shape == (len(y),)
    assert same is y is x


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((np.zeros((2, 3)),), "the examples have no y"),
        ((np.zeros(2), {"kind": np.zeros(2), "size": np.zeros(2)}), r"several parts \(kind, size\)"),
        ((np.zeros(2), np.zeros(2), np.ones(2)), "already have a sample_weight"),
        ((np.zeros(2), np.zeros((2, 5, 3))), r"y has shape \[2, 5, 3\]"),
        ((np.zeros(2), np.zeros((2, 3))), r"names class 4, but y has shape \[2, 3\]"),
    ],
)
def test_batches_that_cannot_be_weighted_are_refused(batch: tuple[Any, ...], words: str) -> None:
    with pytest.raises(RunFileError, match=words):
        apply_class_weight(batch, {4: 2.0})
    assert apply_class_weight(batch, None) == batch


def test_run_that_cannot_be_weighted_is_refused_first(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MODEL)
    spec = spec_of("build", form="weighted", train__class_weight=WEIGHTS)
    with pytest.raises(RunFileError, match="already have a sample_weight"):
        lab.begin(spec)
    assert lab.log(spec).head() is None


REGISTERED = """
@keras.saving.register_keras_serializable("shop")
class Scaled(keras.layers.Layer):
    def __init__(self, factor, **settings):
        super().__init__(**settings)
        self.factor = factor

    def call(self, x):
        return x * self.factor

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


@keras.saving.register_keras_serializable("shop")
def halved(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p) / 2


def build():
    x = keras.Input((6,))
    drawn = keras.Model(x, keras.layers.Dense(3, activation="softmax")(Scaled(0.5)(x)))
    model = keras.Model.from_config(drawn.get_config())
    assert model is not drawn
    model.compile("adam", keras.saving.get_registered_object("shop>halved"), metrics=["accuracy"])
    return model
"""


def test_registered_custom_objects_work(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, REGISTERED)
    spec = spec_of("build", run="registered")
    head = lab.begin(spec)
    straight = lab.train(spec, head.tip, 4).staged  # the model is built again in the same process
    assert any("Scaled" in name for name in head.identity["model.code"])
    assert keras.saving.get_registered_object("shop>Scaled") is not None
    assert set(lab.evaluate(spec, straight)) == {"loss", "accuracy"}


SEVERAL = """
def build():
    left, right = keras.Input((4,), name="left"), keras.Input((2,), name="right")
    both = keras.layers.Concatenate()([left, right])
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(both)
    size = keras.layers.Dense(1, name="size")(both)
    model = keras.Model({"left": left, "right": right}, {"kind": kind, "size": size})
    model.compile(
        "adam",
        loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.25},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
        weighted_metrics={"kind": ["accuracy"]},
    )
    return model
"""


def test_several_losses_and_metrics_are_logged(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, SEVERAL)
    spec = spec_of("build", run="several", form="dicts")
    head = lab.begin(spec)
    straight = lab.train(spec, head.tip, 5)  # test_exactness.py covers cuts
    names = {"loss", "kind_loss", "size_loss", "kind_accuracy", "size_mae", "kind_weighted_accuracy"}
    row = straight.history[0].metrics
    assert set(row) == names
    assert row["loss"] == pytest.approx(row["kind_loss"] + 0.25 * row["size_loss"], rel=1e-5)
    assert set(lab.evaluate(spec, straight.staged)) == names
