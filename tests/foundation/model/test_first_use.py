"""A train_step that runs in Keras's fit runs here, although nothing is built before its first batch."""

import random
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.model.step import build_train_step, run_train_step
from baton.tasks.foundation.seeding import keras_seeds_from
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.foundation.telemetry.events import Note
from baton.tasks.foundation.user_functions import load_function
from tests.support.lab import built, differing, in_fresh_process, lab_of, rows_of, spec_of
from tests.support.zoo.data import load

# The text of a user's model.py, after the imports of `lab_of`.
MODELS = '''
def apply(optimizer, tape, loss, weights):
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))


def two_layers(width, units, **settings):
    return keras.Sequential([keras.layers.Dense(width, "tanh"), keras.layers.Dense(units)], **settings)


class Codes(keras.Model):
    """Bare x; returns a value and holds no metric."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = two_layers(5, 2), two_layers(5, 6)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x - self.decoder(self.encoder(x))))
        apply(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


class Pair(keras.Model):
    """Two networks; two optimizers that nobody builds; call makes an image of noise."""

    def __init__(self):
        super().__init__()
        self.judge, self.maker = two_layers(4, 1), two_layers(4, 6)

    def compile(self, judge_optimizer, maker_optimizer, **settings):
        super().compile(**settings)
        self.judge_optimizer, self.maker_optimizer = judge_optimizer, maker_optimizer

    def call(self, noise):
        return self.maker(noise)

    def train_step(self, real):
        noise = real[:, :3] - real[:, 3:]
        with tf.GradientTape() as tape:
            judged = tf.reduce_mean(self.judge(self.maker(noise))) - tf.reduce_mean(self.judge(real))
        apply(self.judge_optimizer, tape, judged, self.judge.trainable_variables)
        with tf.GradientTape() as tape:
            made = -tf.reduce_mean(self.judge(self.maker(noise)))
        apply(self.maker_optimizer, tape, made, self.maker.trainable_variables)
        return {"judge": judged, "maker": made}


class Pupil(keras.Model):
    """Learns from a fixed teacher; only its own variables are trained."""

    def __init__(self):
        super().__init__()
        self.pupil, self.teacher = two_layers(4, 3), two_layers(8, 3, trainable=False)

    def call(self, x):
        return self.pupil(x)

    def train_step(self, data):
        x, y = data
        goal = tf.nn.softmax(self.teacher(x, training=False))
        with tf.GradientTape() as tape:
            found = self.pupil(x, training=True)
            loss = self.compute_loss(x, y, found) + keras.losses.KLDivergence()(goal, tf.nn.softmax(found))
        apply(self.optimizer, tape, loss, self.pupil.trainable_variables)
        return self.compute_metrics(x, y, found)


class Conditioned(keras.Model):
    """The compiled loss is of noise, not of y."""

    def __init__(self):
        super().__init__()
        self.table, self.network = keras.layers.Embedding(3, 2), two_layers(4, 6)

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss(x, self.network(tf.concat([0.5 * x, self.table(y)], axis=1)))
        apply(self.optimizer, tape, loss, self.trainable_variables)
        return {"noise": loss}

    def test_step(self, data):
        return {"noise": tf.reduce_mean(data[0])}


class Tracked(keras.Model):
    """Returns a metric object's result."""

    def __init__(self):
        super().__init__()
        self.network, self.seen = two_layers(4, 6), keras.metrics.Mean(name="seen")

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(x - self.network(x)))
        apply(self.optimizer, tape, loss, self.network.trainable_variables)
        self.seen.update_state(loss)
        return {"seen": self.seen.result()}


class Weighed(keras.Model):
    """Unpacks sample weights, and branches on a tensor."""

    def __init__(self):
        super().__init__()
        self.network = two_layers(4, 3)

    def train_step(self, data):
        x, y, weight = data
        with tf.GradientTape() as tape:
            found = self.network(x)
            each = keras.losses.sparse_categorical_crossentropy(y, found, from_logits=True)
            loss = tf.reduce_sum(each * weight) / tf.reduce_sum(weight)
            loss = tf.cond(loss > 0.5, lambda: 0.5 * loss, lambda: loss)
        apply(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss, "examples": tf.shape(x)[0]}


class Named(keras.Model):
    """Features and labels by name."""

    def __init__(self):
        super().__init__()
        self.left, self.right = keras.layers.Dense(3), keras.layers.Dense(3)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self.left(x["left"]) + self.right(x["right"])
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y["kind"], found, from_logits=True))
        apply(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


class Documented(keras.Model):
    """As in Keras's guide; its metrics are compiled, and of another output than call's."""

    def __init__(self):
        super().__init__()
        self.features, self.head = two_layers(5, 4), keras.layers.Dense(3)

    def call(self, x):
        return self.features(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self.head(self(x, training=True))
            loss = self.compute_loss(y=y, y_pred=found)
        apply(self.optimizer, tape, loss, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, found)
        return {metric.name: metric.result() for metric in self.metrics}


class Labelled(Pair):
    """A conditional GAN that multiplies floats by labels as they come, integers."""

    def train_step(self, data):
        real, labels = data
        return super().train_step(real * labels[:, None])


class InReplica(Pair):
    """Cannot be traced outside of a replica, as what calls all_reduce with several ones."""

    def train_step(self, real):
        if tf.compat.v1.get_default_graph().name == "first_use":
            raise ValueError("no replica")
        return super().train_step(real)


class Wrong(Tracked):
    def train_step(self, x):
        super().train_step(x)
        return self.network(x)


class Idle(Tracked):
    """Has an optimizer that its step never uses."""

    def __init__(self):
        super().__init__()
        self.spare = keras.optimizers.Adam(name="spare")


ACCURACY = "sparse_categorical_accuracy"


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def made(kind, *arguments, **settings):
    model = kind()
    model.compile(*arguments, **settings)
    return model


def codes():
    return made(Codes, keras.optimizers.Adam(0.01))


def pair():
    return made(Pair, keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))


def labelled():
    return made(Labelled, keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))


def in_replica():
    model = made(InReplica, keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
    model.judge.build((None, 6))
    model.maker.build((None, 3))
    return model


def pupil():
    return made(Pupil, keras.optimizers.SGD(0.1), loss=crossentropy(), metrics=[ACCURACY])


def conditioned():
    return made(Conditioned, "rmsprop", loss=keras.losses.MeanSquaredError())


def tracked():
    return made(Tracked, "sgd")


def weighed():
    return made(Weighed, "adam")


def named():
    return made(Named, "adam")


def documented():
    return made(Documented, "adam", loss=crossentropy(), metrics=[ACCURACY])


def wrong():
    return made(Wrong, "sgd")


def idle():
    return made(Idle, "sgd")
'''

