"""Which changes of a model's code change a run's identity."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.identity import differences
from baton.tasks.foundation.model.model_identity import model_identity
from tests.support.lab import Lab, built, in_fresh_process, lab_of, spec_of

MODEL = '''
"""A docstring."""

import collections

SCALE = 2.0
RATE = 0.1


def scaled(x):
    return x * SCALE


class Scale(keras.layers.Layer):
    """Scales."""

    def call(self, x):
        # A comment.
        return scaled(x)


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (ops.cast(step, "float32") + 1.0)

    def get_config(self):
        return {}


class Wrong(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(1.0 - ops.max(y_pred, axis=-1))


def own_loss(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


class Base(keras.Model):
    def __init__(self, hidden, helper=None):
        super().__init__()
        self.hidden, self.helper = hidden, helper
        self.out = keras.layers.Dense(3)


class Inherits(Base):
    def call(self, x, training=False):
        return self.out(self.hidden(x))


class Helper:
    pass


def build():
    model = keras.Sequential([keras.Input((6,)), Scale(), keras.layers.Dense(3, activation=lambda x: x * 1.0)])
    model.compile(keras.optimizers.SGD(Falling()), own_loss, metrics=[Wrong()])
    return model


def scaling(scale, names=("a", "b")):
    def scaled_loss(y_true, y_pred, offset=scale):
        return own_loss(y_true, y_pred) * scale + (offset if names else 0.0)

    return scaled_loss


class Outer:
    @staticmethod
    def layer(power):
        class Power(keras.layers.Layer):
            def call(self, x):
                return x**power

        return Power()


def captured():
    model = keras.Sequential([keras.Input((6,)), Outer.layer(2.0), Outer.layer(1.0), keras.layers.Dense(3)])
    model.compile("sgd", scaling(2.0), metrics=[scaling(1.0)])
    return model


Sizes = collections.namedtuple("Sizes", "width depth")
Made = type("Made", (keras.layers.Layer,), {"call": lambda self, x: x * 4.0})
TAGS = (frozenset({"red", "green", "blue", "white", "cyan", "pink", "gray"}), object(), own_loss)


class Sized(keras.layers.Layer):
    def call(self, x):
        return x * Sizes(1.0, len(TAGS)).width


def sourceless():
    model = keras.Sequential([keras.Input((6,)), Made(), Sized(), keras.layers.Dense(3)])
    model.compile("sgd", own_loss)
    return model


def subclass():
    model = Inherits(keras.layers.Dense(4), Helper())
    model.compile(keras.optimizers.SGD(RATE), own_loss)
    return model


def adversaries():
    model = layers.Adversaries()
    maker, judge = keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.02)
    maker.build(model.maker.trainable_variables)
    judge.build(model.judge.trainable_variables)
    model.compile(maker, judge)
    return model
'''


def identity(lab: Lab, build: str = "build") -> dict[str, Any]:
    spec = spec_of(build, form="alone" if build == "adversaries" else "plain")
    return model_identity(built(lab, spec).model, spec.model, lab.code)


Unchanged = tuple[Lab, Callable[[str], dict[str, Any]]]


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Unchanged:
    """The code, and the identity of each of its models."""
    lab = lab_of(tmp_path_factory.mktemp("unchanged"), MODEL)
    return lab, cache(lambda build: identity(lab, build))


HARMLESS = [
    ("# A comment.", "# Another comment,\n        # and one more."),
    ('"""Scales."""', '"""Multiplies."""'),
    ('"""A docstring."""', '"""Another docstring."""'),
    ("def build():", "def unused():\n    pass\n\n\ndef build():"),
    ("x, training=False):", "x, training=False):  # here\n"),
]


@pytest.mark.parametrize("build", ["build", "subclass"])
def test_comments_docstrings_and_folder_do_not_change_identity(
    unchanged: Unchanged, tmp_path: Path, build: str
) -> None:
    lab, of = unchanged
    edits = [edit for edit in HARMLESS if build == "build" or "def build" not in edit[0]]
    moved = edited(lab, tmp_path, *(("model.py", old, new) for old, new in edits))
    assert identity(moved, build) == of(build)


def edited(lab: Lab, folder: Path, *edits: tuple[str, str, str]) -> Lab:
    return lab.copy_of_code(str(folder / "changed"), *edits)


@pytest.mark.parametrize(
    ("build", "old", "new", "key"),
    [
        ("build", "return scaled(x)", "return scaled(x) + 1.0", "model.code.model.Scale"),
        ("build", "return x * SCALE", "return x * SCALE * 1.5", "model.code.model.scaled"),
        ("build", "SCALE = 2.0", "SCALE = 3.0", "model.code.model.scaled"),
        ("build", "lambda x: x * 1.0", "lambda x: x * 1.5", "model.code"),
        ("build", "0.1 / (ops.cast", "0.2 / (ops.cast", "model.code.model.Falling"),
        ("build", "1.0 - ops.max", "2.0 - ops.max", "model.code.model.Wrong"),
        ("build", "return keras.losses.sparse", "return 2.0 * keras.losses.sparse", "model.code.model.own_loss"),
        ("subclass", "self.out = keras.layers.Dense(3)", "self.out = keras.layers.Dense(5)", "model.code.model.Base"),
        ("subclass", "self.out(self.hidden(x))", "self.out(ops.tanh(self.hidden(x)))", "model.code.model.Inherits"),
        ("subclass", "SGD(RATE)", "SGD(RATE / 2)", "compile.optimizer.config.learning_rate"),
        ("captured", "scaling(2.0)", "scaling(3.0)", "model.code.model.scaling.<locals>.scaled_loss"),
        ("captured", "scaling(1.0)", "scaling(3.0)", "model.code.model.scaling.<locals>.scaled_loss"),
        ("captured", '("a", "b")', '("a", "c")', "model.code.model.scaling.<locals>.scaled_loss"),
        ("captured", "Outer.layer(2.0)", "Outer.layer(3.0)", "model.code.model.Outer.layer.<locals>.Power"),
        ("captured", "Outer.layer(1.0)", "Outer.layer(3.0)", "model.code.model.Outer.layer.<locals>.Power"),
        # A class without source is identified by its module.
        ("sourceless", "x * 4.0", "x * 5.0", "model.code.model.Made"),
        ("sourceless", '"width depth"', '"width depth", defaults=(1,)', "model.code.model.Sizes"),
        # An object that Keras cannot serialize is identified by its source.
        ("subclass", "keras.layers.Dense(4)", "keras.layers.Dense(4, activation='relu')", "model.config.source"),
        ("adversaries", "Adam(0.01)", "Adam(0.05)", "compile.other.optimizers.adversaries/maker_optimizer.config"),
        ("adversaries", "RMSprop(0.02)", "RMSprop(0.05)", "compile.optimizer.config.learning_rate"),
    ],
)
def test_changed_computation_changes_identity(
    unchanged: Unchanged, tmp_path: Path, *, build: str, old: str, new: str, key: str
) -> None:
    lab, of = unchanged
    changed = edited(lab, tmp_path, ("model.py", old, new))
    found = [difference.key for difference in differences(of(build), identity(changed, build))]
    assert any(name.startswith(key) for name in found), found


def test_sibling_module_changes_identity(unchanged: Unchanged, tmp_path: Path) -> None:
    lab, of = unchanged
    edit = ("layers.py", "ops.mean(ops.softplus(-self.judge(made)))", "ops.mean(made)")
    changed = edited(lab, tmp_path, edit)
    found = [str(each) for each in differences(of("adversaries"), identity(changed, "adversaries"))]
    assert [text.partition(":")[0] for text in found] == ["model.code.layers.Adversaries"]


def code_of(folder: str) -> list[Any]:
    return [hash("red"), identity(lab_of(Path(folder), MODEL), "sourceless")["model.code"]]


@pytest.mark.slow
def test_constants_have_the_same_digest_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "other").mkdir()
    (one, mine), (other, theirs) = (
        code_of(str(tmp_path / "own")),
        in_fresh_process(code_of, folder=str(tmp_path / "other")),
    )
    assert one != other, "sets have another order there"
    assert mine == theirs
    assert "model.Sized" in mine


SHAPES = """
class Lazy(keras.Model):
    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()])
        self.out = keras.layers.Dense(3)

    def call(self, x, training=False):
        return self.out(self.body(x, training=training))


