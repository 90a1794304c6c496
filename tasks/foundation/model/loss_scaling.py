"""Finds train steps whose gradients are multiplied by the number of replicas.

Keras sums the replicas' gradients. Its own losses divide by the number of replicas before, so the sum is the mean over
the global batch. A loss that a custom `train_step` computes itself is not divided.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.losses import loss  # no public call tells whether a loss was scaled

from tasks.foundation.model.keras_steps import overrides


class ScaledLosses:
    """How often Keras divided a loss by the number of replicas while a step was traced."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count within the block."""
        scale = loss.scale_loss_for_distribution

        def counting(value: Any) -> Any:
            self.count += 1
            return scale(value)

        loss.scale_loss_for_distribution = counting
        try:
            yield
        finally:
            loss.scale_loss_for_distribution = scale


def summed_gradients_words(model: keras.Model, scaled: ScaledLosses, *, reference: str, replicas: int) -> str:
    """What to tell the user of a step whose gradients are summed where Keras's own would average; "" if they are not.

    Args:
        model: its train step was traced.
        scaled: the losses that Keras scaled meanwhile.
        reference: the function's name in the run file.
        replicas: number of replicas that took part.
    """
    if replicas == 1 or scaled.count or not overrides(model, "train_step"):
        return ""
    return (
        f"{reference}: train_step computes its loss itself, and the gradients of the {replicas} replicas are summed, "
        f"as in Keras's fit: they are {replicas} times the mean that Keras's own step gives. To get the mean, divide "
        "the loss by tf.distribute.get_strategy().num_replicas_in_sync, or use a loss of keras.losses, which does so"
    )
