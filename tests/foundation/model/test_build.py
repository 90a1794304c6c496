"""Building the user's model with all its variables, or refusing it with a remedy."""

import random
from pathlib import Path
from typing import Any

import keras
import pytest

from baton.tasks.foundation.errors import IdentityChanged, ModelError
from baton.tasks.foundation.model.build import asks_for_unknown_length
from tests.support.lab import Lab, built, in_fresh_process, lab_of, spec_of

HOLDING = """
class Holding(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.kept = VALUE

    def call(self, x):
        return x


def build():
    model = keras.Sequential([keras.Input((6,)), Holding(), keras.layers.Dense(3)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model
"""

BAD = {
    "raises": (
        "def build():\n    raise KeyError('width')",
        ["model.py, line 9, in build:", "model.py:build raised KeyError: 'width'"],
    ),
    "draws from a random start": (
        "def build():\n    tf.random.Generator.from_non_deterministic_state()",
        ["cannot be called when determinism is enabled", "or set train.deterministic: false"],
    ),
    "exits": (
        "def build():\n    raise SystemExit(0)",
        ["model.py, line 9, in build:", "model.py:build raised SystemExit: 0"],
    ),
    "exits when called": (
        """
        class Leaving(layers.Subclassed):
            def call(self, x, training=False):
                raise SystemExit(0)


        def build():
            model = Leaving()
            model.compile("sgd", "sparse_categorical_crossentropy")
            return model
        """,
        ["does not take a batch of x float32[8, 6], y int64[8]: SystemExit: 0"],
    ),
    "another": ("def build():\n    return 5", ["returned int", "compiled keras.Model"]),
    "nothing": ("def build():\n    pass", ["returned NoneType", "compiled keras.Model"]),
    "uncompiled": (
        "def build():\n    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])",
        ["not compiled", "model.compile(optimizer, loss)"],
    ),
    "unknown option": ("def build(width):\n    pass", ["missing 1 required positional argument: 'width'"]),
    "other shape": (
        """
        def build():
            model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(3)])
            model.compile("sgd", "sparse_categorical_crossentropy")
            return model
        """,
        ["does not take a batch of x float32[8, 6], y int64[8]", "expected axis -1 of input shape to have value 7"],
    ),
    "slash in a name": (
        "def build():\n    return keras.layers.Dense(3, name='a/b')",
        ["build raised ValueError", "cannot contain character `/`"],
    ),
    "second optimizer unbuilt": (
        """
        def build():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            model.compile("sgd", "sparse_categorical_crossentropy")
            model.second = keras.optimizers.Adam(name="second")
            return model
        """,
        ["optimizer second of the model is not built", "optimizer.build(variables)"],
    ),
    "two optimizers of one name, unbuilt": (
        """
        def build():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            model.compile("adam", "sparse_categorical_crossentropy")
            model.maker, model.judge = keras.optimizers.Adam(name="same"), keras.optimizers.Adam(name="same")
            model.maker.build(model.trainable_variables)
            return model
        """,
        ["optimizer same of the model is not built (model.judge)"],
    ),
    "empty variable": (
        HOLDING.replace("VALUE", "tf.Variable(tf.zeros([0, 3]))"),
        ["variables/", "/kept cannot be stored in a checkpoint: its shape [0, 3] has no values"],
    ),
    "text in a variable": (
        HOLDING.replace("VALUE", "tf.Variable('text')"),
        ["variables/", "/kept cannot be stored in a checkpoint: its dtype is string"],
    ),
    "TensorFlow's own mark in a name": (
        """
        def build():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="a.b.ATTRIBUTES")])
            model.compile("sgd", "sparse_categorical_crossentropy")
            return model
        """,
        ["a.b.ATTRIBUTES/kernel cannot be stored in a checkpoint: its name contains .ATTRIBUTES", "rename its layer"],
    ),
    "one output for each class, and the loss of one-hot labels": (
        """
        def build():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")])
            model.compile("sgd", "categorical_crossentropy")
            return model
        """,
        ["y has the number of a class; compile sparse_categorical_crossentropy"],
    ),
    "own step, unusable metrics": (
        """
        class Own(layers.Subclassed):
            def train_step(self, data):
                return super().train_step(data)


        def build():
            model = Own()
            model.compile("sgd", loss={"a": "mse", "b": "mse"})
            return model
        """,
        ["its compiled loss and metrics cannot be computed from model(x) and y", "as attributes of the model instead"],
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_unusable_model_is_refused(tmp_path: Path, fault: str) -> None:
    code, words = BAD[fault]
    with pytest.raises(ModelError) as refused:
        built(lab_of(tmp_path, code), spec_of("build"))
    assert refused.value.exit_code == 2
    for word in words:
        assert word in str(refused.value)


def test_variable_paths_are_unique_and_equal_in_every_build(tmp_path: Path) -> None:
    for build in ("nadam", "raw_variable"):
        spec = spec_of(build)
        first, second = (built(Lab(tmp_path), spec).signature for _ in range(2))
        assert first == second
        assert len({record.path for record in first}) == len(first)


def test_layers_with_equal_names_get_different_paths(tmp_path: Path) -> None:
    lab = lab_of(
        tmp_path,
        """
        class Pair(keras.layers.Layer):
            def __init__(self, **settings):
                super().__init__(**settings)
                # Keras allows two layers with one name within a layer.
                self.one = keras.layers.Dense(6, name="same")
                self.two = keras.layers.Dense(6, name="same")

            def call(self, x):
                return self.two(self.one(x))


        def build():
            model = keras.Sequential([keras.Input((6,)), Pair(), keras.layers.Dense(3)])
            model.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy")
            return model
        """,
    )
    paths = [record.path for record in built(lab, spec_of("build")).signature]
    assert "model/sequential/pair/same/kernel" in paths
    assert "model/sequential/pair/same/kernel~2" in paths
    assert len(set(paths)) == len(paths)


def test_dtype_policy_of_one_build_does_not_leak_into_the_next(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    mixed = built(lab, spec_of("mixed"))
    assert mixed.model.layers[-1].compute_dtype == "float16"
    plain = built(lab, spec_of("plain"))
    assert {layer.compute_dtype for layer in plain.model.layers} == {"float32"}
    assert keras.config.dtype_policy().name == "float32"


def test_dtype_policy_of_the_module_holds_in_every_build(tmp_path: Path) -> None:
    plain = Lab(tmp_path)
    lab = lab_of(
        tmp_path,
        """
        keras.mixed_precision.set_global_policy("mixed_bfloat16")


        def build(policy=None):
            if policy:
                keras.mixed_precision.set_global_policy(policy)
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            model.compile("sgd", "sparse_categorical_crossentropy")
            return model
        """,
    )
    built(plain, spec_of("mixed"))
    dtypes = []
    for policy in (None, "mixed_float16", None):
        model = built(lab, spec_of("build", model__options={"policy": policy})).model
        dtypes.append(model.layers[-1].compute_dtype)
    assert dtypes == ["bfloat16", "float16", "bfloat16"]
    assert built(plain, spec_of("plain")).model.layers[-1].compute_dtype == "float32"


def test_seed_determines_initial_weights(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    one, again, other = (built(lab, spec_of("functional", train__seed=seed)).digest().root for seed in (0, 0, 1))
    assert one == again
    assert one != other


def test_initial_weights_ignore_random_calls_of_other_threads(tmp_path: Path) -> None:
    text = """
        import random
        import threading


        def build(draws):
            model = keras.Sequential([keras.Input((6,))])
            for _ in range(2):
                for _ in range(draws):
                    other = threading.Thread(target=random.random)
                    other.start()
                    other.join()
                model.add(keras.layers.Dense(3))
                model.add(keras.layers.Dropout(0.1))
            model.compile("sgd", "sparse_categorical_crossentropy")
            return model
        """
    lab = lab_of(tmp_path, text)
    digests = {built(lab, spec_of("build", model__options={"draws": draws})).digest().root for draws in (0, 3)}
    assert len(digests) == 1


def test_model_may_set_the_seed_itself(tmp_path: Path) -> None:
    text = """
        def build(seed):
            keras.utils.set_random_seed(seed)
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            model.compile("sgd", "sparse_categorical_crossentropy")
            return model
        """
    lab = lab_of(tmp_path, text)
    before = random.seed
    one, again, other = (
        built(lab, spec_of("build", model__options={"seed": own}, train__seed=seed)).digest().root
        for own, seed in ((1, 0), (1, 5), (2, 0))
    )
    assert one == again
    assert one != other
    assert random.seed == before


def test_call_without_training_argument_is_accepted(tmp_path: Path) -> None:
    lab = lab_of(
        tmp_path,
        """
        class Simple(keras.Model):
            def __init__(self):
                super().__init__()
                self.out = keras.layers.Dense(3)

            def call(self, x):
                return self.out(x)


        def build():
            model = Simple()
            model.compile("sgd", "sparse_categorical_crossentropy")
            return model
        """,
    )
    assert "model/simple/dense/kernel" in {record.path for record in built(lab, spec_of("build")).signature}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("as_lambda", None),
        ("as_partial", None),
        ("as_object", None),
        ("as_method", None),
        ("Net", None),
        (
            "model",
            "model.py:model is a model, made when its file was imported; name a function that makes and",
        ),
        ("width", "model.py has no function width"),
    ],
)
def test_run_file_names_anything_that_makes_a_model(tmp_path: Path, name: str, error: str | None) -> None:
    lab = lab_of(
        tmp_path,
        """
        import functools


        def make(width=4):
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(width), keras.layers.Dense(3)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            return model


        class Net(keras.Model):
            def __init__(self, width=4):
                super().__init__()
                self.one, self.other = keras.layers.Dense(width), keras.layers.Dense(3)
                self.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

            def call(self, x):
                return self.other(self.one(x))


        class Maker:
            def __call__(self, width=4):
                return make(width)


        as_lambda = lambda width=4: make(width)
        as_partial = functools.partial(make, width=5)
        as_object = Maker()
        as_method = as_object.__call__
        width = 3
        """,
    )
    if name == "model":
        (lab.code / "model.py").write_text((lab.code / "model.py").read_text() + "\n\nmodel = make()\n")
    spec = spec_of(name, run="run", model__options={"width": 2})
    if error is None:
        assert {each.shape for each in built(lab, spec).signature if each.path.endswith("kernel")} == {(6, 2), (2, 3)}
        return
    with pytest.raises(ModelError) as refused:
        built(lab, spec)
    assert error in str(refused.value)


def test_rate_may_be_computed_from_its_own_optimizer(tmp_path: Path) -> None:
    """Keras cannot serialize it; the identity has the code in its place."""
    lab = lab_of(
        tmp_path,
        """
        def make(first):
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            sgd = keras.optimizers.SGD(lambda: first / (1.0 + ops.cast(sgd.iterations, "float32")))
            model.compile(sgd, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            return model
        """,
    )
    tips = []
    for run, cuts in (("straight", (11,)), ("cut", (4, 11))):
        head = lab.train_and_commit(spec_of("make", run=run, model__options={"first": 0.5}), *cuts)
        assert head.tip is not None
        tips.append(head.tip.state_digest)
    assert len(set(tips)) == 1
    with pytest.raises(IdentityChanged, match=r"model\.options\.first: 0\.5 -> 0\.25"):
        lab.begin(spec_of("make", run="cut", model__options={"first": 0.25}))


def on_two_replicas(folder: str) -> list[Any]:
    lab, found = Lab(Path(folder), Path(folder) / "code"), []
    for build in ("sampled", "outside"):
        try:
            found.append(len(built(lab, spec_of(build, replicas=2)).leaves[0].components))
        except ModelError as fault:
            found.append(str(fault))
    return found


def test_layers_that_are_made_at_import_are_on_one_device_only(tmp_path: Path) -> None:
    """What draws there without a generator has no replica."""
    lab_of(
        tmp_path,
        """
        class Noise(keras.layers.Layer):
            def call(self, x):
                return x + tf.random.normal(tf.shape(x))


        x = keras.Input((6,))
        sampler = keras.Model(x, Noise()(x))
        encoder = keras.Model(x, keras.layers.Dense(3, name="early")(sampler(x)))


        def compiled(first):
            model = keras.Sequential([keras.Input((6,)), first, keras.layers.Dense(3)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            return model


        def sampled():
            return compiled(sampler)


        def outside():
            return compiled(encoder)
        """,
    )
    components, refused = in_fresh_process(on_two_replicas, folder=str(tmp_path))
    assert components == 2
    words = "early/kernel was made when its file was imported, so it is not on the 2 replicas; make all layers within"
    assert words in refused


@pytest.mark.parametrize(
    ("parameter", "length", "unknown"),
    [
        ("steps_per_epoch", {"steps": 11}, True),
        ("train_steps", {"steps": None, "epochs": 2}, True),
        ("train_steps", {"steps": 11}, False),
        ("width", {"steps": None, "epochs": 2}, False),
    ],
)
def test_model_that_asks_for_an_unknown_length_is_built_later(
    parameter: str, length: dict[str, int | None], unknown: bool, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(f"def build(*, {parameter}=3):\n    pass\n")
    spec = spec_of("build", **{f"train__{name}": value for name, value in length.items()})
    assert asks_for_unknown_length(spec, tmp_path) == unknown
