"""A value that the model cannot be trained on is refused before step 0, with its example and the model's outputs."""

from pathlib import Path
from typing import Any

import pytest

from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import ModelError
from tasks.init_or_restore.model_requirements import extremes_of, require_extremes
from tests.support.lab import Lab, built, lab_of, spec_of

MODELS = """
def of(inputs, outputs, loss, kind=keras.Model, metrics=None):
    model = kind(inputs, outputs)
    model.compile("sgd", loss, metrics=metrics)
    return model


def classifier(loss="sparse_categorical_crossentropy", settings=None, kind=keras.Model):
    if settings is not None:
        loss = keras.losses.SparseCategoricalCrossentropy(**settings)
    x = keras.Input((2,))
    y = keras.layers.BatchNormalization()(x)
    return of(x, keras.layers.Dense(3, "softmax")(y), loss, kind, ["accuracy"])


def regression(loss="mse"):
    x = keras.Input((2,))
    return of(x, keras.layers.Dense(1, "sigmoid")(x), loss)


class Shifted(keras.Model):
    def train_step(self, data):
        x, y = data
        return super().train_step((x, y - 1))

    def test_step(self, data):
        x, y = data
        return super().test_step((x, y - 1))


def shifted():
    return classifier(kind=Shifted)


def two_outputs():
    x = keras.Input((2,))
    outputs = {"a": keras.layers.Dense(5)(x), "b": keras.layers.Dense(3, "softmax")(x)}
    return of(x, outputs, {"a": "mse", "b": "sparse_categorical_crossentropy"})


def tokens(rows=10):
    x = keras.Input((4,), dtype="int32")
    return of(x, keras.layers.Dense(3)(keras.layers.Flatten()(keras.layers.Embedding(rows, 2)(x))), "mse")


def tagger():
    x = keras.Input((4,), dtype="int32")
    y = keras.layers.Dense(3, "softmax")(keras.layers.Embedding(10, 2)(x))
    return of(x, y, keras.losses.SparseCategoricalCrossentropy(ignore_class=-100))
"""
DATA = """
import numpy as np


def load(form="label", bad=0, dtype="int64"):
    for number in range(40):
        x, y = np.float32([number % 3, 1]), number % 3
        value = bad if number == 17 else y
        token = np.int32([1, bad if number == 17 else 2, 3, 4])
        yield {
            "label": lambda: (x, np.dtype(dtype).type(value)),
            "two": lambda: (x, {"a": np.zeros(5, "f4"), "b": np.int64(value)}),
            "tokens": lambda: (token, np.zeros(3, "f4")),
            "tags": lambda: (np.int32([1, 2, 3, 4]), np.int32([0, 1, value, -100])),
        }[form]()


def good():
    yield from load()


def bad():
    yield from load(bad=3)


def shift(example, *, seed):
    x, y = example
    return x, y - 1
"""


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    lab = lab_of(tmp_path, MODELS)
    (lab.code / "data.py").write_text(DATA, encoding="utf-8")
    return lab


def spec(build: str, *, form: str = "label", bad: float = 0, dtype: str = "int64", **changes: Any) -> RunSpec:
    options = {"form": form, "bad": bad, "dtype": dtype}
    return spec_of(build, run="run", data__options=options, train__global_batch_size=4, **changes)


CLASSES = "and the loss of model.py:classifier, whose output is float32[batch, 3], cannot be computed with it: "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "words"),
    [
        (spec("classifier", bad=3), ["data.py:load, example 17: y is 3", CLASSES, "= 3 is not in [0, 3)"]),
        (spec("classifier", bad=-1), ["example 17: y is -1", "= -1 is not in [0, 3)"]),
        (spec("classifier", bad=200, dtype="uint8"), ["example 17: y is 200"]),
        (spec("classifier", bad=7, dtype="float32"), ["example 17: y is 7.0"]),
        (spec("classifier", bad=3, data__validation_fraction=0.6), ["example 17: y is 3"]),
        (spec("classifier", bad=3, accelerator__replicas=1, model__options={"settings": {}}), ["y is 3"]),
        (spec("classifier", bad=9, model__options={"settings": {"ignore_class": 255}}), ["example 17: y is 9"]),
        (spec("two_outputs", form="two", bad=4), ["y/b is 4", "float32[batch, 5], float32[batch, 3]"]),
        (spec("tokens", form="tokens", bad=10), ["example 17: x is 10, which model.py:tokens cannot take", "[0, 10)"]),
        (spec("tokens", form="tokens", bad=-11), ["x is -11", "Embedding(input_dim=...)"]),
        (spec("tagger", form="tags", bad=5), ["example 17: y is 5", "float32[batch, 4, 3]"]),
    ],
    ids=lambda value: f"{value.model.build} {value.data.options}" if isinstance(value, RunSpec) else "",
)
def test_value_out_of_range_is_refused_before_step_0(lab: Lab, run: RunSpec, words: list[str]) -> None:
    with pytest.raises(ModelError) as refused:
        lab.begin(run)
    assert [word for word in words if word not in str(refused.value)] == [], str(refused.value)
    assert not (lab.root / "storage" / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        spec("classifier", bad=2),
        spec("classifier", bad=255, model__options={"settings": {"ignore_class": 255}}),
        spec("regression", bad=1_000_000),
        spec("regression", bad=2, model__options={"loss": "binary_crossentropy"}),
        spec("shifted", bad=3),
        spec("classifier", bad=3, data__transform="data.py:shift", data__validation_transform="data.py:shift"),
        spec("tokens", form="tokens", bad=9),
        spec("tagger", form="tags", bad=2),
    ],
    ids=lambda run: f"{run.model.build} {run.data.options}",
)
def test_other_values_are_taken(lab: Lab, run: RunSpec) -> None:
    assert lab.begin(run).tip is not None


def test_own_sets_and_mixtures_are_looked_at(lab: Lab) -> None:
    for changes in (
        {"data": {"source": "data.py:good", "test": "data.py:bad"}},
        {"data": {"sources": [{"source": "data.py:good"}, {"source": "data.py:bad"}]}},
    ):
        run = spec_of("classifier", run="run", train__global_batch_size=4)
        run = RunSpec.model_validate({**run.model_dump(mode="json", exclude_defaults=True), **changes})
        with pytest.raises(ModelError, match=r"data\.py:bad, example 17: y is 3"):
            lab.begin(run)


def test_trying_values_leaves_the_state_as_it_is(lab: Lab) -> None:
    run = spec("classifier", bad=2)
    state, dataset = built(lab, run), lab.prepare(run)
    before = state.digest().root
    tried = list(extremes_of(run, dataset, lab.storage))
    assert [value.value for value in tried[0][1]] == [0, 1, 2]
    require_extremes(state, tried, reference="model.py:classifier", size=4)
    assert state.digest().root == before
