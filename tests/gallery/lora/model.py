"""Low-rank adapters on a frozen backbone."""

import keras
from keras import layers


def backbone(tokens=30, width=16, blocks=1):
    ids = keras.Input((8,), dtype="int32")
    x = layers.Embedding(tokens, width)(ids)
    for index in range(blocks):
        x = layers.LayerNormalization()(
            x + layers.MultiHeadAttention(2, 8, dropout=0.1, name=f"attention_{index}")(x, x)
        )
        hidden = layers.Dense(2 * width, activation="gelu", name=f"up_{index}")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width, name=f"down_{index}")(hidden))
    return keras.Model(ids, x, name="backbone")


def build_model(rank=2):
    body = backbone()
    body.trainable = False
    for layer in body.layers:
        if isinstance(layer, layers.Dense):
            layer.trainable = True
            layer.enable_lora(rank)
            layer.bias.trainable = False
    x = layers.GlobalAveragePooling1D()(body.output)
    model = keras.Model(body.input, layers.Dense(2, name="head")(x))
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
