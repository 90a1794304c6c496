"""Models that draw with TensorFlow's and Keras's global state give the same bits however a run is cut."""

from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support.lab import Lab, differing, in_fresh_process, lab_of, rows_of, spec_of

# The text of a user's model.py, after the imports of `lab_of`.
MODELS = '''
import numpy as np

keras.utils.set_random_seed(7)


class Noisy(keras.layers.Layer):
    """A code, and a sample around it."""

    def call(self, parts):
        mean, log_variance = parts
        noise = tf.random.normal(shape=tf.shape(mean))
        return mean + tf.exp(0.5 * log_variance) * noise


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        self.mean, self.log_variance = keras.layers.Dense(2), keras.layers.Dense(2)
        self.noisy, self.decoder = Noisy(), keras.layers.Dense(6)
        self.total, self.divergence = keras.metrics.Mean(name="loss"), keras.metrics.Mean(name="kl")

    @property
    def metrics(self):
        return [self.total, self.divergence]

    def call(self, x):
        return self.decoder(self.noisy((self.mean(x), self.log_variance(x))))

    def losses_of(self, x):
        mean, log_variance = self.mean(x), self.log_variance(x)
        back = self.decoder(self.noisy((mean, log_variance)))
        error = tf.reduce_mean(tf.reduce_sum(tf.square(x - back), axis=1))
        divergence = tf.reduce_mean(-0.5 * (1 + log_variance - tf.square(mean) - tf.exp(log_variance)))
        return error + divergence, divergence

    def train_step(self, x):
        with tf.GradientTape() as tape:
            total, divergence = self.losses_of(x)
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        self.total.update_state(total)
        self.divergence.update_state(divergence)
        return {each.name: each.result() for each in self.metrics}

    def test_step(self, x):
        total, divergence = self.losses_of(x)
        self.total.update_state(total)
        self.divergence.update_state(divergence)
        return {each.name: each.result() for each in self.metrics}


class GAN(keras.Model):
    """Deep convolutional ones train like this; here with dense layers."""

    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(6)])
        self.critic_loss = keras.metrics.Mean(name="critic_loss")
        self.generator_loss = keras.metrics.Mean(name="generator_loss")

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile()
        self.critic_optimizer, self.generator_optimizer = critic_optimizer, generator_optimizer
        critic_optimizer.build(self.critic.trainable_variables)
        generator_optimizer.build(self.generator.trainable_variables)

    @property
    def metrics(self):
        return [self.critic_loss, self.generator_loss]

    def train_step(self, real):
        count = tf.shape(real)[0]
        made = self.generator(tf.random.normal(shape=(count, 3)))
        both = tf.concat([made, real], axis=0)
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        error = keras.losses.BinaryCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            critic_loss = error(labels, self.critic(both))
        weights = self.critic.trainable_weights
        self.critic_optimizer.apply_gradients(zip(tape.gradient(critic_loss, weights), weights))
        noise = tf.random.normal(shape=(count, 3))
        with tf.GradientTape() as tape:
            generator_loss = error(tf.zeros((count, 1)), self.critic(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply_gradients(zip(tape.gradient(generator_loss, weights), weights))
        self.critic_loss.update_state(critic_loss)
        self.generator_loss.update_state(generator_loss)
        return {"critic_loss": self.critic_loss.result(), "generator_loss": self.generator_loss.result()}


class Penalized(GAN):
    """Wasserstein with a penalty of the gradient: three turns of the critic a step."""

    def penalty(self, count, real, made):
        share = tf.random.uniform([count, 1], 0.0, 1.0)
        between = real + share * (made - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.critic(between, training=True)
        slopes = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(scores, between)), axis=1) + 1e-12)
        return tf.reduce_mean((slopes - 1.0) ** 2)

    def train_step(self, real):
        count = tf.shape(real)[0]
        for _ in range(3):
            noise = tf.random.normal(shape=(count, 3))
            with tf.GradientTape() as tape:
                made = self.generator(noise, training=True)
                critic_loss = tf.reduce_mean(self.critic(made)) - tf.reduce_mean(self.critic(real))
                critic_loss += 10.0 * self.penalty(count, real, made)
            weights = self.critic.trainable_variables
            self.critic_optimizer.apply_gradients(zip(tape.gradient(critic_loss, weights), weights))
        noise = tf.random.normal(shape=(count, 3))
        with tf.GradientTape() as tape:
            generator_loss = -tf.reduce_mean(self.critic(self.generator(noise, training=True)))
        weights = self.generator.trainable_variables
        self.generator_optimizer.apply_gradients(zip(tape.gradient(generator_loss, weights), weights))
        return {"critic": critic_loss, "generator": generator_loss}


def denoiser():
    x, time = keras.Input((6,)), keras.Input((1,))
    return keras.Model([x, time], keras.layers.Dense(6)(keras.layers.Concatenate()([x, time])))


class Diffusion(keras.Model):
    """Denoises at a random time; keeps a moving average of its network."""

    times = 20

    def __init__(self):
        super().__init__()
        self.network, self.average = denoiser(), denoiser()
        self.average.set_weights(self.network.get_weights())
        self.levels = tf.constant(np.linspace(0.99, 0.01, self.times), tf.float32)

    def drawn(self, x):
        times = tf.random.uniform((tf.shape(x)[0],), minval=0, maxval=self.times, dtype=tf.int64)
        return tf.random.normal(shape=tf.shape(x), dtype=x.dtype), tf.gather(self.levels, times)[:, None]

    def train_step(self, x):
        noise, level = self.drawn(x)
        with tf.GradientTape() as tape:
            found = self.network([tf.sqrt(level) * x + tf.sqrt(1.0 - level) * noise, level], training=True)
            loss = self.loss(noise, found)
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        for weight, mean in zip(self.network.weights, self.average.weights):
            mean.assign(0.9 * mean + 0.1 * weight)
        return {"loss": loss}

    def test_step(self, x):
        noise, level = self.drawn(x)
        return {"loss": self.loss(noise, self.average([tf.sqrt(level) * x + tf.sqrt(1.0 - level) * noise, level]))}


class Implicit(Diffusion):
    """Draws with keras.random, without a generator."""

    def drawn(self, x):
        level = keras.random.uniform(shape=(ops.shape(x)[0], 1), minval=0.02, maxval=0.95)
        return keras.random.normal(shape=ops.shape(x)), level


class DropPath(keras.layers.Layer):
    """Leaves out whole examples of a branch, as Swin does."""

    def call(self, x, training=None):
        if not training:
            return x
        kept = tf.floor(0.8 + tf.random.uniform((tf.shape(x)[0], 1, 1), dtype=x.dtype))
        return x / 0.8 * kept


def swin():
    x = keras.Input((6,))
    tokens = keras.layers.Dense(4)(keras.layers.Reshape((6, 1))(x))
    for _ in range(2):
        mixed = keras.layers.MultiHeadAttention(2, 2, dropout=0.1)(tokens, tokens)
        tokens = keras.layers.LayerNormalization()(tokens + DropPath()(mixed))
    model = keras.Model(x, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(tokens)))
    model.compile(keras.optimizers.AdamW(0.01), "mse", metrics=["mae"])
    return model


class Draws(keras.layers.Layer):
    """Draws in every place where a draw may be repeated within a step, and constants while it is traced."""

    @tf.function
    def noise(self, x):
        return tf.random.normal(tf.shape(x))

    def call(self, x):
        twice = self.noise(x) - self.noise(x)
        rows = tf.map_fn(lambda row: row + tf.random.uniform([]), x)
        chosen = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.random.normal([]), lambda: tf.random.uniform([]))
        turns = tf.while_loop(lambda i, _: i < 3, lambda i, s: (i + 1, s + tf.random.gamma([], 2.0)), (0, 0.0))[1]
        return rows + twice + chosen + turns + tf.random.shuffle(x) * float(np.random.uniform())


def draws():
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.Dense(1)(Draws()(keras.layers.Dense(6)(x))))
    model.compile("adam", "mse")
    return model


def vae():
    model = VAE()
    model.compile(keras.optimizers.Adam(0.01))
    return model


def gan():
    model = GAN()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
    return model


def wasserstein():
    model = Penalized()
    model.compile(keras.optimizers.Adam(0.01, beta_1=0.5), keras.optimizers.Adam(0.01, beta_1=0.5))
    return model


def ddpm():
    model = Diffusion()
    model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError())
    return model


def ddim():
    model = Implicit()
    model.compile(keras.optimizers.AdamW(0.01), keras.losses.MeanSquaredError())
    return model
'''

