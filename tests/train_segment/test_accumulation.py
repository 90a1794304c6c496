"""Gradient accumulation: micro-batches train like the whole batch, to float tolerance, and bit-exactly across cuts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.errors import AcceleratorError, ModelError
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support.lab import Lab, differing, in_fresh_process, lab_of, rows_of, spec_of

MODELS = """
class Adds(keras.Model):
    # Keras's step calls it with each micro-batch; what it returns is logged as a mean over the examples all the same.
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, y_pred)
        return {**logs, "bits": loss / ops.log(2.0), "wrong": 1.0 - logs["accuracy"], "batch": ops.mean(x, axis=0)}


def build(dropout=0.0):
    x = keras.Input((6,))
    y = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")(x)
    y = keras.layers.Dropout(dropout)(y)
    model = Adds(x, keras.layers.Dense(3)(y))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def build_sum():
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile("sgd", loss)
    return model


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def build_function_sum():
    model = build()
    model.compile("sgd", lambda y, logits: ops.sum(keras.losses.sparse_categorical_crossentropy(y, logits, True)))
    return model


class OwnLoss(keras.Model):
    def compute_loss(self, **parts):
        return 2 * super().compute_loss(**parts)


def build_own_loss():
    x = keras.Input((6,))
    model = OwnLoss(x, keras.layers.Dense(3)(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class OfBatch(keras.layers.Layer):
    def call(self, x):
        self.add_loss(ops.sum(ops.square(x)))
        return x


def build_batch_loss():
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.Dense(3)(OfBatch()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def build_synchronized():
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.Dense(3)(keras.layers.BatchNormalization(synchronized=True)(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def build_masked():
    x = keras.Input((6,))
    y = keras.layers.Masking()(keras.layers.Reshape((2, 3))(x))
    model = keras.Model(x, keras.layers.Dense(3)(keras.layers.LSTM(4, return_sequences=True)(y)))
    model.compile("sgd", lambda y, logits: ops.mean(ops.square(logits), axis=-1))
    return model


def build_own():
    x = keras.Input((6,))
    model = OwnStep(x, keras.layers.Dense(3)(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
STEPS = 11


NAMES = {"loss", "accuracy", "weighted_accuracy", "bits", "wrong", *(f"batch/{index}" for index in range(6))}


def trained(
    folder: str, accumulate: int, replicas: int, form: str, *, dropout: float = 0.0, cut: bool = True
) -> dict[str, Any]:
    """Train straight, and cut in two with a restore between; return the values of the straight run, by key."""
    lab = Lab(Path(folder), Path(folder) / "code")
    spec = spec_of(
        "build",
        run=f"of-{accumulate}-{replicas}-{form}-{dropout}",
        form=form,
        replicas=replicas,
        train__accumulate=accumulate,
        model__options={"dropout": dropout},
    )
    start = lab.begin(spec).tip
    assert start is not None
    straight = lab.train(spec, start, STEPS)
    one = lab.tensors(spec, straight.staged)
    if cut:
        first = lab.train(spec, start, 5)
        PROCESS_STATE.forget()
        second = lab.train(spec, first.staged, STEPS)
        assert differing(one, lab.tensors(spec, second.staged)) == []
        assert rows_of([first, second]) == rows_of([straight])
    values = {
        key: np.frombuffer(content, dtype).astype(float).tolist()
        for key, (dtype, _, content) in one.items()
        if key.startswith(("model/", "optimizer/"))
    }
    return {"values": values, "rows": [row.metrics for row in rows_of([straight])]}


def assert_close(result: dict[str, Any], whole: dict[str, Any]) -> None:
    assert result["values"].keys() == whole["values"].keys()
    for key, value in whole["values"].items():
        np.testing.assert_allclose(result["values"][key], value, rtol=1e-4, atol=1e-5, err_msg=key)
    assert [row.keys() for row in result["rows"]] == [NAMES] * 2
    for mine, theirs in zip(result["rows"], whole["rows"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the models."""
    return str(lab_of(tmp_path_factory.mktemp("accumulation"), MODELS).root)


@pytest.fixture(scope="module")
def whole(code: str) -> dict[str, Any]:
    """A run without micro-batches."""
    return trained(code, 1, 1, "weighted", cut=False)


@pytest.mark.slow
def test_micro_batches_train_like_the_whole_batch(code: str, whole: dict[str, Any]) -> None:
    for accumulate in (2, 8):
        assert_close(trained(code, accumulate, 1, "weighted", cut=False), whole)


@pytest.mark.slow
@pytest.mark.nightly
def test_micro_batches_without_weights_train_like_the_whole_batch(code: str) -> None:
    assert_close(trained(code, 2, 1, "plain"), trained(code, 1, 1, "plain", cut=False))


@pytest.mark.slow
def test_each_micro_batch_draws_its_own_dropout_mask(code: str) -> None:
    values = trained(code, 4, 1, "plain", dropout=0.5)["values"]
    # Keras draws once for each micro-batch; the seed's counter counts the draws.
    (state,) = (value for key, value in values.items() if "seed_generator_state" in key)
    assert state[1] == 4 * STEPS


def on_two_replicas(folder: str) -> list[Any]:
    with pytest.raises(ModelError) as refused:
        Lab(Path(folder), Path(folder) / "code").begin(spec_of("build_synchronized", replicas=2, train__accumulate=2))
    return [str(refused.value), trained(folder, 2, 2, "weighted", cut=False)]


@pytest.mark.slow
def test_accumulation_works_on_two_replicas(code: str, whole: dict[str, Any]) -> None:
    refused, result = in_fresh_process(on_two_replicas, folder=code)
    assert_close(*({**each, "values": shared(each["values"])} for each in (result, whole)))
    assert "batch_normalization is synchronized between replicas" in refused


def shared(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if "/replica_" not in key}


def test_keras_mask_is_warned_about(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MODELS)
    spec = spec_of("build_masked", train__accumulate=2)
    start = lab.begin(spec).tip
    assert start is not None
    lab.train(spec, start, 2)
    assert any("a Keras mask reaches the loss" in text for text in lab.recorder.warnings)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("build_own", "has a custom train_step, which Baton cannot split"),
        ("build_function_sum", "it is not a mean over the examples"),
        ("build_batch_loss", "it is not a mean over the examples"),
        ("build_own_loss", "has a custom compute_loss"),
        ("build_sum", "so it is not a mean over the examples"),
    ],
)
def test_models_that_cannot_accumulate_are_refused(tmp_path: Path, build: str, message: str) -> None:
    lab = lab_of(tmp_path, MODELS)
    spec = spec_of(build, train__accumulate=2)
    with pytest.raises(ModelError, match=message) as refused:
        lab.begin(spec)
    assert refused.value.exit_code == 2
    assert lab.log(spec).head() is None


def test_indivisible_batch_is_refused_with_divisible_sizes(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MODELS)
    with pytest.raises(AcceleratorError, match=r"8 is not divisible by 1 replica of 3 micro-batches; try 6 or 9; or "):
        lab.begin(spec_of("build", train__accumulate=3))
