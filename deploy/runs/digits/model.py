"""A small convolutional network with batch normalization and dropout."""

import keras


def build_model(width: int = 16, dropout: float = 0.3, steps: int = 2000) -> keras.Model:
    """Images float32 [batch, 8, 8, 1] in [0, 1] -> logits float32 [batch, 10]."""
    images = keras.Input((8, 8, 1), name="images")
    x = images
    for filters in (width, 2 * width):
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization(momentum=0.95)(x)
        x = keras.layers.ReLU()(x)
    x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Conv2D(4 * width, 3, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization(momentum=0.95)(x)
    x = keras.layers.ReLU()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dropout(dropout)(x)
    logits = keras.layers.Dense(10, name="logits")(x)
    model = keras.Model(images, logits)
    model.compile(
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, steps)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
