"""A wide part over crossed categories, and a deep one over embeddings and numbers."""

import keras
from keras import layers


def build_model():
    inputs = {
        "age": keras.Input((1,), name="age"),
        "hours": keras.Input((1,), name="hours"),
        "job": keras.Input((1,), name="job", dtype="int64"),
        "town": keras.Input((1,), name="town", dtype="int64"),
    }
    crossed = layers.HashedCrossing(24, output_mode="one_hot")((inputs["job"], inputs["town"]))
    wide = layers.Concatenate()([layers.CategoryEncoding(6, output_mode="one_hot")(inputs["job"]), crossed])
    wide = layers.BatchNormalization()(wide)

    age = layers.Discretization(bin_boundaries=[25.0, 35.0, 45.0, 55.0], output_mode="one_hot")(inputs["age"])
    town = layers.Flatten()(layers.Embedding(12, 4)(inputs["town"]))
    hours = layers.Rescaling(1 / 60)(inputs["hours"])
    deep = layers.Concatenate()([age, hours, town])
    for units in (16, 8):
        deep = layers.Dense(units)(deep)
        deep = layers.BatchNormalization()(deep)
        deep = layers.ReLU()(deep)
        deep = layers.Dropout(0.2)(deep)

    output = layers.Dense(1, activation="sigmoid")(layers.Concatenate()([wide, deep]))
    model = keras.Model(inputs, output)
    model.compile(
        optimizer=keras.optimizers.Ftrl(0.05),
        loss=keras.losses.BinaryFocalCrossentropy(),
        metrics=[keras.metrics.BinaryAccuracy(name="accuracy"), keras.metrics.F1Score(average="micro", threshold=0.5)],
    )
    return model
