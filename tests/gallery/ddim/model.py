"""A denoising diffusion implicit model that draws with keras.random, without a generator."""

import keras
import tensorflow as tf
from keras import layers, ops


def build_network():
    images, variances = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
    x = layers.Concatenate()([images, layers.UpSampling2D(8)(variances)])
    x = layers.Conv2D(8, 3, padding="same", activation="swish")(x)
    x = layers.BatchNormalization(center=False, scale=False)(x)
    x = layers.Conv2D(8, 3, padding="same", activation="swish")(x)
    return keras.Model([images, variances], layers.Conv2D(1, 1, kernel_initializer="zeros")(x))


class DiffusionModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.network = build_network()
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")
        self.image_loss_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker, self.image_loss_tracker]

    def losses_of(self, images, training):
        noises = keras.random.normal(shape=ops.shape(images))
        times = keras.random.uniform(shape=(ops.shape(images)[0], 1, 1, 1), minval=0.0, maxval=1.0)
        angles = 0.3 + times * 1.2
        signal_rates, noise_rates = ops.cos(angles), ops.sin(angles)
        noisy = signal_rates * images + noise_rates * noises
        predicted = self.network([noisy, noise_rates**2], training=training)
        made = (noisy - noise_rates * predicted) / signal_rates
        return self.loss(noises, predicted), self.loss(images, made)

    def updated(self, losses):
        for metric, loss in zip(self.metrics, losses):
            metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, images):
        with tf.GradientTape() as tape:
            losses = self.losses_of(images, training=True)
        gradients = tape.gradient(losses[0], self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        return self.updated(losses)

    def test_step(self, images):
        return self.updated(self.losses_of(images, training=False))


def build_model():
    model = DiffusionModel()
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4),
        loss=keras.losses.MeanAbsoluteError(),
    )
    return model
