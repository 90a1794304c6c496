"""A small convolutional network for images of shapes."""

import keras


def build_model(width: int = 16, classes: int = 4, steps: int = 600) -> keras.Model:
    """Images float32 [batch, 24, 24, 3] in [0, 1] -> logits float32 [batch, classes]."""
    images = keras.Input((24, 24, 3), name="images")
    x = images
    for filters in (width, 2 * width, 4 * width):
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization(momentum=0.95)(x)
        x = keras.layers.ReLU()(x)
        x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    logits = keras.layers.Dense(classes, name="logits")(x)
    model = keras.Model(images, logits)
    model.compile(
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, steps)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
