"""Computes in bfloat16, keeps its weights in float32."""

import keras
from keras import layers

keras.mixed_precision.set_global_policy("mixed_bfloat16")


def build_model():
    spectrum = keras.Input((32, 1))
    x = layers.Conv1D(8, 5, activation="relu")(spectrum)
    x = layers.MaxPooling1D(2)(x)
    x = layers.SpatialDropout1D(0.1)(x)
    x = layers.Conv1D(16, 3, activation="relu")(x)
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(spectrum, layers.Dense(2, activation="softmax", dtype="float32")(x))
    model.compile(optimizer=keras.optimizers.Adam(5e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
