"""A lab with one set of weights in every format, for tests of initial weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.contracts.checkpoint import WeightsReport
from baton.tasks.foundation.contracts.run_spec import InitSpec, RunSpec
from baton.tasks.foundation.errors import WeightsError
from baton.tasks.init_or_restore.weights.loading import load_weights
from tests.support.event_recorder import EventRecorder
from tests.support.lab import Lab, built, lab_of, spec_of

MODEL = """
class Block(keras.layers.Layer):
    def __init__(self, width, **config):
        super().__init__(**config)
        self.first = keras.layers.Dense(width)
        self.others = [keras.layers.Dense(width), keras.layers.Dense(width)]

    def build(self, shape):
        self.scale = self.add_weight(shape=(1,), name="scale", initializer="ones")
        for layer in (self.first, *self.others):
            layer.build(shape)
            shape = layer.compute_output_shape(shape)
        super().build(shape)

    def call(self, x):
        for layer in (self.first, *self.others):
            x = layer(x)
        return x * self.scale


def build(classes=3, head="head", between=False, after=False):
    inner = keras.Input((6,))
    y = keras.layers.Dense(5, name="in")(inner)
    encoder = keras.Model(inner, keras.layers.BatchNormalization(name="norm")(y), name="encoder")
    x = keras.Input((6,))
    y = encoder(x)
    y = keras.Sequential([keras.layers.Dense(5), keras.layers.Dropout(0.5)], name="stack")(y)
    if between:
        y = keras.layers.Dense(5, name="between")(y)
    y = Block(5, name="block")(y)
    y = keras.layers.Dense(classes, name=head)(y)
    if after:
        y = keras.layers.BatchNormalization(name="after")(y)
    model = keras.Model(x, y)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model
"""


SUBCLASSED = """
class KeptOtherwise(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), name="w")

    def call(self, x):
        return x * self.w

    def save_own_variables(self, store):
        store["doubled"] = 2 * self.w.numpy()

    def load_own_variables(self, store):
        self.w.assign(store["doubled"][()] / 2)


class Hidden(keras.layers.Layer):  # Keras does not look into _layers
    def __init__(self, **config):
        super().__init__(name="hidden")
        self._layers = [keras.layers.Dense(6, name="one"), keras.layers.Dense(6, name="two")]

    def call(self, x):
        for layer in self._layers:
            x = layer(x)
        return x


class Omitting(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), name="w")
        self.b = self.add_weight(shape=(shape[-1],), name="b")

    def call(self, x):
        return x * self.w + self.b

    def save_own_variables(self, store):
        store["0"] = self.w

    def load_own_variables(self, store):
        self.w.assign(store["0"])


def lacking(kind, head="head"):
    layer = {"hidden": Hidden, "omitting": Omitting}[kind](name=kind)
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.Dense(3, name=head)(layer(x)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class OwnModel(keras.Model):
    def __init__(self):
        super().__init__(name="own_model")
        self.at_the_root = keras.layers.Dense(4, name="left")  # before `layers`, below which Keras saves the others
        self.stack = [keras.layers.Dense(4, name="one"), keras.layers.Dense(4, name="two")]
        self.named = {"head": keras.layers.Dense(3, name="out")}
        self.otherwise = KeptOtherwise(name="kept_otherwise")

    def call(self, x):
        x = self.at_the_root(x)
        for layer in self.stack:
            x = layer(x)
        return self.named["head"](self.otherwise(x))


def build():
    model = OwnModel()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


WEIGHTS = """
import numpy as np


def load():
    return dict(np.load(__file__.replace("weights.py", "weights.npz")))


def raising():
    raise KeyError("bucket")


def listing():
    return [1.0]


def texts():
    return {"head/bias": "zeros"}
"""


SOURCE = spec_of("build", run="source", train__seed=5)


def weights_lab(folder: Path) -> Lab:
    """Make a lab with one set of weights, saved in every format."""
    lab = lab_of(folder, MODEL)
    state = randomized(lab, SOURCE)
    model, folder = state.model, lab.code
    values = values_of(state)
    for variable in model.optimizer.variables:
        variable.assign(variable + 1)
    model.save_weights(folder / "kept.weights.h5")
    model.save(folder / "kept.keras")
    model.save(folder / "kept.h5")
    model.export(folder / "exported", verbose=False)
    tf.train.Checkpoint(model).write(str(folder / "bare" / "ckpt"))
    tf.train.Checkpoint(step=tf.Variable(7), net=model, opt=model.optimizer).save(str(folder / "graph" / "ckpt"))
    names = [f"model/{path}" for path in values]
    (folder / "named").mkdir()
    tf.raw_ops.SaveV2(
        prefix=str(folder / "named" / "model.ckpt-3"),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=list(values.values()),
    )
    np.savez(folder / "weights.npz", **values)
    (folder / "weights.py").write_text(WEIGHTS)
    head = lab.begin(SOURCE)
    lab.train_and_commit(SOURCE, 3)
    assert head.tip is not None
    return lab


def randomized(lab: Lab, spec: RunSpec) -> Any:
    state = built(lab, spec)
    draw = np.random.default_rng(3)
    for variable in state.model.variables:
        if variable.dtype == "float32":
            variable.assign(draw.normal(size=variable.shape))
    return state


def values_of(state: Any) -> dict[str, Any]:
    return {
        leaf.path.removeprefix("model/"): leaf.components[0].numpy()
        for leaf in state.leaves
        if leaf.path.startswith("model/") and not leaf.seed
    }


STATES: dict[str, tuple[Any, list[tuple[Any, Any]]]] = {}


def fresh(lab: Lab, **options: Any) -> Any:
    """Return a state with initial values; building one takes a second, so each set of options shares one."""
    key = str(options)
    if key not in STATES:
        state = built(lab, spec_of("build", model__options=options))
        STATES[key] = state, [(each, each.numpy()) for leaf in state.leaves for each in leaf.components]
    state, initial = STATES[key]
    for each, value in initial:
        each.assign(value)
    return state


def load(lab: Lab, *sources: Any, recorder: EventRecorder | None = None, **options: Any) -> tuple[Any, WeightsReport]:
    state = fresh(lab, **options)
    init = InitSpec.model_validate({"weights": list(sources)})
    report = load_weights(state, init, code_folder=lab.code, telemetry=recorder or lab.recorder)
    assert report is not None
    return state, report


def refusal(lab: Lab, *sources: Any, **options: Any) -> str:
    with pytest.raises(WeightsError) as refused:
        load(lab, *sources, **options)
    assert refused.value.exit_code == 2
    return str(refused.value)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[path], other[path]) for path in one)


def others_of(state: Any) -> dict[str, Any]:
    return {
        leaf.path: leaf.components[0].numpy()
        for leaf in state.leaves
        if leaf.seed or not leaf.path.startswith("model/")
    }
