"""The averages of `use_ema`."""

import keras


def use_averages(model: keras.Model) -> None:
    """The averages of `use_ema` instead of the weights; loss scaling wraps the optimizer that has them."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if optimizer.use_ema:
        optimizer.finalize_variable_values(model.trainable_variables)
