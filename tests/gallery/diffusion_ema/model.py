"""A diffusion model that keeps an exponential moving average of its network."""

import math

import keras
import tensorflow as tf
from keras import layers, ops


@keras.saving.register_keras_serializable("diffusion_ema")
def sinusoidal_embedding(x):
    frequencies = ops.exp(ops.linspace(math.log(1.0), math.log(100.0), 4))
    angles = 2.0 * math.pi * frequencies * x
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=3)


def get_network():
    noisy_images = keras.Input((8, 8, 1))
    noise_variances = keras.Input((1, 1, 1))
    e = layers.Lambda(sinusoidal_embedding, output_shape=(1, 1, 8))(noise_variances)
    e = layers.UpSampling2D(8, interpolation="nearest")(e)
    x = layers.Conv2D(8, 1)(noisy_images)
    x = layers.Concatenate()([x, e])
    skip = layers.Conv2D(12, 3, padding="same", activation="swish")(x)
    x = layers.AveragePooling2D(2)(skip)
    x = layers.BatchNormalization(center=False, scale=False)(x)
    x = layers.Conv2D(16, 3, padding="same", activation="swish")(x)
    x = layers.UpSampling2D(2, interpolation="bilinear")(x)
    x = layers.Concatenate()([x, skip])
    x = layers.Conv2D(1, 1, kernel_initializer="zeros")(x)
    return keras.Model([noisy_images, noise_variances], x, name="unet")


class DiffusionModel(keras.Model):
    def __init__(self, ema=0.9):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = get_network()
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.set_weights(self.network.get_weights())
        self.ema = ema
        self.seed_generator = keras.random.SeedGenerator(21)
        self.built = True

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")
        self.image_loss_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker, self.image_loss_tracker]

    def denoise(self, noisy_images, noise_rates, signal_rates, training):
        network = self.network if training else self.ema_network
        noises = network([noisy_images, noise_rates**2], training=training)
        return noises, (noisy_images - noise_rates * noises) / signal_rates

    def losses_of(self, images, training):
        images = self.normalizer(images, training=training)
        batch = ops.shape(images)[0]
        noises = keras.random.normal(ops.shape(images), seed=self.seed_generator)
        times = keras.random.uniform((batch, 1, 1, 1), seed=self.seed_generator)
        angles = math.acos(0.95) + times * (math.acos(0.02) - math.acos(0.95))
        signal_rates, noise_rates = ops.cos(angles), ops.sin(angles)
        noisy = signal_rates * images + noise_rates * noises
        predicted_noises, predicted_images = self.denoise(noisy, noise_rates, signal_rates, training)
        return self.loss(noises, predicted_noises), self.loss(images, predicted_images)

    def train_step(self, images):
        with tf.GradientTape() as tape:
            noise_loss, image_loss = self.losses_of(images, training=True)
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        self.noise_loss_tracker.update_state(noise_loss)
        self.image_loss_tracker.update_state(image_loss)
        for weight, ema_weight in zip(self.network.weights, self.ema_network.weights):
            ema_weight.assign(self.ema * ema_weight + (1 - self.ema) * weight)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, images):
        noise_loss, image_loss = self.losses_of(images, training=False)
        self.noise_loss_tracker.update_state(noise_loss)
        self.image_loss_tracker.update_state(image_loss)
        return {metric.name: metric.result() for metric in self.metrics}


def build_model():
    from .data import load

    model = DiffusionModel()
    model.normalizer.adapt(ops.stack(list(load())))
    optimizer = keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4)
    optimizer.build(model.network.trainable_variables)
    model.ema_network.trainable = False
    model.compile(optimizer=optimizer, loss=keras.losses.MeanAbsoluteError())
    return model
