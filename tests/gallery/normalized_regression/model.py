"""A regression on features of very different scales, normalized by a layer that is adapted before training."""

import keras
import numpy as np
from keras import layers

from .data import load


def build_model():
    normalization = layers.Normalization()
    normalization.adapt(np.stack([features for features, _ in load()]))
    model = keras.Sequential(
        [
            keras.Input((3,)),
            normalization,
            layers.Dense(16, activation="relu"),
            layers.Dense(16, activation="relu"),
            layers.Dense(1),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss="mean_absolute_percentage_error",
        metrics=["mae", keras.metrics.R2Score()],
    )
    return model
