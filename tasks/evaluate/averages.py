"""Averaged weights of optimizers with `use_ema`."""

from typing import Any

import keras


def keeps_averages(model: keras.Model) -> bool:
    """Whether the model's optimizer keeps averages of the weights."""
    return bool(_averaging_optimizer(model).use_ema)


def use_averages(model: keras.Model) -> None:
    """Replace the model's weights by the averages of `use_ema`, if its optimizer keeps them."""
    if keeps_averages(model):
        _averaging_optimizer(model).finalize_variable_values(model.trainable_variables)


def _averaging_optimizer(model: keras.Model) -> Any:
    # Loss scaling wraps the optimizer that has the averages.
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)
