"""Changes the images whenever they are read. In a file of its own, so that an edit does not prepare the data again."""

from typing import Any

import keras
import tensorflow as tf

# Made once, outside of the functions that use them. Baton gives them another seed for each example and epoch.
TURN = keras.layers.RandomRotation(0.15, fill_mode="nearest", interpolation="nearest")
SHIFT = keras.layers.RandomTranslation(0.1, 0.1, fill_mode="nearest", interpolation="nearest")


def augment(example: Any, *, seed: Any) -> tuple[Any, Any]:
    """Flip, turn, shift and recolour one training image.

    Args:
        example: as `load` yields it, as tensors.
        seed: int32 [2], a function of the run's seed, the epoch and the example.

    Returns:
        The image, float32 [24, 24, 3] in [0, 1], and its class.
    """
    image, label = scale(example)
    flip, light, colour = tf.unstack(tf.random.experimental.stateless_split(seed, 3))
    image = tf.image.stateless_random_flip_left_right(image, flip)
    image = SHIFT(TURN(image, training=True), training=True)
    image = tf.image.stateless_random_brightness(image, 0.2, light)
    image = tf.image.stateless_random_saturation(image, 0.5, 1.5, colour)
    return tf.clip_by_value(image, 0.0, 1.0), label


def scale(example: Any) -> tuple[Any, Any]:
    """Return the image, float32 [24, 24, 3] in [0, 1], and its class."""
    image, label = example
    return tf.cast(image, tf.float32) / 255.0, label
