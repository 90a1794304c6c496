"""The learning rate that a row of metrics shows."""

from typing import Any

import keras
import pytest
import tensorflow as tf

from baton.tasks.foundation.model.metrics import learning_rate_of


class OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Counts its calls, as a user's may."""

    calls = 0

    def __call__(self, step: Any) -> Any:
        self.calls += 1
        return 0.1 / (1.0 + tf.cast(step, tf.float32))


def compiled(optimizer: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def trained(model: keras.Model, steps: int) -> keras.Model:
    model.fit(tf.ones((4 * steps, 2)), tf.ones((4 * steps, 1)), batch_size=4, shuffle=False, verbose=0)
    return model


def test_rate_is_that_of_the_next_update() -> None:
    assert learning_rate_of(compiled(keras.optimizers.SGD(0.25))) == 0.25
    steps = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.125])
    model = compiled(keras.optimizers.SGD(steps))
    assert learning_rate_of(model) == 0.5
    assert learning_rate_of(trained(model, 3)) == 0.125


def test_changed_rate_is_read() -> None:
    model = compiled(keras.optimizers.Adam(0.5))
    model.optimizer.learning_rate = 0.25
    assert learning_rate_of(model) == 0.25


def test_loss_scaling_hides_no_rate() -> None:
    assert learning_rate_of(compiled(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.25)))) == 0.25


def test_own_schedule_is_not_called() -> None:
    schedule = OwnSchedule()
    model = compiled(keras.optimizers.SGD(schedule))
    before = schedule.calls
    assert learning_rate_of(model) is None
    assert schedule.calls == before


@pytest.mark.parametrize("model", [object(), keras.Sequential()])
def test_model_without_an_optimizer_has_no_rate(model: Any) -> None:
    assert learning_rate_of(model) is None
