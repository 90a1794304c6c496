"""Decodes JPEG and PNG; preparation and training use the same function."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

DTYPES = ("uint8", "float32")


def decode_image(data: Any, shape: Sequence[int], dtype: str) -> Any:
    """Decode one image to the given shape, on the CPU, with the same result in every process.

    An image of another size is resized (bilinear, with antialiasing); its aspect ratio is not kept. A grey image gets
    equal channels, a color image becomes grey, transparency is dropped, and the EXIF orientation is ignored. JPEG uses
    the accurate integer method, because TensorFlow's default method depends on the machine.

    Args:
        data: string tensor [], a JPEG or PNG file.
        shape: (height, width, channels), channels 1 or 3.
        dtype: uint8, in [0, 255]; or float32, in [0, 1].

    Returns:
        Tensor of that dtype, with a static shape.

    Raises:
        tf.errors.InvalidArgumentError: the image cannot be decoded.
    """
    height, width, channels = shape
    with tf.device("/CPU:0"):
        # decode_jpeg decodes PNG as well.
        image = tf.io.decode_jpeg(data, channels=channels, dct_method="INTEGER_ACCURATE")
        # An image that already has this size keeps every bit.
        image = tf.image.resize(image, (height, width), method="bilinear", antialias=True)
        image = tf.saturate_cast(tf.round(image), tf.uint8) if dtype == "uint8" else image / 255.0
        return tf.ensure_shape(image, (height, width, channels))
