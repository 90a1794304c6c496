"""A small convolutional network whose first layers augment the images."""

import keras
from keras import layers


def build_model():
    augmentation = keras.Sequential(
        [layers.RandomFlip("horizontal"), layers.RandomRotation(0.05), layers.RandomContrast(0.2)]
    )
    images = keras.Input((10, 10, 3))
    x = augmentation(images)
    x = layers.Conv2D(8, 3, activation="relu")(x)
    x = layers.MaxPooling2D()(x)
    x = layers.Dropout(0.2)(layers.Flatten()(x))
    model = keras.Model(images, layers.Dense(3, activation="softmax")(x))
    model.compile(
        optimizer=keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
        loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
        metrics=["accuracy"],
    )
    return model
