"""Averaged weights of optimizers with `use_ema`."""

import keras


def use_averages(model: keras.Model) -> None:
    """Replace the model's weights by the averages of `use_ema`, if its optimizer keeps them."""
    # Loss scaling wraps the optimizer that has the averages.
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if optimizer.use_ema:
        optimizer.finalize_variable_values(model.trainable_variables)
