"""Several inputs, two outputs, and weights of their losses."""

import keras
from keras import layers


def build_model():
    title = keras.Input((6,), name="title", dtype="int64")
    body = keras.Input((10,), name="body", dtype="int64")
    tags = keras.Input((5,), name="tags")
    title_features = layers.LSTM(8)(layers.Embedding(40, 8)(title))
    body_features = layers.GlobalAveragePooling1D()(layers.Embedding(40, 8)(body))
    x = layers.concatenate([title_features, body_features, tags])
    priority = layers.Dense(1, name="priority")(x)
    department = layers.Dense(3, activation="softmax", name="department")(x)
    model = keras.Model([title, body, tags], {"priority": priority, "department": department})
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-2),
        loss={"priority": keras.losses.Huber(), "department": keras.losses.CategoricalCrossentropy()},
        metrics={"priority": ["mae"], "department": ["accuracy"]},
        loss_weights={"priority": 1.0, "department": 0.2},
    )
    return model
