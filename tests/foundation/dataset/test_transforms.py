"""Transforms as users write them: what they draw follows from their seed alone; what has other state is refused."""

import textwrap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.contracts.dataset import Feature
from baton.tasks.foundation.dataset.transforms import UserTransform, load_transform
from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.model.build import RandomStates

IMAGE = (Feature(name="x", dtype="float32", shape=(4, 4, 1)), Feature(name="y", dtype="int64", shape=()))
HEAD = """import random
import keras
import keras_hub
import numpy as np
import tensorflow as tf

FLIP = keras.Sequential([keras.layers.RandomFlip("horizontal"), keras.layers.RandomTranslation(0.3, 0.3)])
GENERATOR = tf.random.Generator.from_seed(1)
NORM = keras.layers.BatchNormalization()
NORM.build((None, 4, 4, 1))
COUNT = tf.Variable(0.0)
NUMPY = np.random.default_rng(1)
WORDS = keras_hub.tokenizers.WordPieceTokenizer(vocabulary=["[UNK]", "a"], sequence_length=4)
PAIRS = keras_hub.tokenizers.BytePairTokenizer(vocabulary={"a": 0, "b": 1}, merges=[], sequence_length=4)
SWAP = keras_hub.layers.RandomSwap(0.5, seed=1)
"""


def transform(folder: Path, body: str) -> UserTransform:
    """Load `augment` from a file."""
    folder.mkdir(exist_ok=True)
    (folder / "data.py").write_text(HEAD + textwrap.dedent(body), encoding="utf-8")
    loaded = load_transform("data.transform", "data.py:augment", folder, seed=0)
    assert loaded is not None
    return loaded


def apply(function: UserTransform, seeds: int = 6) -> Any:
    """The results for one image and several seeds, mapped in parallel."""
    image = tf.reshape(tf.range(16.0), (4, 4, 1))
    pairs = tf.data.Dataset.from_tensor_slices(np.arange(2 * seeds, dtype=np.int32).reshape(seeds, 2))
    work = tf.autograph.experimental.do_not_convert(lambda seed: function((image, tf.constant(3, tf.int64)), seed))
    return list(pairs.map(work, num_parallel_calls=8).as_numpy_iterator())


EXACT = {
    "stateless": "return tf.image.stateless_random_flip_left_right(example[0], seed), example[1]",
    "keras layers": "return FLIP(example[0], training=True), example[1]",
    "keras.random": "return example[0] + keras.random.normal((4, 4, 1)), example[1]",
    "generator of the user": "return example[0] + keras.random.normal((4, 4, 1), seed=SEEDS), example[1]",
    "a branch": """
        x = example[0] + tf.random.stateless_uniform([], seed)
        if tf.reduce_mean(x) > 7.9:
            x = FLIP(x, training=True)
        return FLIP(x, training=True), example[1]
    """,
}


@pytest.mark.parametrize("name", EXACT)
def test_draws_follow_from_the_seed_alone(tmp_path: Path, name: str) -> None:
    body = textwrap.indent(textwrap.dedent(EXACT[name]).strip(), "    ")
    text = f"SEEDS = keras.random.SeedGenerator(5)\ndef augment(example, *, seed):\n{body}\n"
    function = transform(tmp_path, text)
    one, again = apply(function), apply(function)
    assert all(np.array_equal(before[0], after[0]) for before, after in zip(one, again, strict=True))
    assert len({x.tobytes() for x, _ in one}) > 1


def test_two_layers_and_two_draws_get_different_numbers(tmp_path: Path) -> None:
    body = """
    A = keras.layers.GaussianNoise(1.0)
    B = keras.layers.GaussianNoise(1.0)
    def augment(example, *, seed):
        x = tf.zeros((4, 4, 1))
        return tf.stack([A(x, training=True), B(x, training=True), A(x, training=True)]), example[1]
    """
    for x, _ in apply(transform(tmp_path, body)):
        assert len({part.tobytes() for part in x}) == 3


def test_trace_leaves_generators_and_layers_as_they_were(tmp_path: Path) -> None:
    function = transform(tmp_path, f"def augment(example, *, seed):\n    {EXACT['keras layers']}\n")
    flip = function.function.__globals__["FLIP"]
    states = [variable.numpy().tolist() for layer in flip.layers for variable in layer.variables]
    before = RandomStates.now()
    apply(function)
    after = RandomStates.now()
    assert states == [variable.numpy().tolist() for layer in flip.layers for variable in layer.variables]
    assert (before.python, before.keras_drawn, before.tensorflow_seed) == (
        after.python,
        after.keras_drawn,
        after.tensorflow_seed,
    )


