"""Training on data as `fit` takes it: lists, weights for each output, and text reach the model with their structure."""

import re
import runpy
import shutil
import struct
import textwrap
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.flows.opened_run import OpenedRun
from baton.flows.result import Goal
from baton.flows.train import train
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import ModelError, SourceError
from tests.support.event_recorder import EventRecorder
from tests.support.lab import Lab, in_fresh_process, lab_of, spec_of
from tests.support.watched_relay import command

MODEL = """
def _outputs(h, one, two):
    return keras.layers.Dense(1, name=one)(h), keras.layers.Dense(2, name=two)(h)


def lists():
    inputs = [keras.Input((3,)), keras.Input((3,))]
    p, q = _outputs(keras.layers.Concatenate()(inputs), "p", "q")
    model = keras.Model(inputs, [p, q])
    loss = ["mse", keras.losses.SparseCategoricalCrossentropy(from_logits=True)]
    model.compile("adam", loss, weighted_metrics=[["mae"], ["accuracy"]])
    return model


def named():
    inputs = {"left": keras.Input((3,), name="left"), "city": keras.Input((1,), dtype="string", name="city")}
    city = keras.layers.StringLookup(vocabulary=["a", "b", "dä"], output_mode="one_hot")(inputs["city"])
    p, q = _outputs(keras.layers.Concatenate()([inputs["left"], city]), "p", "q")
    model = keras.Model(inputs, {"p": p, "q": q})
    model.compile("adam", {"p": "mse", "q": keras.losses.SparseCategoricalCrossentropy(from_logits=True)})
    return model


def grouped():
    inputs = {"left": keras.Input((3,), name="left")}
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs["left"]))
    model.compile("adam", "mse")
    return model


def grouped_alone():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


class Own(keras.Model):
    # Its step broadcasts labels and predictions, so their shapes and dtypes decide its loss.
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.last = keras.layers.Dense(1)
        self.mean = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean]

    def call(self, x):
        parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else [x]
        return self.last(self.hidden(keras.ops.concatenate([keras.ops.cast(each, "float32") for each in parts], -1)))

    def train_step(self, data):
        x, y, w = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            squares = keras.ops.square(predicted if y is None else predicted - y)
            loss = keras.ops.mean(squares if w is None else squares * w)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}


def own():
    model = Own()
    model.compile(keras.optimizers.SGD(0.05))
    return model


def alone():
    inputs = [keras.Input((3,)), keras.Input((3,))]
    outputs = keras.layers.Dense(1)(keras.layers.Subtract()(inputs))
    model = Alone(inputs, outputs)
    model.compile("sgd")
    return model


class Alone(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        assert y is None
        return keras.ops.mean(keras.ops.square(y_pred - 1))


def stateful():
    layers = [keras.Input(batch_shape=(8, 2, 1)), keras.layers.LSTM(3, stateful=True), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def words():
    inputs = keras.Input((1,), dtype="string")
    ids = keras.layers.TextVectorization(vocabulary=["a", "b", "c"], output_sequence_length=4)(inputs)
    h = keras.layers.Flatten()(keras.layers.Embedding(5, 3)(ids))
    model = keras.Model(inputs, keras.layers.Dense(1)(h))
    model.compile("adam", "mse")
    return model
"""
DATA = """
import numpy as np
import pandas as pd
import tensorflow as tf

draw = np.random.default_rng(0)
a, b = draw.normal(size=(2, 40, 3)).astype("float32")
p, q = draw.normal(size=(40, 1)).astype("float32"), draw.integers(0, 2, 40)
w = draw.uniform(size=40).astype("float32")
t = np.array(["a", "b", "c", "dä"] * 10)[:, None]


def lists():
    return [a, b], [p, q], [w, 2 * w]


def named():
    return {"left": a, "city": t}, {"p": p, "q": q}, {"p": w, "q": 1 - w}


def grouped():
    return {"left": a, "user_id": np.arange(40) % 8}, p


def left_alone(example, *, seed):
    x, y = example
    return x["left"], y


def series_of_weights():
    return b, pd.Series(p[:, 0]), pd.Series(w.astype("float64"))


def pairs():
    for left, right, label in zip(a, b, p):
        yield [left, right], label


def pairs_for_fit():
    return (a, b), p


def alone():
    for left, right in zip(a, b):
        yield [left, right]


def alone_for_fit():
    return ((a, b),)


def stateful():
    steps = np.sin(np.arange(80) / 3).reshape(40, 2, 1)
    return steps, np.roll(steps[:, 0], -1)


def words():
    return tf.data.Dataset.from_tensor_slices((t, p)).map(lambda text, p: (text + " b", p)).batch(7)
"""
FORMS = ("lists", "named")


