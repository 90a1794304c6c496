"""What a model's own code logs is the same on one, two and four replicas, as Keras's own step logs it."""

from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.foundation.telemetry.events import Note
from tests.support.lab import in_fresh_process, lab_of, spec_of

MODELS = '''
class Plain(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(3, kernel_initializer="ones", kernel_regularizer="l2")

    def call(self, x):
        return self.out(x)


class Fit(Plain):
    """Keras's guide: the compiled loss, and every metric updated by hand."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=found)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, found)
        return {metric.name: metric.result() for metric in self.metrics}


class Tracked(Plain):
    """A loss of keras.losses in trackers of its own, under other names, beside what no metric holds."""

    def __init__(self):
        super().__init__()
        self.of_loss, self.hits = keras.metrics.Mean(name="tracker"), keras.metrics.F1Score(name="hits")

    @property
    def metrics(self):
        return [self.of_loss, self.hits]

    def losses(self, data, training):
        x, y = data
        found = self(x, training=training)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, found)
        self.of_loss.update_state(loss)
        self.hits.update_state(tf.one_hot(y, 3), tf.nn.softmax(found))
        both = {"loss": self.of_loss.result(), "best": tf.reduce_max(self.hits.result()), "f1": self.hits.result()}
        return loss, {**both, "last": loss, "perplexity": tf.exp(loss), "twice": {"a": loss + loss}}

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss, logs = self.losses(data, True)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return {**logs, "mean": tf.reduce_mean(data[0])}

    def test_step(self, data):
        return {**self.losses(data, False)[1], "mean": tf.reduce_mean(data[0])}


class Calls(Plain):
    """Keras's own step."""

    def train_step(self, data):
        return {**super().train_step(data), "kernel": ops.sum(self.out.kernel)}


class Own(Plain):
    """Adds to what Keras's own steps log."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, y_pred)
        return {**logs, "bits": loss / ops.log(2.0), "wrong": 1.0 - logs["accuracy"], "batch": ops.mean(x, axis=0)}


def made(kind):
    model = kind()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    return model


def fit(): return made(Fit)
def tracked(): return made(Tracked)
def calls(): return made(Calls)
def own(): return made(Own)
'''
BUILDS = ("fit", "tracked", "calls", "own")


def logged(folder: str, replicas: int, builds: list[str]) -> dict[str, Any]:
    """Rows and the last evaluation of each build; 13 validation examples, so replicas get different numbers."""
    lab, found = lab_of(Path(folder), MODELS), {}
    for build in builds:
        spec = spec_of(build, replicas=replicas, train__steps=9)
        start = lab.begin(spec).tip
        assert start is not None
        tip = lab.train_and_commit(spec, 9).tip
        assert tip is not None
        PROCESS_STATE.forget()
        rows = history_of(lab.log(spec).entries()).rows
        found[build] = [*(dict(row.metrics) for row in rows), lab.evaluate(spec, tip)]
        notes = [event.text for event in lab.recorder.events if isinstance(event, Note)]
        assert not any("not logged" in text for text in notes), notes
        PROCESS_STATE.forget()
    return found


@pytest.mark.slow
@pytest.mark.nightly
def test_logged_values_do_not_depend_on_replicas(tmp_path: Path) -> None:
    found = {}
    for replicas in (1, 2, 4):
        (tmp_path / str(replicas)).mkdir()
        arguments = {"folder": str(tmp_path / str(replicas)), "replicas": replicas, "builds": list(BUILDS)}
        found[replicas] = in_fresh_process(logged, **arguments)
    for build in BUILDS:
        for replicas in (2, 4):
            for one, other in zip(found[1][build], found[replicas][build], strict=True):
                assert other == pytest.approx(one, rel=1e-3), (build, replicas)  # exp of a mean is no mean
