"""A denoising diffusion model that draws times and noise with tf.random, and returns its loss without a metric."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

TIMES = 50
LEVELS = np.cumprod(1.0 - np.linspace(1e-3, 0.1, TIMES)).astype("float32")


def build_network():
    images, times = keras.Input((8, 8, 1)), keras.Input((), dtype="int64")
    embedded = layers.Reshape((1, 1, 8))(layers.Dense(8, activation="swish")(layers.Embedding(TIMES, 8)(times)))
    x = layers.Conv2D(8, 3, padding="same")(images)
    skip = x = x + embedded
    x = layers.GroupNormalization(groups=4)(x)
    x = layers.Conv2D(8, 3, padding="same", activation="swish")(x)
    return keras.Model([images, times], layers.Conv2D(1, 3, padding="same")(x + skip))


class DiffusionModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.network = build_network()
        self.ema_network = build_network()
        self.ema_network.set_weights(self.network.get_weights())
        self.ema_network.trainable = False

    def noisy(self, images):
        times = tf.random.uniform(minval=0, maxval=TIMES, shape=(tf.shape(images)[0],), dtype=tf.int64)
        noise = tf.random.normal(shape=tf.shape(images), dtype=images.dtype)
        level = tf.gather(LEVELS, times)[:, None, None, None]
        return tf.sqrt(level) * images + tf.sqrt(1.0 - level) * noise, times, noise

    def train_step(self, images):
        images_t, times, noise = self.noisy(images)
        with tf.GradientTape() as tape:
            loss = self.loss(noise, self.network([images_t, times], training=True))
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        for weight, ema_weight in zip(self.network.weights, self.ema_network.weights):
            ema_weight.assign(0.9 * ema_weight + 0.1 * weight)
        return {"loss": loss}

    def test_step(self, images):
        images_t, times, noise = self.noisy(images)
        return {"loss": self.loss(noise, self.ema_network([images_t, times], training=False))}


def build_model():
    model = DiffusionModel()
    model.compile(loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.Adam(1e-3))
    return model
