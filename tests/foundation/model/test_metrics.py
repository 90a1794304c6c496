"""Every result of a metric is logged as numbers, as `fit` has them, and what decides needs one number."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import metrics

from baton.tasks.foundation.contracts.run_spec import KeepBest
from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.model import keras_steps
from baton.tasks.foundation.model.metrics import Results, RowMetrics, read_results, require_metric, take_metrics
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support.lab import lab_of, spec_of


class Returns(metrics.Metric):
    """Has any result."""

    def __init__(self, value: Any, name: str = "own") -> None:
        super().__init__(name=name)
        self.value = value

    def update_state(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def result(self) -> Any:
        return self.value


def fitted(*extra: Any, outputs: int = 3, **settings: Any) -> tuple[keras.Model, dict[str, Any]]:
    """A model whose metrics have seen an epoch, and what `fit` logged of it."""
    keras.utils.set_random_seed(0)
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(20, 4)).astype("float32"), np.eye(outputs, dtype="float32")[draw.integers(0, outputs, 20)]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(outputs, "sigmoid")])
    model.compile("sgd", "mse", metrics=list(extra), **settings)
    logged = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: seen.update(logs))
    seen: dict[str, Any] = {}
    model.fit(x, y, batch_size=5, verbose=0, callbacks=[logged], sample_weight=np.ones(20))
    return model, seen


def test_results_are_those_of_fit() -> None:
    made = [
        metrics.F1Score(name="f1"),
        metrics.FBetaScore(beta=2.0, name="f2"),
        metrics.Precision(thresholds=[0.3, 0.5], name="precision"),
        metrics.TruePositives(thresholds=[0.1, 0.4, 0.7], name="true"),
        metrics.BinaryIoU(target_class_ids=[0, 1], name="iou"),
        metrics.PrecisionAtRecall(0.5, name="at_recall"),
        metrics.Precision(top_k=2, name="top"),
        metrics.R2Score(class_aggregation=None, name="r2"),
        Returns({"a": 1.0, "b": {"c": [2.0, 3.0]}}, "own"),
        Returns(np.arange(4.0).reshape(2, 2), "matrix"),
        Returns(np.array([[7]]), "one"),
        Returns(True, "true_or_false"),
    ]
    model, logged = fitted(*made)
    found = read_results(model, tf.distribute.get_strategy())
    shapes = {"f1": (3,), "f2": (3,), "precision": (2,), "true": (3,), "r2": (3,), "own/b/c": (2,), "matrix": (2, 2)}
    assert found.shapes == shapes
    assert not found.left_out
    numbers = [float(number) for value in keras.tree.flatten(logged) for number in np.ravel(value)]
    assert sorted(found.numbers.values()) == sorted(numbers)
    for name, shape in shapes.items():
        assert {key for key in found.numbers if key.startswith(f"{name}/")} == {
            "/".join([name, *map(str, index)]) for index in np.ndindex(shape)
        }
    rows = RowMetrics(model, tf.distribute.get_strategy(), None, hosts=1)
    assert rows.take() == found.numbers
    # Of no batch, some of them are NaN.
    assert repr(rows.take()) == repr(take_metrics(model, tf.distribute.get_strategy()))


def test_a_metric_that_keeps_state_in_python_is_read_for_each_row() -> None:
    own = Returns(1.0)
    model, _ = fitted(own)
    rows = RowMetrics(model, tf.distribute.get_strategy(), None, hosts=1)
    assert rows.take()["own"] == 1
    own.value = 2.0
    assert rows.take()["own"] == 2


@pytest.mark.parametrize(
    ("value", "what"),
    [(None, "None"), ("high", "a str"), (b"1.5", "a bytes"), (np.zeros(65), "65 numbers"), (np.zeros(0), "0 numbers")],
)
def test_what_is_no_number_is_left_out(value: Any, what: str) -> None:
    model, _ = fitted()
    model.own = Returns(value)
    found = read_results(model, tf.distribute.get_strategy())
    assert found.left_out == {"own": what}
    assert list(found.numbers) == ["loss"]
    assert found.words() == [f"not logged, because a result needs 1 to 64 numbers: own ({what})"]


def test_metrics_of_outputs_and_weights_have_their_names() -> None:
    model, _ = fitted(weighted_metrics=[metrics.F1Score()])
    assert list(read_results(model, tf.distribute.get_strategy()).shapes) == ["f1_score"]
    x = keras.Input((4,))
    two = keras.Model(x, {"a": keras.layers.Dense(3)(x), "b": keras.layers.Dense(2)(x)})
    two.compile("sgd", {"a": "mse", "b": "mse"}, metrics={"a": [metrics.F1Score()], "b": [metrics.F1Score()]})
    two.fit(np.ones((4, 4)), {"a": np.ones((4, 3)), "b": np.ones((4, 2))}, verbose=0)
    assert read_results(two, tf.distribute.get_strategy()).shapes == {"a_f1_score": (3,), "b_f1_score": (2,)}


def test_what_decides_needs_one_number() -> None:
    found = Results(numbers={"loss": 1.0, "f1/0": 0.5, "f1/1": 0.4}, shapes={"f1": (2,)}, left_out={"own": "a str"})
    for name in ("loss", "f1/1"):
        require_metric(KeepBest(metric=name, mode="max"), found)
    require_metric(None, found)
    for name, words in (
        ("f1", "metric = 'f1' is a metric of shape (2), and one number decides; make its result one number, for "),
        ("f1", 'for instance with average="macro", or name one of f1/0 to f1/1'),
        ("own", "metric = 'own' is a metric whose result is a str; make its result one number"),
        ("f2", "metric = 'f2' is not a metric of the model; it has: f1/0, f1/1, loss"),
    ):
        with pytest.raises(ModelError) as refused:
            require_metric(KeepBest(metric=name, mode="max"), found)
        assert words in str(refused.value)
    assert found.words()[0] == "metric f1 has shape (2), and is logged as f1/0 to f1/1"


ATTRIBUTES = """
class Counted(keras.metrics.Mean):
    epochs = 0

    def reset_state(self):
        self.epochs += 1
        super().reset_state()

    def result(self):
        return super().result() + self.epochs


