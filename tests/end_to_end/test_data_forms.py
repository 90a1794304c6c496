"""Training on data as `fit` takes it: lists, weights for each output, and text reach the model with their structure."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.lab import Lab, in_fresh_process, lab_of, spec_of

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


def words():
    return tf.data.Dataset.from_tensor_slices((t, p)).map(lambda text, p: (text + " b", p)).batch(7)
"""
FORMS = ("lists", "named", "words")


def lab_at(root: Path) -> Lab:
    lab = lab_of(root, MODEL)
    (lab.code / "data.py").write_text(DATA, encoding="utf-8")
    return lab


def spec(form: str, run: str, **changes: Any) -> Any:
    return spec_of(form, run=run, data__options={}, data__source=f"data.py:{form}", **changes)


def losses_of_fit(lab: Lab, of: Any) -> list[float]:
    """The losses of plain `keras.Model.fit` on the batches that the run trained on, from the same weights."""
    import keras

    from tasks.foundation.dataset.reader import training_dataset
    from tests.support.lab import built

    model = built(lab, of).model
    batches = training_dataset(
        lab.storage, lab.prepare(of), seed=0, global_batch_size=8, window_shards=8, first_batch=0
    )
    found: list[float] = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: found.append(float(logs["loss"])))
    model.fit(batches, epochs=9, steps_per_epoch=1, verbose=0, callbacks=[keep])
    return found


@pytest.mark.parametrize("form", FORMS)
def test_losses_are_those_of_fit(form: str, tmp_path: Path) -> None:
    lab = lab_at(tmp_path)
    of = spec(form, "losses", train__log_every_steps=1)
    head = lab.begin(of)
    assert head.tip is not None
    rows = lab.train(of, head.tip, 9).history
    np.testing.assert_allclose([row.metrics["loss"] for row in rows], losses_of_fit(lab, of), rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_form_trains_and_a_cut_changes_no_bit(form: str, tmp_path: Path) -> None:
    lab = lab_at(tmp_path)
    straight = lab.relay(spec(form, "straight"), 9).tip
    cut = lab.relay(spec(form, "cut"), 4, 9, cold=True).tip
    assert straight is not None
    assert cut is not None
    assert straight.state_digest == cut.state_digest
    assert np.isfinite(lab.evaluate(spec(form, "straight"), straight)["loss"])


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
