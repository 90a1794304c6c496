"""The transformer's layers."""

from typing import Any

import keras
from keras import ops


class TokenAndPosition(keras.layers.Layer):
    """Learned embeddings of tokens and of their positions, added.

    Tokens int32 [batch, length] -> float32 [batch, length, width].
    """

    def __init__(self, tokens: int, length: int, width: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._config = {"tokens": tokens, "length": length, "width": width}
        self.tokens = keras.layers.Embedding(tokens, width)
        self.positions = keras.layers.Embedding(length, width)

    def call(self, text: Any) -> Any:
        """Embed a batch."""
        return self.tokens(text) + self.positions(ops.arange(ops.shape(text)[1]))

    def get_config(self) -> dict[str, Any]:
        """What the layer is made from."""
        return {**super().get_config(), **self._config}


class Block(keras.layers.Layer):
    """Pre-norm causal self-attention and a feed-forward network, each with a residual.

    Float32 [batch, length, width] -> the same. After Radford et al. 2019, "Language Models are Unsupervised Multitask
    Learners", section 2.3.
    """

    def __init__(self, width: int, heads: int, dropout: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._config = {"width": width, "heads": heads, "dropout": dropout}
        self.norm_1 = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads, dropout=dropout)
        self.norm_2 = keras.layers.LayerNormalization()
        self.expand = keras.layers.Dense(4 * width, activation="gelu")
        self.shrink = keras.layers.Dense(width)
        self.drop = keras.layers.Dropout(dropout)

    def build(self, shape: Any) -> None:
        """Make the variables of all parts."""
        self.norm_1.build(shape)
        self.attention.build(shape, shape)
        self.norm_2.build(shape)
        self.expand.build(shape)
        self.shrink.build((*shape[:-1], 4 * shape[-1]))

    def call(self, x: Any, training: bool = False) -> Any:
        """One block."""
        y = self.norm_1(x)
        x = x + self.attention(y, y, use_causal_mask=True, training=training)
        return x + self.drop(self.shrink(self.expand(self.norm_2(x))), training=training)

    def get_config(self) -> dict[str, Any]:
        """What the layer is made from."""
        return {**super().get_config(), **self._config}
