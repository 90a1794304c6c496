"""A classifier with dropout."""

import keras
from keras import layers


def build_model():
    model = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(32, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(32, activation="relu", kernel_regularizer="l2"),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
