"""An encoder and a decoder that starts from the encoder's state; padding is masked."""

import keras
from keras import layers


def build_model(tokens=13, width=16):
    source = keras.Input((None,), name="source", dtype="int32")
    embedded = layers.Embedding(tokens, width, mask_zero=True)(source)
    _, hidden, cell = layers.LSTM(width, return_state=True)(embedded)

    target_in = keras.Input((None,), name="target_in", dtype="int32")
    embedded = layers.Embedding(tokens, width, mask_zero=True)(target_in)
    decoded = layers.LSTM(width, return_sequences=True)(embedded, initial_state=[hidden, cell])
    logits = layers.Dense(tokens)(decoded)

    model = keras.Model([source, target_in], logits)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
        weighted_metrics=["accuracy"],
    )
    return model
