"""Training on data as `fit` takes it: lists, weights for each output, and text reach the model with their structure."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.foundation.errors import ModelError
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


def grouped():
    return {"left": a, "user_id": np.arange(40) % 8}, p


def left_alone(example, *, seed):
    x, y = example
    return x["left"], y


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
