"""A custom train_step and test_step get the same arguments as from Keras, and their results are logged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.evaluate.evaluator import Evaluator, Metrics
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.model.metrics import take_metrics, trace_returned_metrics
from baton.tasks.foundation.model.step import build_train_step, run_train_step
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.foundation.telemetry.events import Note
from baton.tasks.foundation.user_traceback import describe
from baton.tasks.init_or_restore.model_requirements import batch_dependent_parts, require_best
from tests.support.lab import Lab, built, lab_of, spec_of

MODEL = '''
class Auto(keras.Model):
    """Sums over axis 1, which is another axis if the batch is within a tuple."""

    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(6, kernel_initializer="ones")

    def call(self, x):
        return self.out(x)

    def loss_of(self, x):
        return ops.mean(ops.sum(ops.square(x - self(x)), axis=1))

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = self.loss_of(x)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"sum": loss}

    def test_step(self, x):
        return {"sum": self.loss_of(x)}


class Kinds(Auto):
    """Returns every kind of value."""

    def __init__(self):
        super().__init__()
        self.sums = keras.metrics.Mean(name="sums")
        self.kept = keras.metrics.Mean(name="kept")

    def train_step(self, x):
        loss = self.loss_of(x)
        self.sums.update_state(loss)
        self.kept.update_state(2.0 * loss)
        self.trainable_variables[0].assign_add(tf.ones([6, 6]))
        return {
            "kept": self.kept.result(),
            "loss": tf.reduce_sum(tf.square(x), axis=1),
            "other name": self.sums.result(),
            "deep": {"a.b": tf.cast(tf.shape(x)[0], tf.int64)},
            "vector": x[0],
            "each": tf.reduce_sum(x, axis=1),
            "ratio": self.sums.result() / (1.0 + self.kept.result()),
            "text": "words",
        }


def kinds():
    model = Kinds()
    model.compile("sgd", "mse")
    return model


class Counted(Auto):
    """Returns its metrics by name, among them the group of the compiled ones."""

    def train_step(self, x):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(self.loss_of(x))
            else:
                metric.update_state(x, self(x))
        return {metric.name: metric.result() for metric in self.metrics}


def counted():
    model = Counted()
    model.compile("sgd", "mse", metrics=["mae"])
    return model


class Denoises(Auto):
    """Its call takes a noisy batch and a time, which only its train_step makes."""

    def call(self, parts):
        return self.out(parts["noisy"]) * parts["time"]

    def loss_of(self, x):
        return ops.mean(ops.square(x - self({"noisy": x, "time": tf.constant(0.5)})))


def denoises(built=True, metrics=None):
    model = Denoises()
    if built:
        model.out.build((None, 6))
    model.compile("sgd", run_eagerly=True, steps_per_execution=4, metrics=metrics)
    return model


def auto():
    model = Auto()
    model.compile("sgd")
    return model
'''


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    PROCESS_STATE.forget()
    return lab_of(tmp_path, MODEL)


def examples(count: int) -> Any:
    return np.random.default_rng(3).normal(size=(count, 6)).astype(np.float32)


def returned_of(state: Any, name: str, x: Any) -> Any:
    return trace_returned_metrics(state.model, name, (x,), reference="auto", draws=state.draws)


def stepped(state: Any, x: Any) -> dict[str, float]:
    """The results of a step on x."""
    logs: dict[str, Any] = {}
    step = build_train_step(state.model, (x,), 1, reference="auto", draws=state.draws)

    def keeping(batch: Any) -> dict[str, Any]:
        logs.update(step(batch))
        return logs

    run_train_step(keeping, (tf.constant(x),), state.draws)
    return {name: float(value) for name, value in logs.items()}


def test_train_step_gets_x_alone_as_from_keras(lab: Lab) -> None:
    spec = spec_of("auto", form="alone")
    x, mine, other = examples(8), built(lab, spec), built(lab, spec)
    history = other.model.fit(x, batch_size=8, shuffle=False, verbose=0).history
    assert stepped(mine, x) == {name: values[0] for name, values in history.items()}
    for weight, same in zip(mine.model.weights, other.model.weights, strict=True):
        assert np.array_equal(weight.numpy(), same.numpy())


def test_results_of_a_test_step_are_means_over_examples(lab: Lab) -> None:
    x, state = examples(11), built(lab, spec_of("auto", form="alone"))
    batches = tf.data.Dataset.from_tensor_slices((x,)).batch(8)
    metrics_of = Metrics(state.model, state.accelerator.strategy, returned_of(state, "test_step", x[:8]))
    evaluator = Evaluator(state.model, metrics_of, reference="auto", draws=state.draws)
    for _ in range(2):
        metrics = evaluator.evaluate(
            state.leaves, full=lambda _: batches.take(1), full_batches=1, remainder=batches.skip(1)
        )
        assert metrics == {"sum": pytest.approx(np.mean(np.sum((x - state.model(x)) ** 2, axis=1)), rel=1e-5)}


def test_results_of_a_train_step_are_logged(lab: Lab) -> None:
    x, state = examples(8), built(lab, spec_of("kinds", form="alone"))
    returned = returned_of(state, "train_step", x)
    sums = []
    for factor in (1, 2, 3):
        batch = tf.constant(np.float32(x * factor))
        sums.append(float(state.model.loss_of(batch)))
        returned.step((batch,))
    metrics = take_metrics(state.model, state.accelerator.strategy, returned)
    assert metrics == {
        "sums": pytest.approx(np.mean(sums)),
        "kept": pytest.approx(2 * np.mean(sums)),
        "loss": pytest.approx(np.mean(np.sum(x**2, axis=1)) * (1 + 4 + 9) / 3),
        "other name": pytest.approx(np.mean(sums)),
        "deep/a.b": 8,
        **{f"vector/{index}": pytest.approx(2 * x[0, index]) for index in range(6)},
        "ratio": pytest.approx(np.mean(sums) / (1 + 2 * np.mean(sums))),
    }
    assert returned.ignored == ("each", "text")
    # What is computed from metrics has no state of its own.
    assert sorted(returned.metrics) == ["deep/a.b", "loss", "vector"]
    returned.step((tf.constant(x),))
    again = take_metrics(state.model, state.accelerator.strategy, returned)
    assert again["loss"] == pytest.approx(np.mean(np.sum(x**2, axis=1)))
    words = [part.why for part in batch_dependent_parts(state.model) if part.part == "train_step of Kinds"]
    assert "gradients are summed" in words[0]


def test_compiled_metrics_are_logged_once_as_in_fit(lab: Lab) -> None:
    """Keras holds them in one metric, "compile_metrics", whose result is a dict."""
    x, mine, other = (
        examples(8),
        built(lab, spec_of("counted", form="alone")),
        built(lab, spec_of("counted", form="alone")),
    )
    history = other.model.fit(x, batch_size=8, shuffle=False, verbose=0).history
    returned = returned_of(mine, "train_step", x)
    returned.step((tf.constant(x),))
    metrics = take_metrics(mine.model, mine.accelerator.strategy, returned)
    assert metrics == {name: pytest.approx(values[0]) for name, values in history.items()}


def rows_and_tip(lab: Lab, spec: RunSpec) -> Any:
    history = history_of(lab.log(spec).entries())
    assert history.head is not None
    assert history.head.tip is not None
    return [row.model_dump() for row in history.rows], history.head.tip.state_digest


@pytest.mark.slow
def test_rows_of_returned_values_are_exact_across_cuts(lab: Lab) -> None:
    straight, cut = (spec_of("auto", run=run, form="alone") for run in ("straight", "cut"))
    lab.relay(straight, 11)
    lab.relay(cut, 6, 11, cold=True)
    rows, digest = rows_and_tip(lab, straight)
    assert (rows, digest) == rows_and_tip(lab, cut)
    assert [list(row["metrics"]) for row in rows] == [["sum"], ["sum"]]
    assert rows[0]["metrics"]["sum"] > rows[1]["metrics"]["sum"] > 0
    # The first checkpoint has no such means, like those of earlier versions; evaluation ignores them.
    head = lab.log(cut).require_head()
    assert head.tip is not None
    assert "metrics/returned/sum/0/replica_0/.ATTRIBUTES/VARIABLE_VALUE" in lab.tensors(cut, head.tip)
    assert list(lab.evaluate(cut, head.tip)) == ["sum"]


def test_keep_best_works_with_returned_values(lab: Lab) -> None:
    state, zeros = built(lab, spec_of("auto", form="alone")), (np.zeros((8, 6), np.float32),)
    best = {"metric": "sum", "mode": "min"}
    require_best(spec_of("auto", form="alone", checkpoint__keep_best=best), state, zeros)
    with pytest.raises(ModelError, match="'loss' is not a metric of the model; it has: sum"):
        require_best(spec_of("auto", form="alone", checkpoint__keep_best={**best, "metric": "loss"}), state, zeros)


def test_model_with_another_call_is_accepted(lab: Lab) -> None:
    spec = spec_of("denoises", form="alone")
    start = lab.begin(spec).tip
    assert start is not None
    (row,) = lab.train(spec, start, 4).history
    assert list(row.metrics) == ["sum"]
    notes = [event.text for event in lab.recorder.events if isinstance(event, Note) and "compiled with" in event.text]
    assert len(notes) == 1
    assert "compiled with run_eagerly=True, steps_per_execution=4, which is not used" in notes[0]
    unbuilt = built(lab, spec_of("denoises", form="alone", model__options={"built": False}))
    assert len(unbuilt.model.weights) == 2  # its train_step has created them
    with pytest.raises(ModelError, match="keep metrics as attributes of the model"):
        built(lab, spec_of("denoises", form="alone", model__options={"metrics": ["mae"]}))


def test_key_error_in_keras_gets_a_clear_message() -> None:
    raised = KeyError(
        "Exception encountered when calling Own.call().\n\n"
        "\x1b[1m'noisy'\x1b[0m\n\nArguments received by Own.call():\n  • x=1"
    )
    message = describe(raised)
    assert message == "KeyError: 'noisy' (in Own.call())"
