"""JPEG and PNG, decoded the same way wherever examples are prepared or read."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

DTYPES = ("uint8", "float32")


def decode_image(data: Any, shape: Sequence[int], dtype: str) -> Any:
    """One image in the shape that is asked for.

    An image of another size is stretched to it, bilinear with antialiasing; the ratio of its sides is not kept. A
    grey one gets equal channels, a colored one becomes grey, transparency is dropped, and an orientation in EXIF is not
    looked at. On the CPU and the same in every process: JPEG is decoded by the accurate integer method, since what
    TensorFlow takes by default is the machine's choice.

    Args:
        data: string tensor [], a JPEG or PNG file.
        shape: (height, width, channels), channels 1 or 3.
        dtype: uint8, 0 to 255; or float32, in [0, 1].

    Returns:
        Tensor of that dtype and static shape.

    Raises:
        tf.errors.InvalidArgumentError: it cannot be decoded.
    """
    height, width, channels = shape
    with tf.device("/CPU:0"):
        # It decodes PNG as well.
        image = tf.io.decode_jpeg(data, channels=channels, dct_method="INTEGER_ACCURATE")
        # An image that has the size already comes out bit for bit.
        image = tf.image.resize(image, (height, width), method="bilinear", antialias=True)
        image = tf.saturate_cast(tf.round(image), tf.uint8) if dtype == "uint8" else image / 255.0
        return tf.ensure_shape(image, (height, width, channels))
