"""The learning rate that a compiled model's optimizer uses next, for people to see."""

from typing import Any

import keras

_OF_KERAS = "keras."


def learning_rate_of(model: Any) -> float | None:
    """Return the learning rate of a model's optimizer at its current iteration.

    Only variables and Keras's own schedules are read: a schedule of the user's may keep state, which an additional call
    could change.

    Args:
        model: a compiled model.

    Returns:
        The learning rate; None if the model has no optimizer, or another kind of schedule.
    """
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # loss scaling wraps the optimizer
    rate: Any = getattr(optimizer, "_learning_rate", None)  # Keras has no public way to tell a schedule from a variable
    if isinstance(rate, keras.Variable):
        return float(rate.numpy())
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    if optimizer is None or not is_schedule or not type(rate).__module__.startswith(_OF_KERAS):
        return None
    return float(rate(optimizer.iterations))