def lab_at(root: Path) -> Lab:
    lab = lab_of(root, MODEL)
    (lab.code / "data.py").write_text(DATA, encoding="utf-8")
    return lab


def spec(form: str, run: str, **changes: Any) -> Any:
    return spec_of(form, run=run, data__options={}, data__source=f"data.py:{form}", **changes)


def losses_of_fit(lab: Lab, of: Any) -> list[float]:
    """The losses of plain `keras.Model.fit` on the batches that the run trained on, from the same weights."""
    import keras

    from baton.tasks.foundation.dataset.read import training_dataset
    from tests.support.lab import built

    model = built(lab, of).model
    batches = training_dataset(
        lab.storage, lab.prepare(of), seed=0, global_batch_size=8, window_shards=8, first_batch=0
    )
    found: list[float] = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: found.append(float(logs["loss"])))
    model.fit(batches, epochs=9, steps_per_epoch=1, verbose=0, callbacks=[keep])
    return found


@pytest.mark.parametrize(
    "form", ["lists", pytest.param("named", marks=pytest.mark.slow), pytest.param("words", marks=pytest.mark.nightly)]
)
def test_losses_are_those_of_fit_however_it_is_cut(form: str, tmp_path: Path) -> None:
    lab = lab_at(tmp_path)
    of, cut = (spec(form, run, train__log_every_steps=1) for run in ("straight", "cut"))
    head = lab.begin(of)
    assert head.tip is not None
    straight = lab.train(of, head.tip, 9)
    losses = [row.metrics["loss"] for row in straight.history]
    np.testing.assert_allclose(losses, losses_of_fit(lab, of), rtol=1e-5)
    assert straight.staged is not None
    assert np.isfinite(lab.evaluate(of, straight.staged)["loss"])
    if form != "lists":  # one structure is cut
        tip = lab.relay(cut, 4, 9, cold=True).tip
        assert tip is not None
        assert straight.staged.state_digest == tip.state_digest


# Rows of a table: what load gives, and its model. test_arrays_as_fit.py compares the arrays of more forms.
IN_ORDER = {"series_of_weights": "own", "pairs": "own", "alone": "alone", "stateful": "stateful"}
AT_NIGHT = {"pairs", "alone"}


