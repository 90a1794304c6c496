"""What layers keep beside their variables is part of the identity; another content is refused by its name."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.flows.api import Run
from baton.tasks.foundation.contracts.contents import content_differences, record_of_items
from baton.tasks.foundation.contracts.stage_calls import InitOrRestoreCall
from baton.tasks.foundation.errors import IdentityChanged, InvalidInput
from baton.tasks.foundation.model.model_identity import _record
from tests.support.lab import Lab, lab_of, spec_of

MODEL = """
import os

import numpy as np


def lines():
    with open(os.environ["BATON_TEST_LINES"]) as file:
        return file.read().split()


def numbers():
    return np.array([float(len(line)) for line in lines()], "float32")


TABLE = np.array([len(line) for line in lines()])


class Kept(keras.layers.Layer):
    def __init__(self, kept):
        super().__init__(name="kept")
        self.kept = kept

    def call(self, x):
        return x


class Normalized(keras.layers.Layer):
    def __init__(self):
        super().__init__(name="normalized")

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], name="mean", initializer="ones", trainable=False)
        self.finalize_state()

    def finalize_state(self):
        self.constant = ops.convert_to_tensor(numbers())

    def call(self, x):
        return x


class Assets(Kept):
    def save_assets(self, folder):
        with open(folder + "/words.txt", "w") as file:
            file.write("\\n".join(self.kept))


class Saved(Kept):
    def build(self, shape):
        self.w = self.add_weight(shape=shape[1:], name="w")

    def save_own_variables(self, store):
        store["w"], store["lengths"] = self.w.numpy(), [len(line) for line in self.kept]


class Reading(keras.layers.Layer):
    def call(self, x):
        return x + float(TABLE[0] * 0)


class Tokens:
    def __init__(self):
        self.table = static_table()


