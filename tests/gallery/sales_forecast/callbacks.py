"""The usual callbacks."""

import logging

import keras


def tell(epoch, logs):
    logging.info("epoch %d: loss %.3f", epoch, logs["loss"])


def build_callbacks():
    return [
        keras.callbacks.EarlyStopping(monitor="loss", patience=50),
        keras.callbacks.ModelCheckpoint("{epoch:03d}.weights.h5", save_weights_only=True),
        keras.callbacks.LambdaCallback(on_epoch_end=tell),
    ]
