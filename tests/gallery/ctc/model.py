"""Recognition of sequences without alignment, with the CTC loss."""

import keras
from keras import layers


def build_model():
    signal = keras.Input((16, 6))
    x = layers.Conv1D(12, 3, padding="same", activation="relu")(signal)
    x = layers.Bidirectional(layers.GRU(8, return_sequences=True, dropout=0.1))(x)
    model = keras.Model(signal, layers.Dense(6)(x))
    model.compile(optimizer=keras.optimizers.Adam(5e-3), loss=keras.losses.CTC())
    return model
