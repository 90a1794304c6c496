"""A variational autoencoder with its own train_step."""

import keras
import tensorflow as tf
from keras import layers, ops


class Sampling(layers.Layer):
    """Draws a point from a normal distribution."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * noise


def build_encoder(latent):
    images = keras.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(images)
    x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
    mean = layers.Dense(latent, name="mean")(x)
    log_var = layers.Dense(latent, name="log_var")(x)
    return keras.Model(images, [mean, log_var, Sampling()([mean, log_var])], name="encoder")


def build_decoder(latent):
    z = keras.Input((latent,))
    x = layers.Dense(4 * 4 * 8, activation="relu")(z)
    x = layers.Reshape((4, 4, 8))(x)
    x = layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu")(x)
    return keras.Model(z, layers.Conv2DTranspose(1, 3, padding="same", activation="sigmoid")(x), name="decoder")


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss = keras.metrics.Mean(name="loss")
        self.reconstruction_loss = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total_loss, self.reconstruction_loss, self.kl_loss]

    def losses_of(self, images):
        mean, log_var, z = self.encoder(images)
        made = self.decoder(z)
        reconstruction = ops.mean(ops.sum(keras.losses.binary_crossentropy(images, made), axis=(1, 2)))
        kl = ops.mean(ops.sum(-0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var)), axis=1))
        return reconstruction + kl, reconstruction, kl

    def train_step(self, images):
        with tf.GradientTape() as tape:
            losses = self.losses_of(images)
        gradients = tape.gradient(losses[0], self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return self.updated(losses)

    def test_step(self, images):
        return self.updated(self.losses_of(images))

    def updated(self, losses):
        for metric, loss in zip(self.metrics, losses):
            metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


def build_model(latent=2):
    model = VAE(build_encoder(latent), build_decoder(latent))
    model.compile(optimizer=keras.optimizers.Adam(3e-3))
    return model
