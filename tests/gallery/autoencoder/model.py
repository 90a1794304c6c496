"""A denoising autoencoder."""

import keras
from keras import layers


def build_model():
    images = keras.Input((8, 8, 1))
    x = layers.GaussianNoise(0.2)(images)
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(x)
    x = layers.MaxPooling2D(2, padding="same")(x)
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(x)
    x = layers.MaxPooling2D(2, padding="same")(x)
    x = layers.Conv2DTranspose(8, 3, strides=2, activation="relu", padding="same")(x)
    x = layers.Conv2DTranspose(8, 3, strides=2, activation="relu", padding="same")(x)
    model = keras.Model(images, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x))
    model.compile(optimizer="adam", loss="binary_crossentropy")
    return model
