"""A masked language model: masks are drawn anew in each step, and the embedding is shared with the output."""

import keras
from keras import layers, ops

MASK, TOKENS, WIDTH = 1, 20, 16


class MaskedLanguageModel(keras.Model):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.embedding = encoder.get_layer("tokens")
        self.seeds = keras.random.SeedGenerator(31)
        self.built = True

    def call(self, ids, training=None):
        return ops.matmul(self.encoder(ids, training=training), ops.transpose(self.embedding.embeddings))

    def masked(self, ids):
        chosen = keras.random.uniform(ops.shape(ids), seed=self.seeds) < 0.3
        return ops.where(chosen, MASK, ids), ops.cast(chosen, "float32")

    def train_step(self, ids):
        masked, chosen = self.masked(ids)
        return super().train_step((masked, ids, chosen))

    def test_step(self, ids):
        masked, chosen = self.masked(ids)
        return super().test_step((masked, ids, chosen))


def build_model():
    ids = keras.Input((8,), dtype="int32")
    x = layers.Embedding(TOKENS, WIDTH, name="tokens")(ids)
    positions = layers.Embedding(8, WIDTH, name="positions")
    x = x + positions(ops.cumsum(ops.ones_like(ids), axis=1) - 1)
    attended = layers.MultiHeadAttention(2, WIDTH // 2)(x, x)
    x = layers.LayerNormalization()(x + attended)
    x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(layers.Dense(2 * WIDTH, activation="gelu")(x)))
    model = MaskedLanguageModel(keras.Model(ids, x))
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3, use_ema=True, ema_momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    return model