# Built as the others are, or by day on two replicas.
NIGHTLY = frozenset({"codes", "pupil", "conditioned", "tracked", "weighed"})
# The form of the data of each model.
FORMS = {
    "codes": "alone",
    "pair": "alone",
    "pupil": "plain",
    "conditioned": "plain",
    "tracked": "alone",
    "weighed": "weighted",
    "named": "dicts",
    "documented": "plain",
}


BATCHES, SIZE = 3, 8


def batches_of(form: str) -> list[Any]:
    """Batches as a dataset yields them: x, or a tuple."""
    examples = list(load(form, BATCHES * SIZE))
    rows = [examples[start : start + SIZE] for start in range(0, len(examples), SIZE)]
    return [tf.nest.map_structure(lambda *values: np.stack(values), *row) for row in rows]


@pytest.mark.parametrize(
    "build", [pytest.param(build, marks=pytest.mark.nightly) if build in NIGHTLY else build for build in FORMS]
)
def test_own_step_trains_as_in_fit(tmp_path: Path, build: str) -> None:
    lab, form = lab_of(tmp_path, MODELS), FORMS[build]
    state = built(lab, spec_of(build, form=form))
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    with keras_seeds_from(random.Random(0)):  # as a run has them
        other: Any = load_function(f"model.py:{build}", lab.code)()
    batches = batches_of(form)
    tuples = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    step = build_train_step(state.model, tuples[0], 1, reference=build, draws=state.draws)
    once = tf.function(lambda *parts: run_train_step(step, parts, state.draws)[0])
    for batch in tuples:
        once(*tf.nest.map_structure(tf.constant, batch))
    sequence = iter([tf.nest.map_structure(tf.constant, batch) for batch in batches])
    train = other.make_train_function() or other.train_function
    for _ in batches:
        train(sequence)
    assert len(other.weights) >= 4
    for mine, theirs in zip(state.model.weights, other.weights, strict=True):
        assert np.allclose(mine.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6), mine.path


@pytest.mark.parametrize(
    ("build", "words"),
    [
        ("wrong", ["train_step returned a ", "Tensor", "return a dict of what to log"]),
        (
            "labelled",
            ["model.py, line ", "real * labels[:, None]", "train_step cannot be traced: ", "int64"],
        ),
        ("in_replica", ["ValueError: no replica", "hint: call build(variables) of model."]),
        (
            "idle",
            ["optimizer spare of the model is not built (model.spare)", "or remove it if train_step does not use it"],
        ),
    ],
)
def test_step_that_cannot_run_is_refused(tmp_path: Path, build: str, words: list[str]) -> None:
    PROCESS_STATE.forget()
    lab = lab_of(tmp_path, MODELS)
    spec = spec_of(build, form="plain" if build == "labelled" else "alone", data__validation_fraction=0.0)
    with pytest.raises(ModelError) as refused:
        lab.begin(spec)
    assert [word for word in words if word not in str(refused.value)] == [], str(refused.value)
    assert build != "labelled" or "build(" not in str(refused.value)  # that would not help