def compiled(model):
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def lazy_sequential():
    return compiled(keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(3)]))


def lazy_subclass():
    return compiled(Lazy())


def sized(size=8):
    return compiled(keras.Sequential([keras.Input((6,), batch_size=size), keras.layers.Dense(3)]))


def stateful(size=8):
    recurrent = keras.layers.GRU(4, stateful=True)
    return compiled(keras.Sequential([keras.layers.Reshape((6, 1)), recurrent, keras.layers.Dense(3)]))
"""


def identities(root: Path, build: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the identities of one model, built with a batch of 8 and with a batch of 4, as on one and two replicas."""
    lab = lab_of(root, SHAPES)
    return tuple(  # type: ignore[return-value]
        model_identity(built(lab, spec).model, spec.model, lab.code)
        for spec in (spec_of(build), spec_of(build, train__global_batch_size=4, **changes))
    )


@pytest.mark.parametrize("build", ["lazy_sequential", "lazy_subclass"])
def test_batch_size_of_the_build_does_not_change_identity(tmp_path: Path, build: str) -> None:
    one, other = identities(tmp_path, build)
    assert differences(one, other) == ()
    assert "null" in json.dumps(one["model.config"])


def test_fixed_batch_size_changes_identity(tmp_path: Path) -> None:
    model = {"build": "model.py:sized", "options": {"size": 4}}
    one, other = identities(tmp_path, "sized", model=model)
    assert "model.config.config.build_input_shape: [8, 6] -> [4, 6]" in list(map(str, differences(one, other)))


def test_stateful_layer_fixes_the_batch_size(tmp_path: Path) -> None:
    one, other = identities(tmp_path, "stateful")
    assert any("[8, 6]" in str(found) for found in differences(one, other))