class Weighted(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.weights = numbers()

    def call(self, y, p):
        return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


def static_table(buckets=0):
    words = tf.constant(lines())
    values = tf.range(len(words), dtype=tf.int64)
    initializer = tf.lookup.KeyValueTensorInitializer(words, values)
    if buckets:
        return tf.lookup.StaticVocabularyTable(initializer, buckets)
    return tf.lookup.StaticHashTable(initializer, -1)


def adapted(layer):
    layer.adapt(lines())
    return layer


def from_file():
    return keras.layers.StringLookup(vocabulary=os.environ["BATON_TEST_LINES"], name="words")


def integers():
    layer = keras.layers.IntegerLookup(max_tokens=3, name="words")
    layer.adapt([len(line) for line in lines()])
    return layer


def counting():
    return lambda x, counts=numbers(): x


KINDS = {
    "vectorization": lambda: Kept([adapted(keras.layers.TextVectorization(name="words"))]),
    "tf_idf": lambda: Kept([adapted(keras.layers.TextVectorization(output_mode="tf_idf", name="words"))]),
    "strings": lambda: Kept([adapted(keras.layers.StringLookup(name="words"))]),
    "inverted": lambda: Kept([adapted(keras.layers.StringLookup(invert=True, name="words"))]),
    "integers": lambda: Kept([integers()]),
    "file": lambda: Kept([from_file()]),
    "table": lambda: Kept(static_table()),
    "buckets": lambda: Kept({"words": static_table(3)}),
    "array": lambda: Kept(numbers()),
    "integer_array": lambda: Kept((TABLE,)),
    "tensor": lambda: Kept(tf.constant(numbers())),
    "text_array": lambda: Kept(np.array(lines())),
    "object": lambda: Kept(Tokens()),
    "assets": lambda: Assets(lines()),
    "saved": lambda: Saved(lines()),
    "global": lambda: Reading(),
    "captured": lambda: keras.layers.Lambda(counting()),
    "loss": lambda: Kept(None),
    "unadapted": lambda: Kept(keras.layers.StringLookup(name="words")),
    "hashing": lambda: Kept(keras.layers.Hashing(3)),
    "finalized": Normalized,
    "plain": lambda: Kept([1, "two", {"three": 3.0}]),
}


def build(kinds):
    layers = {kind: KINDS[kind]() for kind in kinds}
    for kind, layer in layers.items():
        layer.name = kind
    model = keras.Sequential([keras.Input((6,)), *layers.values(), keras.layers.Dense(3)])
    loss = Weighted() if "loss" in kinds else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model
"""
LINES = ["a", "bb", "bb", "ccc", "ccc", "ccc"]
OTHER_LINES = ["a", "bb", "bb", "dd", "dd", "dd"]


def again(lab: Lab, spec: Any, *accept: str) -> None:
    from baton.tasks.init_or_restore.stage import init_or_restore

    init_or_restore(InitOrRestoreCall(spec=spec, dataset=lab.prepare(spec), accept=accept), lab.place(spec))


def write(lab: Lab, lines: list[str]) -> None:
    # TensorFlow shares the tables of a file within a process.
    file = lab.root / f"{len(list(lab.root.glob('*.txt')))}.txt"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.environ["BATON_TEST_LINES"] = str(file)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    found = lab_of(tmp_path, MODEL)
    monkeypatch.setenv("BATON_TEST_LINES", "")  # put back afterwards
    return found


# A model has a layer of each kind, named for it, and no more of them than a message names. Tables that are built of all
# lines need lines that differ.
OF_KERAS = {
    "vectorization": "vocabulary of layer `vectorization/words` changed: token 2 was 'ccc', is 'dd'",
    "tf_idf": "vocabulary of layer `tf_idf/words` changed: token 1 was 'ccc', is 'dd'",
    "strings": "vocabulary of layer `strings/words` changed: token 1 was 'ccc', is 'dd'",
    "inverted": "vocabulary of layer `inverted/words` changed: token 1 was 'ccc', is 'dd'",
    "integers": "vocabulary of layer `integers/words` changed: token 1 was 3, is 2",
    "array": "array `kept` of layer `array` changed: value 3 differs",
    "tensor": "array `kept` of layer `tensor` changed: value 3 differs",
}
OF_OTHERS = {
    "integer_array": "array `kept[0]` of layer `integer_array` changed: value 3 was 3, is 2",
    "text_array": "array `kept` of layer `text_array` changed: value 3 was 'ccc', is 'dd'",
    "assets": "words.txt of layer `assets` changed: line 4 was 'ccc', is 'dd'",
    "saved": "`lengths` that save_own_variables of layer `saved` stores changed: value 3 was 3, is 2",
    "global": "`TABLE` of model.py changed: value 3 was 3, is 2",
    "captured": "`<lambda>(default 0)` of model.py changed: value 3 differs",
    "loss": "`loss.weights` of the model changed: value 3 differs",
}
OF_UNIQUE_LINES = {
    "file": "vocabulary of layer `file/words` changed: it has 4 tokens instead of 3; token 2 was 'bb', is 'ccc'",
    "table": "table `kept` of layer `table` changed: it has 4 tokens instead of 3; token 1 was 'bb', is 'ccc'",
    "buckets": "table `kept['words']` of layer `buckets` changed: it has 4 tokens instead of 3; token 1 was 'bb'",
    "object": "table `kept.table` of layer `object` changed: it has 4 tokens",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "before", "after"),
    [
        (OF_KERAS, LINES, OTHER_LINES),
        (OF_OTHERS, LINES, OTHER_LINES),
        (OF_UNIQUE_LINES, ["a", "bb", "ccc"], ["a", "ccc", "bb", "dd"]),
    ],
    ids=["layers of Keras and arrays", "others", "unique lines"],
)
def test_another_content_is_refused_by_name(
    lab: Lab, found: dict[str, str], before: list[str], after: list[str]
) -> None:
    spec = spec_of("build", model__options={"kinds": list(found)})
    write(lab, before)
    head = lab.begin(spec)
    again(lab, spec)
    write(lab, after)
    changed = lab.copy_of_code("changed")  # another module, as in another process
    with pytest.raises(IdentityChanged, match="was started with other settings") as refused:
        again(changed, spec)
    assert [kind for kind, words in found.items() if words not in str(refused.value)] == [], refused.value
    assert "model.contents\n" in str(refused.value)
    with pytest.raises(InvalidInput, match="builds another model than") as not_loaded:
        Run(lab.home(spec).uri).model()
    assert any(words in str(not_loaded.value) for words in found.values()), not_loaded.value
    assert head.tip is not None
    with pytest.raises(IdentityChanged, match="builds another model than"):
        changed.evaluate(spec, head.tip)
    again(changed, spec, "model.config", "model.contents")
    again(changed, spec)
    write(lab, before)
    with pytest.raises(IdentityChanged):
        again(lab.copy_of_code("back"), spec)


AUGMENT = """
import os

import keras
import tensorflow as tf

WORDS = keras.layers.StringLookup(vocabulary=os.environ["BATON_TEST_LINES"])


def augment(example):
    x, y = example
    return x + 0.1 * tf.cast(WORDS(tf.constant(["ccc"])), tf.float32), y
"""


@pytest.mark.slow
@pytest.mark.parametrize("key", ["transform", "validation_transform"])
def test_vocabulary_of_a_transform_is_refused_too(lab: Lab, key: str) -> None:
    (lab.code / "augment.py").write_text(AUGMENT, encoding="utf-8")
    spec = spec_of("build", model__options={"kinds": ["plain"]}, **{f"data__{key}": "augment.py:augment"})
    write(lab, ["a", "bb", "ccc"])
    head = lab.begin(spec)
    again(lab, spec)
    write(lab, ["a", "ccc", "bb"])
    changed = lab.copy_of_code("changed")
    with pytest.raises(IdentityChanged) as refused:
        again(changed, spec)
    assert "vocabulary of `WORDS` of augment.py changed: token 2 was 'bb', is 'ccc'" in str(refused.value)
    assert head.tip is not None
    with pytest.raises(IdentityChanged, match="the transforms use other contents than") as not_evaluated:
        changed.evaluate(spec, head.tip)
    assert "vocabulary of `WORDS` of augment.py changed: token 2 was 'bb', is 'ccc'" in str(not_evaluated.value)
    assert "--accept data.contents" in str(not_evaluated.value)
    again(lab.copy_of_code("accepted"), spec, "data.contents")


@pytest.mark.slow
def test_what_is_no_content_may_differ(lab: Lab) -> None:
    spec = spec_of("build", model__options={"kinds": ["unadapted", "hashing", "finalized", "plain"]})
    write(lab, LINES)
    lab.begin(spec)
    write(lab, ["dd"])
    again(lab.copy_of_code("changed"), spec)


def items(*texts: str, start: int = 0) -> dict[str, Any]:
    return record_of_items(texts, what="words", item="word", start=start)


WORDS = tuple(f"word {number:06}" for number in range(5000))


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (items(*"abc"), items(*"abc"), None),
        (items(*"abc"), items(*"abd"), "words changed: word 2 was c, is d"),
        (items(*"abc", start=2), items(*"abcd", start=2), "words changed: it has 4 words instead of 3"),
        (items(*"abc"), items(*"abc", start=1), "words changed: it begins with word 1 instead of 0"),
        (items(*"abc"), None, "words is gone"),
        (None, items(*"abc"), "words is new"),
        (items("a" * 90), items("a" * 89 + "b"), "words changed: word 0 differs"),
        (
            items(*WORDS),
            items(*WORDS[:4000], "x", *WORDS[4001:]),
            "words changed: the first word that differs is among 3840 to 4095",
        ),
        (
            items(*WORDS[:3000]),
            items(*WORDS[:2500], *WORDS[2600:]),
            "words changed: it has 4900 words instead of 3000",
        ),
    ],
)
def test_first_difference_is_said(before: Any, after: Any, found: str | None) -> None:
    records = [{} if each is None else {"words": each} for each in (before, after)]
    assert dict(content_differences(*records)) == ({} if found is None else {"words": found})
    assert len(str(records)) < 12_000


@pytest.mark.parametrize(
    "record", [1, "x", [], {}, {"what": "x"}, {"what": "x", "floats": ["a"], "shape": []}, {"what": 1, "floats": []}]
)
def test_record_of_a_foreign_home_is_refused(record: Any) -> None:
    assert dict(content_differences({"x": record}, {"x": items("a")})) == {"x": "the record of x cannot be read"}


@pytest.mark.parametrize("size", [1, 7, 32, 33, 5000])
def test_floats_are_compared_with_a_tolerance(size: int) -> None:
    """Another processor computes other last bits; rows in another order are another content."""
    values = np.random.default_rng(size).normal(size=(size, 3)).astype("float32")
    record = {"x": _record(values, "x")}
    assert not list(content_differences(record, {"x": _record(np.nextafter(values, np.float32(9)), "x")}))
    others = [values * np.float32(1.001), values[:, ::-1], np.where(values == values.max(), np.nan, values)]
    for other in [*others, values[::-1]] if size > 1 else others:
        assert list(content_differences(record, {"x": _record(np.ascontiguousarray(other), "x")})), other