def cut_runs(folder: str, replicas: int) -> dict[str, Any]:
    """Rows, notes and differences of a straight run and a cut one; "pupil" is trained straight only."""
    lab, compared = lab_of(Path(folder), MODELS), {}
    for build in ("pair", "pupil"):
        spec = spec_of(build, form=FORMS[build], replicas=replicas, data__validation_fraction=0.0)
        start = lab.begin(spec).tip
        assert start is not None
        straight, cut = lab.train(spec, start, 9), []
        if build == "pair":
            cut = [lab.train(spec, start, 3)]
            assert cut[0].staged is not None
            PROCESS_STATE.forget()
            cut.append(lab.train(spec, cut[0].staged, 9))
            assert differing(*(lab.tensors(spec, each.staged) for each in (straight, cut[-1]))) == []
            assert rows_of(cut) == rows_of([straight])
        compared[build] = {
            "rows": [row.model_dump() for row in rows_of([straight])],
            "notes": [
                event.text
                for event in lab.recorder.events
                if isinstance(event, Note) and f":{build}: train_step computes" in event.text
            ],
        }
    return compared


COUNTING = """
def count():
    sums = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    return tf.Variable(0.0, trainable=False, **sums)


class Seen(keras.layers.Layer):
    def build(self, shape):
        self.calls = count()

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


class Counting(keras.Model):
    def __init__(self):
        super().__init__()
        self.seen, self.first, self.last, self.steps = Seen(), keras.layers.Dense(4), keras.layers.Dense(6), count()

    def train_step(self, x):
        with tf.GradientTape() as tape:
            code = self.first(self.seen(x))
            self.steps.assign_add(0.5)
            self.steps.assign_sub(-0.5)
            loss = tf.reduce_mean(tf.square(x - self.last(code)))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return {"loss": loss, "steps": self.steps}


def counting():
    model = Counting()
    model.compile("sgd")
    return model


def counted():
    model = keras.Sequential([keras.Input((6,)), Seen(), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


def sums_of_replicas(folder: str, replicas: int) -> dict[str, Any]:
    (code := Path(folder) / str(replicas)).mkdir()
    lab, found = lab_of(code, COUNTING), {}
    for build, form in (("counting", "alone"), ("counted", "plain")):
        spec = spec_of(build, form=form, replicas=replicas, data__validation_fraction=0.0)
        start = lab.begin(spec).tip
        assert start is not None
        end = lab.train(spec, start, 4).staged
        assert end is not None
        for step, ref in (("begin", start), ("end", end)):
            held = lab.tensors(spec, ref).items()
            sums = [np.frombuffer(value[2], np.float32) for key, value in held if "/calls" in key]
            found[f"{build} {step}"] = float(np.sum(sums))
        PROCESS_STATE.forget()
    return found


def on_two_replicas(folder: str) -> list[Any]:
    (code := Path(folder) / "unbuilt").mkdir()
    return [cut_runs(str(code), 2), sums_of_replicas(folder, 2)]


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return in_fresh_process(on_two_replicas, folder=str(tmp_path_factory.mktemp("two")))


@pytest.mark.slow
def test_unbuilt_steps_are_exact_on_two_replicas(two_replicas: Any) -> None:
    compared, _ = two_replicas
    names = {"pair": {"judge", "maker"}, "pupil": {"sparse_categorical_accuracy"}}
    for build, found in compared.items():
        assert len(found["rows"]) == 2
        assert all(names[build] <= set(row["metrics"]) for row in found["rows"])
        # Said once for the run, and only where Keras's own step would have averaged.
        assert len(set(found["notes"])) == (0 if build == "pupil" else 1)
        assert all("they are 2 times the mean" in text for text in found["notes"])


@pytest.mark.slow
def test_sums_of_replicas_may_be_used_while_a_model_is_built(two_replicas: Any, tmp_path: Path) -> None:
    """What is counted then is the same on any number of replicas; later each replica counts its own."""
    PROCESS_STATE.forget()
    one, (_, two) = sums_of_replicas(str(tmp_path), 1), two_replicas
    for build in ("counting", "counted"):
        assert one[f"{build} begin"] == two[f"{build} begin"]
        assert one[f"{build} end"] - one[f"{build} begin"] == 4
        assert two[f"{build} end"] - two[f"{build} begin"] == 8
