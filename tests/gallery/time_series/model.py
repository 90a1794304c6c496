"""A forecast with causal convolutions and a recurrent layer."""

import keras
from keras import layers


def build_model():
    window = keras.Input((24, 3))
    x = layers.Conv1D(8, 3, padding="causal", activation="relu")(window)
    x = layers.Conv1D(8, 3, padding="causal", dilation_rate=2, activation="relu")(x)
    x = layers.GRU(8, recurrent_dropout=0.1)(x)
    model = keras.Model(window, layers.Dense(4)(x))
    schedule = keras.optimizers.schedules.ExponentialDecay(1e-2, decay_steps=10, decay_rate=0.9)
    model.compile(optimizer=keras.optimizers.Adam(schedule), loss="mse", metrics=["mae", "root_mean_squared_error"])
    return model