# Form of the data, and whether the model has a test_step.
ALONE, PAIRS = "alone", "plain"
FORMS = {"vae": ALONE, "gan": ALONE, "wasserstein": ALONE, "ddpm": ALONE, "ddim": ALONE, "swin": PAIRS, "draws": PAIRS}
WITHOUT_TEST_STEP = frozenset({"gan", "wasserstein"})


STEPS = 9
# Draws within Keras's own step, and within steps of the model.
QUICK, SLOW = "draws", "vae"
NIGHTLY = ("gan", "ddpm", "swin")
ON_TWO_REPLICAS = ("wasserstein", "ddim")


def compare_cuts(lab: Lab, build: str, *, replicas: int = 1, **changes: Any) -> dict[str, Any]:
    """Train to step 9 straight, and in segments that begin like a new process; evaluate twice."""
    fraction = 0.0 if build in WITHOUT_TEST_STEP else 0.2
    settings: dict[str, Any] = {"data__validation_fraction": fraction, "train__log_every_steps": 2, **changes}
    spec = spec_of(build, run=f"{build}-{replicas}", form=FORMS[build], replicas=replicas, **settings)
    start = lab.begin(spec).tip
    assert start is not None
    runs: dict[str, list[Any]] = {}
    for name, borders in (("cut", (2, 5, STEPS)), ("straight", (STEPS,))):
        results, at = [], start
        for border in borders:
            if border == 5:  # the segments before and after it are traced in another order
                PROCESS_STATE.forget()
            results.append(lab.train(spec, at, border))
            at = results[-1].staged
        runs[name] = results
    tensors = {name: lab.tensors(spec, results[-1].staged) for name, results in runs.items()}
    metrics: list[dict[str, float]] = []
    if fraction:
        metrics.append(lab.evaluate(spec, start))
        lab.train(spec, start, 2)  # draws of a training must not move those of an evaluation
        metrics.append(lab.evaluate(spec, start))
    rows = [[row.model_dump() for row in rows_of(results)] for results in runs.values()]
    return {
        "differing": differing(tensors["straight"], tensors["cut"]),
        "rows": rows,
        "metrics": metrics,
        "warnings": [text for text in lab.recorder.warnings if "callbacks" not in text],
        "digest": runs["straight"][-1].staged.state_digest,
    }


