"""Layers, metrics and models, some with state that Keras does not track."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops


class RawVariable(keras.layers.Layer):
    """Keeps a trainable scale and a count of calls as plain `tf.Variable`s."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls = tf.Variable(0, dtype=tf.int64, trainable=False, name="calls")
        self.nested = {"sums": [tf.Variable(tf.zeros([6]), trainable=False, name="sum")]}

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1)
            self.nested["sums"][0].assign_add(tf.reduce_sum(x, axis=0))
        return x + tf.cast(self.calls % 7, x.dtype) * 0.1 + self.nested["sums"][0] * 0.01


class GeneratorNoise(keras.layers.Layer):
    """Noise from a `tf.random.Generator`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.generator = tf.random.Generator.from_seed(11)

    def call(self, x: Any, training: bool = False) -> Any:
        return x + self.generator.normal(tf.shape(x)) if training else x


class SeededNoise(keras.layers.Layer):
    """Noise from keras.random with the layer's SeedGenerator."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, x: Any, training: bool = False) -> Any:
        return x + keras.random.normal(ops.shape(x), seed=self.seeds) if training else x


class CountRight(keras.metrics.Metric):
    """The number of correct predictions, as an integer."""

    def __init__(self, name: str = "right", **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # noqa: ARG002
        right = ops.equal(ops.cast(ops.argmax(y_pred, axis=-1), "int32"), ops.cast(ops.reshape(y_true, [-1]), "int32"))
        self.count.assign_add(ops.sum(ops.cast(right, "int32")))

    def result(self) -> Any:
        return self.count


class Peak(keras.metrics.Metric):
    """The largest logit of the last batch. It is not a sum, so replicas are averaged."""

    def __init__(self, name: str = "peak", **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self.value = self.add_variable((), "zeros", aggregation="mean", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # noqa: ARG002
        self.value.assign(ops.max(y_pred))

    def result(self) -> Any:
        return self.value


class Subclassed(keras.Model):
    """A model without variables until it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.hidden = keras.layers.Dense(5, activation="relu")
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.3)
        self.out = keras.layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.drop(self.norm(self.hidden(x), training=training), training=training))


class OwnTracker(Subclassed):
    """A custom train_step with its own loss and metric."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
            loss /= tf.distribute.get_strategy().num_replicas_in_sync
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss * tf.distribute.get_strategy().num_replicas_in_sync)
        return {"loss": self.tracker.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        logits = self(x, training=False)
        self.tracker.update_state(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
        return {"loss": self.tracker.result()}


class OwnStepCompiled(Subclassed):
    """A custom train_step that uses the compiled loss and metrics."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=logits, training=True)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return self.compute_metrics(x, y, logits)


class OwnLoss(Subclassed):
    """A custom compute_loss with the short signature of Keras's guides."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:  # noqa: ARG002
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))


class Adversaries(keras.Model):
    """Two networks, two optimizers, no `call`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.maker = keras.Sequential([keras.Input((2,)), keras.layers.Dense(6)], name="maker")
        self.judge = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)], name="judge")
        self.maker_loss = keras.metrics.Mean(name="maker_loss")
        self.judge_loss = keras.metrics.Mean(name="judge_loss")
        self.seeds = keras.random.SeedGenerator(3)

    def compile(self, maker_optimizer: Any, judge_optimizer: Any) -> None:
        super().compile(optimizer=judge_optimizer)
        self.maker_optimizer = maker_optimizer

    def train_step(self, x: Any) -> dict[str, Any]:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        noise = keras.random.normal((ops.shape(x)[0], 2), seed=self.seeds)
        with tf.GradientTape(persistent=True) as tape:
            made = self.maker(noise, training=True)
            judge_loss = ops.mean(ops.softplus(-self.judge(x)) + ops.softplus(self.judge(made)))
            maker_loss = ops.mean(ops.softplus(-self.judge(made)))
            shares = judge_loss / replicas, maker_loss / replicas
        for loss, network, optimizer in (
            (shares[0], self.judge, self.optimizer),
            (shares[1], self.maker, self.maker_optimizer),
        ):
            weights = network.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.judge_loss.update_state(judge_loss)
        self.maker_loss.update_state(maker_loss)
        return {"judge_loss": self.judge_loss.result(), "maker_loss": self.maker_loss.result()}
