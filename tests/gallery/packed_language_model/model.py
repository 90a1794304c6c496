"""A causal transformer over packed rows: a token sees only those before it in its own sentence."""

import keras
from keras import layers, ops

LENGTH, TOKENS, WIDTH = 24, 17, 16


def build_model():
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    positions = keras.Input((LENGTH,), dtype="int32", name="positions")
    segments = keras.Input((LENGTH,), dtype="int32", name="segment_ids")
    x = layers.Embedding(TOKENS, WIDTH)(tokens) + layers.Embedding(LENGTH, WIDTH)(positions)
    same_sentence = ops.expand_dims(segments, 1) == ops.expand_dims(segments, 2)
    attended = layers.MultiHeadAttention(2, WIDTH // 2, dropout=0.1)(
        x, x, attention_mask=same_sentence, use_causal_mask=True
    )
    x = layers.LayerNormalization()(x + attended)
    inputs = {"tokens": tokens, "positions": positions, "segment_ids": segments}
    model = keras.Model(inputs, layers.Dense(TOKENS)(x))
    model.compile(
        optimizer=keras.optimizers.Adam(5e-3, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return model