def in_order(form: str, run: str, **changes: Any) -> Any:
    keys: dict[str, Any] = {"data__shuffle": False, "data__validation_fraction": 0, "train__log_every_steps": 1}
    keys |= {"model": f"model.py:{IN_ORDER[form]}"}
    return spec(form, run, **keys | changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [pytest.param(each, marks=[pytest.mark.nightly] * (each in AT_NIGHT)) for each in IN_ORDER]
)
def test_losses_are_those_of_fit_on_what_load_gives(form: str, tmp_path: Path) -> None:
    """Without shuffling, each step sees the rows that it sees in Keras alone, in each epoch."""
    import keras

    from tests.support.lab import built

    lab = lab_at(tmp_path)
    of = in_order(form, "straight")
    head = lab.begin(of)
    assert head.tip is not None
    straight = lab.train(of, head.tip, 10)
    losses = [row.metrics["loss"] for row in straight.history]
    code = runpy.run_path(str(lab.code / "data.py"))
    given = code.get(f"{form}_for_fit", code[form])()
    found: list[float] = []

    class EachStep(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            self.model.reset_metrics()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            found.append(float(logs["loss"]))

    x, y, weights = (*given, None, None)[:3]
    built(lab, of).model.fit(
        x, y, sample_weight=weights, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[EachStep()]
    )
    np.testing.assert_allclose(losses, found, rtol=1e-5)
    if form == "stateful":  # the state of its layer and the position in the rows survive a cut
        assert straight.staged is not None
        cut = lab.relay(in_order(form, "cut"), 7, 10, cold=True).tip
        assert cut.state_digest == straight.staged.state_digest


def test_stateful_layer_on_shuffled_examples_is_warned_of(tmp_path: Path) -> None:
    lab = lab_at(tmp_path)
    lab.begin(in_order("stateful", "kept"))
    assert lab.recorder.warnings == []
    lab.begin(in_order("stateful", "shuffled", data__shuffle=True))
    (warning,) = lab.recorder.warnings
    assert warning.startswith("lstm: stateful=True")
    assert "data.shuffle: false" in warning


def train_on_two_replicas(root: str) -> list[str]:
    lab = lab_at(Path(root))
    digests = []
    for form in FORMS:
        tip = lab.relay(spec(form, form, replicas=2), 4).tip
        assert tip is not None
        digests.append(tip.state_digest)
    return digests


@pytest.mark.slow
def test_forms_train_on_two_replicas(tmp_path: Path) -> None:
    assert len(set(in_fresh_process(train_on_two_replicas, root=str(tmp_path)))) == len(FORMS)


SPLIT: dict[str, Any] = {"data__split_by": "user_id", "data__validation_fraction": 0.4}


def test_feature_of_split_by_need_not_be_an_input(tmp_path: Path) -> None:
    """As in `fit`, a functional model takes the inputs that it names from a dict."""
    lab = lab_at(tmp_path)
    of = spec("grouped", "split", **SPLIT)
    tip = lab.relay(of, 4).tip
    assert tip is not None
    assert np.isfinite(lab.evaluate(of, tip)["loss"])


@pytest.mark.slow
def test_transform_drops_the_feature_of_split_by(tmp_path: Path) -> None:
    """A model with another structure of inputs is refused before its data is written."""
    lab = lab_at(tmp_path)
    alone = {"model": "model.py:grouped_alone", **SPLIT}
    with pytest.raises(ModelError, match=r"does not take a batch of x .*user_id"):
        command(lab, spec("grouped", "refused", **alone))
    assert not list(lab.storage.files("datasets"))
    dropped = dict.fromkeys(("data__transform", "data__validation_transform"), "data.py:left_alone")
    result = command(lab, spec("grouped", "dropped", **alone, **dropped, train__steps=4))
    assert np.isfinite(result.metrics["validation_loss"])


RUN = """
run: first
storage: ./runs
data:
  source: data.py:load
model: model.py:build_model
train: {steps: 4, global_batch_size: 8}
accelerator: {kind: cpu}
"""
OWN_MODEL = """
import keras


def build_model():
    model = keras.Sequential([keras.layers.Rescaling(0.01), keras.layers.Flatten(), keras.layers.Dense(2, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
"""
ARRAYS = """
import keras
import numpy as np

draw = np.random.default_rng(0)
x, y = draw.normal(size=(40, 3)), draw.integers(0, 2, 40)
"""
# What people have for `fit`, and how many changes Baton needs.
FOR_FIT: dict[str, tuple[str, int]] = {
    "numpy with a validation tuple": ("    return (x[:30], y[:30]), (x[30:], y[30:])\n", 1),
    "an image folder": (
        '    return keras.utils.image_dataset_from_directory("pictures", image_size=(8, 8), batch_size=4, seed=0)\n',
        0,
    ),
}


def png(value: int) -> bytes:
    """A grey image of 9 x 9 pixels, without TensorFlow, whose devices a run sets up first."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress((b"\0" + bytes([value]) * 9) * 9)
    header = struct.pack(">IIBBBBB", 9, 9, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def as_told(folder: Path, message: str) -> None:
    """Make the change that a message says, by its lines."""
    found = re.search(r"rename (\w+) to (\w+) in data.py, and paste below it:\n", message)
    assert found is not None
    code = (folder / "data.py").read_text("utf-8").replace(f"def {found[1]}(", f"def {found[2]}(")
    pasted = textwrap.dedent(message.partition("paste below it:\n")[2].partition("\n  and name")[0])
    (folder / "data.py").write_text(f"{code}\n\n{pasted}\n", encoding="utf-8")
    named = message.partition("in place of source and validation_fraction:\n")[2].partition("\nhint: ")[0]
    text = (folder / "run.yaml").read_text("utf-8").replace("  source: data.py:load", named.replace("    ", "  "))
    (folder / "run.yaml").write_text(text, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("form", FOR_FIT)
def test_data_for_fit_needs_this_many_changes(form: str, tmp_path: Path) -> None:
    body, most = FOR_FIT[form]
    folder = tmp_path / "0"
    for number in range(200):  # more than TensorFlow's threads read ahead
        file = folder / "pictures" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(number))
    for name, text in {"run.yaml": RUN, "model.py": OWN_MODEL, "data.py": f"{ARRAYS}\n\ndef load():\n{body}"}.items():
        (folder / name).write_text(text, encoding="utf-8")
    for changes in range(most + 1):
        run = OpenedRun.open(load_run_file(folder / "run.yaml"))
        if changes == most:
            break
        with pytest.raises(SourceError) as refused:
            train(run, Goal.of(run.spec), telemetry=EventRecorder())
        assert refused.value.exit_code == 2
        # Another folder, because a process imports a module once.
        folder = shutil.copytree(folder, tmp_path / str(changes + 1), ignore=shutil.ignore_patterns("__pycache__"))
        as_told(folder, str(refused.value))
    result = train(run, Goal.of(run.spec), telemetry=EventRecorder())
    assert result.step == 4
    assert np.isfinite(result.metrics["validation_loss"])
