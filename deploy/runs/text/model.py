"""A small causal transformer over bytes."""

import keras

from .layers import Block, TokenAndPosition
from .metrics import BitsPerByte

_BYTES = 256


def build_model(
    length: int = 64, width: int = 96, heads: int = 4, blocks: int = 2, dropout: float = 0.1
) -> keras.Model:
    """Bytes int32 [batch, length] -> logits of the next byte, float32 [batch, length, 256]."""
    text = keras.Input((length,), dtype="int32", name="bytes")
    x = TokenAndPosition(_BYTES, length, width)(text)
    for _ in range(blocks):
        x = Block(width, heads, dropout)(x)
    logits = keras.layers.Dense(_BYTES, name="logits")(keras.layers.LayerNormalization()(x))
    model = keras.Model(text, logits)
    model.compile(
        optimizer=keras.optimizers.AdamW(2e-3, weight_decay=0.01, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[BitsPerByte()],
    )
    return model
