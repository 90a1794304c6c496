"""A loss of weighted examples, with metrics that count the weights and metrics that do not."""

import keras
from keras import layers


def build_model():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, activation="silu", kernel_constraint=keras.constraints.MaxNorm(2.0)),
            layers.UnitNormalization(),
            layers.Dense(1),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2, amsgrad=True),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="plain")],
        weighted_metrics=[
            keras.metrics.BinaryAccuracy(threshold=0.0, name="weighted"),
            keras.metrics.Precision(thresholds=0.0),
            keras.metrics.Recall(thresholds=0.0),
        ],
    )
    return model
