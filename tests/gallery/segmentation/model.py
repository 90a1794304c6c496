"""A U-Net with synchronized normalization and a loss of two parts."""

import keras
from keras import layers


def convolutions(x, filters):
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(synchronized=True, momentum=0.9)(x)
        x = layers.ReLU()(x)
    return x


@keras.saving.register_keras_serializable("segmentation")
def dice_and_entropy(y_true, y_pred):
    y_true = keras.ops.cast(y_true, y_pred.dtype)
    dice = keras.losses.dice(y_true, y_pred, axis=(1, 2, 3))
    return dice + keras.ops.mean(keras.losses.binary_crossentropy(y_true, y_pred), axis=(1, 2))


def build_model():
    images = keras.Input((16, 16, 1))
    first = convolutions(images, 6)
    second = convolutions(layers.MaxPooling2D()(first), 12)
    x = convolutions(layers.MaxPooling2D()(second), 16)
    for skip, filters in ((second, 12), (first, 6)):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = convolutions(layers.Concatenate()([x, skip]), filters)
    model = keras.Model(images, layers.Conv2D(1, 1, activation="sigmoid")(x))
    model.compile(
        optimizer=keras.optimizers.Adam(5e-3),
        loss=dice_and_entropy,
        metrics=[keras.metrics.BinaryIoU(target_class_ids=[1], name="iou")],
    )
    return model
