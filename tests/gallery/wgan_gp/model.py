"""A Wasserstein GAN: several critic steps for each generator step, and a gradient penalty."""

import keras
import tensorflow as tf
from keras import layers


class WGAN(keras.Model):
    def __init__(self, critic, generator, latent_dim, critic_steps=2, penalty_weight=10.0):
        super().__init__()
        self.critic = critic
        self.generator = generator
        self.latent_dim = latent_dim
        self.critic_steps = critic_steps
        self.penalty_weight = penalty_weight
        self.seeds = keras.random.SeedGenerator(11)
        self.built = True

    def compile(self, c_optimizer, g_optimizer):
        super().compile(optimizer=g_optimizer)
        self.c_optimizer = c_optimizer
        self.g_optimizer = g_optimizer

    def gradient_penalty(self, real, fake):
        mix = keras.random.uniform((tf.shape(real)[0], 1), seed=self.seeds)
        between = real + mix * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = self.critic(between, training=True)
        slopes = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(score, between)), axis=1) + 1e-12)
        return tf.reduce_mean((slopes - 1.0) ** 2)

    def train_step(self, real):
        batch = tf.shape(real)[0]
        for _ in range(self.critic_steps):
            latent = keras.random.normal((batch, self.latent_dim), seed=self.seeds)
            with tf.GradientTape() as tape:
                fake = self.generator(latent, training=True)
                cost = tf.reduce_mean(self.critic(fake, training=True)) - tf.reduce_mean(
                    self.critic(real, training=True)
                )
                c_loss = cost + self.penalty_weight * self.gradient_penalty(real, fake)
            gradients = tape.gradient(c_loss, self.critic.trainable_variables)
            self.c_optimizer.apply_gradients(zip(gradients, self.critic.trainable_variables))

        latent = keras.random.normal((batch, self.latent_dim), seed=self.seeds)
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.critic(self.generator(latent, training=True), training=True))
        gradients = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_variables))
        return {"c_loss": c_loss, "g_loss": g_loss}


def build_model(latent_dim=2):
    critic = keras.Sequential(
        [keras.Input((2,)), layers.Dense(16, activation="leaky_relu"), layers.LayerNormalization(), layers.Dense(1)]
    )
    generator = keras.Sequential(
        [keras.Input((latent_dim,)), layers.Dense(16), layers.BatchNormalization(), layers.ReLU(), layers.Dense(2)]
    )
    c_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5, beta_2=0.9)
    g_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5, beta_2=0.9)
    c_optimizer.build(critic.trainable_variables)
    g_optimizer.build(generator.trainable_variables)
    model = WGAN(critic, generator, latent_dim)
    model.compile(c_optimizer, g_optimizer)
    return model
