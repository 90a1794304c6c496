"""A generative adversarial network with two optimizers."""

import keras
import tensorflow as tf
from keras import layers, ops


class GAN(keras.Model):
    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(7)
        self.built = True

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile(optimizer=d_optimizer)
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def train_step(self, real):
        batch = ops.shape(real)[0]
        noise = keras.random.normal((batch, self.latent_dim), seed=self.seed_generator)
        both = ops.concatenate([self.generator(noise), real], axis=0)
        labels = ops.concatenate([ops.ones((batch, 1)), ops.zeros((batch, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights))

        noise = keras.random.normal((batch, self.latent_dim), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((batch, 1)), self.discriminator(self.generator(noise)))
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights))

        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def build_model(latent_dim=4):
    discriminator = keras.Sequential(
        [
            keras.Input((16, 1)),
            layers.Conv1D(8, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv1D(16, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.GlobalMaxPooling1D(),
            layers.Dense(1),
        ],
        name="discriminator",
    )
    generator = keras.Sequential(
        [
            keras.Input((latent_dim,)),
            layers.Dense(4 * 8),
            layers.Reshape((4, 8)),
            layers.Conv1DTranspose(8, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv1DTranspose(8, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv1D(1, 5, padding="same", activation="tanh"),
        ],
        name="generator",
    )
    d_optimizer, g_optimizer = keras.optimizers.Adam(3e-4), keras.optimizers.Adam(3e-4)
    d_optimizer.build(discriminator.trainable_variables)
    g_optimizer.build(generator.trainable_variables)
    model = GAN(discriminator, generator, latent_dim)
    model.compile(d_optimizer, g_optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    return model