class Read(keras.metrics.Mean):
    \"\"\"Counts how often it is read, and traced.\"\"\"

    def __init__(self, name):
        super().__init__(name)
        self.reads = []

    def result(self):
        self.reads.append(1)
        return super().result() + len(self.reads)


class Smoothed(keras.metrics.Mean):
    previous = None

    def reset_state(self):
        self.previous = super().result() if self.previous is None else (self.previous + super().result()) / 2
        super().reset_state()

    def result(self):
        return super().result() + (0.0 if self.previous is None else self.previous)


class OfPython(keras.metrics.Metric):
    \"\"\"Adds up in Python, within one row.\"\"\"

    def __init__(self, name):
        super().__init__(name=name)
        self.seen = []

    def update_state(self, y, p, sample_weight=None):
        tf.py_function(lambda value: self.seen.append(float(value)), [tf.reduce_mean(p)], [])

    def reset_state(self):
        self.seen = []

    def result(self):
        return sum(self.seen)


def kept():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    means = [kind(name) for kind, name in ((Counted, "counted"), (Read, "read"), (Smoothed, "smoothed"))]
    for one in means:
        one.update_state = lambda y, p, sample_weight=None, one=one: keras.metrics.Mean.update_state(one, ops.abs(p))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=[*means, OfPython("python")])
    return model
"""


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_attributes_of_metrics_do_not_depend_on_cuts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, accumulate: int
) -> None:
    keras_steps._named.clear()
    rows, lab = [], lab_of(tmp_path, ATTRIBUTES)
    for name, borders in (("straight", [12]), ("cut", [5, 12])):
        spec = spec_of("kept", run=name, train__steps=12, train__log_every_steps=3, train__accumulate=accumulate)
        head = lab.relay(spec, *borders, cold=True)
        assert head.tip is not None
        rows.append([row.metrics for row in history_of(lab.log(spec).entries()).rows])
        rows[-1].append(lab.evaluate(spec, head.tip))
        assert lab.evaluate(spec, head.tip) == rows[-1][-1]
        PROCESS_STATE.forget()
    # What is added up within a row stays until it is read; that it is lost in a cut is said of the step's operations.
    added_up = [[row.pop("python") for row in each] for each in rows]
    assert len(set(added_up[0])) == len(added_up[0]) == 5
    assert added_up[0][0] == added_up[1][0]
    assert rows[0] == rows[1]
    said = [record.getMessage() for record in caplog.records if "no checkpoint holds" in record.getMessage()]
    assert "metric counted (Counted): its code changes self.epochs in Python, which" in said[0]
    assert sorted(text.partition(", which")[0].rpartition(": ")[2] for text in said) == [
        "its code changes self.epochs in Python",
        "its code changes self.previous in Python",
        "its code changes self.reads in Python",
    ]