def assert_exact(compared: dict[str, Any]) -> None:
    assert compared["differing"] == []
    cut, straight = compared["rows"]
    assert cut == straight
    # Other draws at each step: the same ones would give a smooth curve, but never equal rows.
    assert len({str(row["metrics"]) for row in straight}) == len(straight) == STEPS // 2
    assert compared["metrics"][1:] == compared["metrics"][:1]
    assert compared["warnings"] == []


@pytest.mark.parametrize(
    "build",
    [
        QUICK,
        pytest.param(SLOW, marks=pytest.mark.slow),
        *(pytest.param(build, marks=[pytest.mark.slow, pytest.mark.nightly]) for build in NIGHTLY),
    ],
)
def test_cut_run_of_a_random_step_has_the_same_bits(tmp_path: Path, build: str) -> None:
    PROCESS_STATE.forget()
    assert_exact(compare_cuts(lab_of(tmp_path, MODELS), build))


def gallery(folder: str, replicas: int) -> dict[str, Any]:
    lab = lab_of(Path(folder), MODELS)
    return {build: compare_cuts(lab, build, replicas=replicas) for build in ON_TWO_REPLICAS}


@pytest.mark.slow
@pytest.mark.nightly
def test_random_steps_are_exact_on_two_replicas(tmp_path: Path) -> None:
    for compared in in_fresh_process(gallery, folder=str(tmp_path), replicas=2).values():
        assert_exact(compared)
