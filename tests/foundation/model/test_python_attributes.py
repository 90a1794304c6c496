"""Changes of a model's Python attributes are seen; tracing its steps is no change."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.model.model_identity import PythonAttributes, python_attributes


class Model(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(2)
        self.drop = keras.layers.Dropout(0.3)
        self.settings = {"scales": [1.0, 2.0]}
        self.table = np.zeros(3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.drop(self.hidden(x), training=training) * self.settings["scales"][1]


@pytest.fixture
def model() -> Model:
    made = Model()
    made.compile("adam", "mse", metrics=["mae"])
    x, y = np.zeros((4, 3), np.float32), np.zeros((4, 2), np.float32)
    predictions = made(x)
    made.optimizer.build(made.trainable_variables)
    made.compute_metrics(x, y, predictions)
    made.compute_loss(x, y, predictions)
    return made


def test_tracing_and_assigning_change_nothing(model: Model) -> None:
    before = python_attributes(model)
    parts = (tf.zeros([4, 3]), tf.zeros([4, 2]))
    for step in (model.train_step, model.test_step):
        tf.function(lambda *batch, step=step: step(batch)).get_concrete_function(*parts)
    model.trainable_variables[0].assign(np.ones((3, 2)))
    model.optimizer.learning_rate = 0.5
    model.stop_training = True
    assert python_attributes(model) == before


CHANGES: dict[str, Callable[[Any], object]] = {
    "new attribute": lambda model: setattr(model, "phase", 1),
    "number": lambda model: setattr(model.drop, "rate", 0.5),
    "same value, other type": lambda model: setattr(model.drop, "rate", np.float32(0.3)),
    "item deep down": lambda model: model.settings["scales"].__setitem__(1, 3.0),
    "other object": lambda model: setattr(model, "table", np.zeros(3)),
    "frozen layer": lambda model: setattr(model.hidden, "trainable", False),
    "optimizer": lambda model: setattr(model.optimizer, "weight_decay", 0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_python_code_are_seen(model: Model, change: str) -> None:
    before = python_attributes(model)
    CHANGES[change](model)
    assert python_attributes(model) != before


RESTORABLE = {"new attribute", "number", "optimizer"}


@pytest.mark.parametrize("change", CHANGES)
def test_only_plain_values_of_the_user_are_put_back(model: Model, change: str) -> None:
    before = PythonAttributes.of(model)
    assert before.changed(model) == frozenset()
    CHANGES[change](model)
    assert before.can_be_put_back(model) == (change in RESTORABLE)
    if change in RESTORABLE:
        before.put_back(model)
        assert before.changed(model) == frozenset()
        assert model.drop.rate == 0.3
        assert not hasattr(model, "phase")


def test_another_optimizer_is_a_change_that_stays(model: Model) -> None:
    before = PythonAttributes.of(model)
    model.optimizer = keras.optimizers.SGD()
    assert before.changed(model) is None
    assert not before.can_be_put_back(model)
