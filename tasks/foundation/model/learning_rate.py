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
    optimizer, rate = _rate_of(model)
    if isinstance(rate, keras.Variable):
        return float(rate.numpy())
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    if optimizer is None or not is_schedule or not type(rate).__module__.startswith(_OF_KERAS):
        return None
    return float(rate(optimizer.iterations))


def unsettable_rate(model: keras.Model) -> str:
    """Return what a model's optimizer has in place of a learning rate that can be set; "" if it can be.

    A schedule or a function decides at each step itself, and Keras refuses to assign to it.
    """
    optimizer, rate = _rate_of(model)
    if rate is None or isinstance(rate, keras.Variable):
        return ""
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    name = type(rate).__name__ if is_schedule else getattr(rate, "__name__", type(rate).__name__)
    return f"{type(optimizer).__name__} with the {'schedule' if is_schedule else 'function'} {name}"


def _rate_of(model: Any) -> tuple[Any, Any]:
    """The compiled optimizer, and its learning rate: a variable, a schedule or a function; None if there is none."""
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # loss scaling wraps the optimizer
    # Keras has no public way to tell a schedule from a variable.
    return optimizer, getattr(optimizer, "_learning_rate", None)
