"""A convolutional network with batch normalization and residual connections."""

import keras
from keras import layers


def block(x, filters):
    shortcut = layers.Conv2D(filters, 1, strides=2, use_bias=False)(x)
    x = layers.SeparableConv2D(filters, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    return layers.add([x, shortcut])


def build_model():
    images = keras.Input((10, 10, 1))
    x = layers.Rescaling(2.0, offset=-1.0)(images)
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    x = block(x, 12)
    x = block(x, 16)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dropout(0.25)(x)
    model = keras.Model(images, layers.Dense(2)(x))
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        metrics=[keras.metrics.CategoricalAccuracy(name="acc"), keras.metrics.AUC(from_logits=True, num_thresholds=20)],
    )
    return model
