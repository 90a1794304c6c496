"""The augmentation that Baton and its peers apply to the examples of the input benchmark."""

from typing import Any

import tensorflow as tf


def augment(example: Any, *, seed: Any) -> tuple[Any, Any]:
    """Crop, flip and brighten 1024 bytes, seen as an image; returns float32 [32, 32, 1] and the label."""
    x, y = example
    seeds = tf.unstack(tf.random.experimental.stateless_split(seed, 3))
    image = tf.image.resize_with_crop_or_pad(tf.reshape(tf.cast(x, tf.float32) / 255.0, (32, 32, 1)), 36, 36)
    image = tf.image.stateless_random_crop(image, (32, 32, 1), seeds[0])
    image = tf.image.stateless_random_flip_left_right(image, seeds[1])
    return tf.image.stateless_random_brightness(image, 0.2, seeds[2]), y
