"""A value that the model cannot be trained on is refused before step 0, with its example and the model's outputs."""

from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import ModelError
from baton.tasks.init_or_restore.model_requirements import extremes_of, require_extremes
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


def two_columns(users=5):
    x = keras.Input((2,), dtype="int64")
    user, movie = keras.layers.Embedding(users, 4)(x[:, 0]), keras.layers.Embedding(50, 4)(x[:, 1])
    return of(x, keras.layers.Dot(1)([user, movie]), "mse")


class Recommender(keras.Model):  # https://keras.io/examples/structured_data/collaborative_filtering_for_movielens/
    def __init__(self, users, movies, size):
        super().__init__()
        settings = {"embeddings_initializer": "he_normal", "embeddings_regularizer": keras.regularizers.l2(1e-6)}
        self.user_embedding = keras.layers.Embedding(users, size, **settings)
        self.user_bias = keras.layers.Embedding(users, 1)
        self.movie_embedding = keras.layers.Embedding(movies, size, **settings)
        self.movie_bias = keras.layers.Embedding(movies, 1)

    def call(self, inputs):
        user_vector, user_bias = self.user_embedding(inputs[:, 0]), self.user_bias(inputs[:, 0])
        movie_vector, movie_bias = self.movie_embedding(inputs[:, 1]), self.movie_bias(inputs[:, 1])
        return ops.sigmoid(ops.tensordot(user_vector, movie_vector, 2) + user_bias + movie_bias)


def recommender():
    model = Recommender(5, 50, 4)
    model.compile(loss=keras.losses.BinaryCrossentropy(), optimizer=keras.optimizers.Adam(learning_rate=0.001))
    return model


def two_labels():
    x = keras.Input((2,))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return of(x, keras.layers.Dense(50)(x), lambda y, p: loss(y[:, 0], p[:, :5]) + loss(y[:, 1], p))


def shared_rows():
    # The table has rows of the second kind only behind those of the first.
    x = keras.Input((2,), dtype="int64")
    rows = keras.layers.Embedding(60, 4)(x[:, 1] - 40 * ops.cast(ops.equal(x[:, 0], 4), "int64"))
    return of(x, keras.layers.Dense(1)(rows), "mse")


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
            "pair": lambda: (np.int64([number % 5, bad if number == 17 else number]), np.float32(number % 2)),
            "kinds": lambda: (np.int64([4, 90] if number == 17 else [number % 4, number]), np.float32(number % 2)),
            "classes": lambda: (x, np.int64([number % 5, bad if number == 17 else number])),
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


def at_night(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


CLASSES = "and the loss of model.py:classifier, whose output is float32[batch, 3], cannot be computed with it: "


def id_of(value: Any) -> str:
    return f"{value.model.build} {value.data.options}" if isinstance(value, RunSpec) else ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "words"),
    [
        (spec("classifier", bad=3), ["data.py:load, example 17: y is 3", CLASSES, "= 3 is not in [0, 3)"]),
        at_night(spec("classifier", bad=-1), ["example 17: y is -1", "= -1 is not in [0, 3)"]),
        at_night(spec("classifier", bad=200, dtype="uint8"), ["example 17: y is 200"]),
        at_night(spec("classifier", bad=7, dtype="float32"), ["example 17: y is 7.0"]),
        (spec("classifier", bad=3, data__validation_fraction=0.6), ["example 17: y is 3"]),
        at_night(spec("classifier", bad=3, model__options={"settings": {}}), ["y is 3"]),
        (spec("classifier", bad=9, model__options={"settings": {"ignore_class": 255}}), ["example 17: y is 9"]),
        (spec("two_outputs", form="two", bad=4), ["y/b is 4", "float32[batch, 5], float32[batch, 3]"]),
        (spec("tokens", form="tokens", bad=10), ["example 17: x is 10, which model.py:tokens cannot take", "[0, 10)"]),
        at_night(spec("tokens", form="tokens", bad=-11), ["x is -11", "Embedding(input_dim=...)"]),
        (
            spec("two_columns", form="pair", bad=50),
            ["17: x is 50, which model.py:two_columns cannot take as x[1]", "50)"],
        ),
        (
            spec("two_columns", form="pair", bad=9, model__options={"users": 4}),
            ["x is 39", "cannot take with the rest of its example: ", "= 4 is not in [0, 4)"],
        ),
        (
            spec("two_labels", form="classes", bad=50),
            ["example 17: y is 50", "cannot be computed with it as y[1]: ", "[0, 50)"],
        ),
        (spec("tagger", form="tags", bad=5), ["example 17: y is 5", "float32[batch, 4, 3]"]),
    ],
    ids=id_of,
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
        at_night(spec("classifier", bad=2)),
        spec("classifier", bad=255, model__options={"settings": {"ignore_class": 255}}),
        at_night(spec("regression", bad=1_000_000)),
        spec("regression", bad=2, model__options={"loss": "binary_crossentropy"}),
        spec("shifted", bad=3),
        spec("classifier", bad=3, data__transform="data.py:shift", data__validation_transform="data.py:shift"),
        at_night(spec("tokens", form="tokens", bad=9)),
        spec("tagger", form="tags", bad=2),
        at_night(spec("two_columns", form="pair", bad=49)),
        spec("recommender", form="pair", bad=49),
        at_night(spec("two_labels", form="classes", bad=49)),
        spec("shared_rows", form="kinds"),
    ],
    ids=id_of,
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
