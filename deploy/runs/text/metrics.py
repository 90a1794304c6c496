"""The metric of byte-level language models."""

import math
from typing import Any

import keras
from keras import ops


class BitsPerByte(keras.metrics.Mean):
    """Mean cross-entropy of the next byte in bits: what a perfect coder would need for each byte."""

    def __init__(self, name: str = "bits_per_byte", **settings: Any) -> None:
        super().__init__(name=name, **settings)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Take a batch: bytes int32 [batch, length], logits float32 [batch, length, 256]."""
        nats = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        super().update_state(ops.cast(nats, "float32") / math.log(2), sample_weight)