LISTED = [("x[0]", "string"), ("x[1]", "float32"), ("y", "int64")]
REFUSED = {
    "tf.random": (
        "return example[0] + tf.random.uniform([]), example[1]",
        [
            "data.transform: data.py:augment uses RandomUniform, data.py, line 18: return example[0]",
            "stateless_uniform",
        ],
    ),
    "tf.image": (
        "return tf.image.random_flip_left_right(example[0]), example[1]",
        ["RandomUniform, data.py, line 18: return tf.image.random_flip_left_right", "hint: draw with"],
    ),
    "a seed of its own": (
        "return example[0] + tf.random.uniform([], seed=3), example[1]",
        ["RandomUniform, data.py, line 18"],
    ),
    "tf.random.Generator": (
        "return example[0] + GENERATOR.uniform([]), example[1]",
        ["RngReadAndSkip, data.py, line 18", "hint: draw with"],
    ),
    "in a branch": (
        "return (example[0] if example[1] > 1 else tf.random.shuffle(example[0])), example[1]",
        ["RandomShuffle, data.py, line 18"],
    ),
    "python": (
        "return tf.numpy_function(np.sort, [example[0]], tf.float32), example[1]",
        ["runs Python code (PyFunc, data.py, line 18", "hint: write it in TensorFlow operations"],
    ),
    "a variable": (
        "return example[0] + COUNT.assign_add(1.0), example[1]",
        ["changes a variable (AssignAddVariableOp, data.py, line 18", "hint: return everything"],
    ),
    "statistics": (
        "return NORM(example[0][None], training=True)[0], example[1]",
        ["/moving_mean: its result would depend on the order", "hint: call layers with training=False"],
    ),
    "a new layer": (
        "return keras.layers.RandomFlip()(example[0], training=True), example[1]",
        ["creates the Keras variable", "seed_generator_state", "hint: create layers and seed generators once"],
    ),
    "keras in a loop": (
        "return tf.map_fn(lambda row: row + keras.random.uniform(()), example[0]), example[1]",
        ["inside a TensorFlow loop", "hint: loop in Python, or"],
    ),
    "three arguments": ("return 1, 2, 3, 4", ["returned a tuple of 4; return x, (x, y) or (x, y, sample_weight)"]),
    "text": ("return 'x', example[1]", ["returned x as str; return tensors"]),
    "None": ("return None", ["returned x as NoneType"]),
    "a nested list": ("return [[example[0]]], example[1]", ["returned x[0] as list; return tensors"]),
    "bfloat16": ("return tf.cast(example[0], tf.bfloat16), example[1]", ["returned x as bfloat16; cast it"]),
    "a dynamic shape": (
        "return tf.boolean_mask(example[0], example[0] > 1), example[1]",
        ["returned x with the shape (None,)", "tf.ensure_shape"],
    ),
    "a key": ("return {1: example[0]}, example[1]", ["returned x with the key 1; use non-empty strings"]),
    "numpy": (
        "return example[0] + np.float32(np.random.normal()), example[1]",
        ["draws random numbers in Python (np.random or random)", "stateless_uniform"],
    ),
    "random": (
        "return (example[0] if random.random() < 0.5 else -example[0]), example[1]",
        ["draws random numbers in Python (np.random or random)"],
    ),
    "a generator of numpy": (
        "return example[0] + np.float32(NUMPY.normal()), example[1]",
        ["takes other values from it each time it is traced"],
    ),
    "an error": (
        "return tf.reshape(example[0], (3, 3)), example[1]",
        ["data.transform: data.py:augment raised ValueError", "data.py, line 18, in augment:\n    return tf.reshape"],
    ),
    "a tokenizer that says what it lacks": (
        "return PAIRS(tf.strings.as_string(example[1])), example[1]",
        ["raised ImportError", "hint: in a transform, KerasHub's tokenizers run on the package tensorflow-text"],
    ),
    "a tokenizer that does not": (
        "return WORDS(tf.strings.as_string(example[1])), example[1]",
        ["raised AttributeError", "hint: in a transform, KerasHub's tokenizers run on the package tensorflow-text"],
    ),
    "a generator made in the call": (
        "return SWAP(tf.fill([4], example[1])), example[1]",
        ["whose state no checkpoint holds", "hint: draw with"],
    ),
    "an unknown name": ("return nothing", ["raised NameError", "nothing", "line 18"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_line_and_remedy(tmp_path: Path, name: str) -> None:
    line, expected = REFUSED[name]
    function = transform(tmp_path, f"\ndef augment(example, *, seed):\n    {line}\n")
    with pytest.raises(ModelError) as refused:
        function.features(IMAGE)
    for words in expected:
        assert words in str(refused.value)


def test_function_with_other_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"augment\(image, label\) cannot be called with an example"):
        transform(tmp_path, "def augment(image, label):\n    return image, label\n")


def test_seed_is_optional(tmp_path: Path) -> None:
    function = transform(tmp_path, "def augment(example):\n    return tf.cast(example[0], tf.float16), example[1]\n")
    assert [(each.name, each.dtype, each.shape) for each in function.features(IMAGE)] == [
        ("x", "float16", (4, 4, 1)),
        ("y", "int64", ()),
    ]


def test_tf_function_is_traced_anew(tmp_path: Path) -> None:
    body = """
    @tf.function
    def augment(example, *, seed):
        return FLIP(example[0], training=True), example[1]
    """
    function = transform(tmp_path, body)
    function.features(IMAGE)
    assert len({x.tobytes() for x, _ in apply(function)}) > 1


def test_example_without_y_is_x_itself(tmp_path: Path) -> None:
    function = transform(tmp_path, "def augment(x, *, seed):\n    return {'b': x, 'a': x[0]}, 1, 0.5\n")
    found = function.features(IMAGE[:1])
    assert [(each.name, each.dtype, each.shape) for each in found] == [
        ("x/b", "float32", (4, 4, 1)),
        ("x/a", "float32", (4, 1)),
        ("y", "int32", ()),
        ("sample_weight", "float32", ()),
    ]


def test_batch_must_keep_its_size(tmp_path: Path) -> None:
    function = transform(tmp_path, "def augment(batch, *, seed):\n    return batch[0][:2], batch[1]\n")
    with pytest.raises(ModelError, match="keep the number of examples"):
        function.features(IMAGE, batch=8)
    kept = transform(
        tmp_path / "other", "def augment(batch, *, seed):\n    return batch[0], tf.one_hot(batch[1], 10)\n"
    )
    assert kept.features(IMAGE, batch=8)[1].shape == (10,)


def test_keras_is_not_left_in_a_scope(tmp_path: Path) -> None:
    function = transform(tmp_path, f"\ndef augment(example, *, seed):\n    {REFUSED['tf.random'][0]}\n")
    with pytest.raises(ModelError):
        function.features(IMAGE)
    layer = keras.layers.Dense(2)
    assert layer(tf.zeros((1, 3))).shape == (1, 2)
    tf.function(lambda: tf.random.uniform([]))()


def test_lists_and_strings_are_transformed(tmp_path: Path) -> None:
    received = tuple(Feature(name=name, dtype=dtype, shape=()) for name, dtype in LISTED)
    lower = transform(
        tmp_path / "pairs",
        """
        def augment(example, *, seed):
            [text, number], y = example
            return [tf.strings.lower(text), number + 1.0, tf.strings.length(text)], y
        """,
    )
    returned = [(each.name, each.dtype, each.shape) for each in lower.features(received)]
    assert returned == [("x[0]", "string", ()), ("x[1]", "float32", ()), ("x[2]", "int32", ()), ("y", "int64", ())]
    example = (tf.constant("Sun"), tf.constant(2.0)), tf.constant(1, tf.int64)
    mapped = tf.data.Dataset.from_tensors(example).map(lambda x, y: lower((x, y), tf.constant([0, 1])))
    (((text, number, length), y),) = mapped
    assert (text.numpy(), number.numpy(), length.numpy(), y.numpy()) == (b"sun", 3.0, 3, 1)

    same = transform(tmp_path / "alone", "def augment(example, *, seed):\n    return example\n")
    batch = [(each.name, each.dtype, each.shape) for each in same.features(received[:2], batch=4)]
    assert batch == [("x[0]", "string", ()), ("x[1]", "float32", ())]
