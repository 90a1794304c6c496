"""Every form of data that `fit` takes, returned or yielded by a user's function."""

import os
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.dataset.features import unflatten
from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.errors import RunFileError, SourceError
from baton.tasks.prepare_data.example_checks import Checker
from baton.tasks.prepare_data.sources.registry import open_source
from tests.prepare_data.conftest import Workshop

LOAD = "data.py:load"
HEAD = """
import itertools
import random

import numpy as np
import scipy.sparse
import tensorflow as tf
from keras.utils import PyDataset

x = np.arange(80, dtype=np.float32).reshape(10, 8)
y = np.arange(10)
w = np.arange(10) / 10
words = ["a", "bc", "", "dä", "e"] * 2


class Batches(PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return x[index * 4 : index * 4 + 4], y[index * 4 : index * 4 + 4]


def dataset(*parts):
    return tf.data.Dataset.from_tensor_slices(parts)


def batches():
    for begin in range(0, 10, 4):
        yield x[begin : begin + 4], y[begin : begin + 4]


"""
XY = [("x", "float32", (8,)), ("y", "int64", ())]
PAIR = [("x[0]", "float32", (8,)), ("x[1]", "float32", (8,)), ("y", "int64", ())]

# What load returns, and the features of its ten examples; the label of example i is i.
FORMS: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
    "x, y": XY,
    "x, y, w": [*XY, ("sample_weight", "float32", ())],
    "x, y, None": XY,
    "x.tolist(), y.tolist()": XY,
    "tf.constant(x), tf.constant(y)": XY,
    "scipy.sparse.csr_matrix(x), y": XY,
    "tf.sparse.from_dense(x), y": XY,
    "list(x), y": XY,
    "{'b': x, 'a': x[:, :2]}, y": [("x/b", "float32", (8,)), ("x/a", "float32", (2,)), ("y", "int64", ())],
    "[x, x], y": PAIR,
    "(x, x[:, :3]), y": [("x[0]", "float32", (8,)), ("x[1]", "float32", (3,)), ("y", "int64", ())],
    "x, {'y': y, 'z': x}": [("x", "float32", (8,)), ("y/y", "int64", ()), ("y/z", "float32", (8,))],
    "x, {'y': y}, {'y': w}": [("x", "float32", (8,)), ("y/y", "int64", ()), ("sample_weight/y", "float32", ())],
    "words, y": [("x", "string", ()), ("y", "int64", ())],
    "np.array(words)[:, None], y": [("x", "string", (1,)), ("y", "int64", ())],
    "Batches(workers=1)": XY,
    "dataset(x, y)": XY,
    "dataset(x, y).batch(4)": XY,
    "dataset(x, y).batch(5, drop_remainder=True).map(lambda x, y: (x, y)).prefetch(1)": XY,
    "dataset((x, x), y).batch(4)": PAIR,
    "dataset({'k': x}, y).padded_batch(4)": [("x/k", "float32", (8,)), ("y", "int64", ())],
    "dataset(words, y).batch(3)": [("x", "string", ()), ("y", "int64", ())],
    "zip(x, y)": XY,
    "list(zip(x, y))": XY,
    "zip(zip(x, x), y)": PAIR,
    "([each, each[:2]] for each in x)": [("x[0]", "float32", (8,)), ("x[1]", "float32", (2,))],
    "(([each, each], 1) for each in x)": PAIR,
    "(([each], 1) for each in x)": [("x[0]", "float32", (8,)), ("y", "int64", ())],
    "(([each, each],) for each in x)": PAIR[:2],
    "((each, [each, each]) for each in x)": [
        ("x", "float32", (8,)),
        ("y[0]", "float32", (8,)),
        ("y[1]", "float32", (8,)),
    ],
    "(([each] * 17, 1) for each in x)": [("x", "float32", (17, 8)), ("y", "int64", ())],
    "(([each[:2].tolist()] * 2, 1) for each in x)": [("x", "float32", (2, 2)), ("y", "int64", ())],
    "(({'b': each, 'a': 1}, n) if n % 2 else ({'a': 1, 'b': each}, n) for n, each in enumerate(x))": [
        ("x/a", "int64", ()),
        ("x/b", "float32", (8,)),
        ("y", "int64", ()),
    ],
    "((np.float64(each), n) for n, each in enumerate(x))": [("x", "float64", (8,)), ("y", "int64", ())],
    "x": [("x", "float32", (8,))],
    "{'k': x}": [("x/k", "float32", (8,))],
}
BATCHED = {
    "batches()": XY,
    "(([a, a], b) for a, b in batches())": PAIR,
    "[(x, y)]": XY,
    "((list(a), list(b)) for a, b in batches())": XY,
    "dataset(x, y).batch(5, drop_remainder=True)": XY,
}


def checked(workshop: Workshop, returned: str, **data: Any) -> tuple[Checker, list[dict[str, Any]], list[str]]:
    """Return the checker, the examples as named arrays, and how they were read."""
    # A folder of its own, because a module is imported once.
    folder = workshop.code / str(len(list(workshop.code.iterdir())))
    folder.mkdir()
    (folder / "data.py").write_text(f"{HEAD}def load():\n    return {returned}\n", encoding="utf-8")
    notes: list[str] = []
    spec = DataSpec(source=LOAD, **data)
    checker = Checker(spec)
    source = open_source(spec, folder, note=lambda note: notes.append(note.text))
    return checker, [checker.check(where, example) for where, example in source.read()], notes


def features(checker: Checker) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(feature.name, feature.dtype, feature.shape) for feature in checker.features]


@pytest.mark.parametrize("returned", FORMS)
def test_form_gives_ten_examples_in_order(returned: str, workshop: Workshop) -> None:
    checker, examples, _ = checked(workshop, returned)
    assert features(checker) == FORMS[returned]
    assert len(examples) == 10
    labels = [name for name in ("y", "y/y") if name in examples[0]]
    if labels and ", 1)" not in returned:
        assert [int(each[labels[0]]) for each in examples] == list(range(10))
    for name, dtype, _ in FORMS[returned]:
        if name.startswith("x") and dtype == "float32":
            assert [each[name].ravel()[0] for each in examples] == list(range(0, 80, 8))


@pytest.mark.parametrize("returned", BATCHED)
def test_batches_are_taken_apart(returned: str, workshop: Workshop) -> None:
    checker, examples, _ = checked(workshop, returned, batched=True)
    assert features(checker) == BATCHED[returned]
    assert [int(each["y"]) for each in examples] == list(range(10))
    assert checker.reading == "rows"


def test_static_shapes_tell_batches_and_the_log_says_so(workshop: Workshop) -> None:
    checker, _, notes = checked(workshop, "dataset(x, y).batch(4)")
    assert checker.reading == "rows"
    assert "float32[None, 8], int64[None] are read as batches" in notes[0]
    checker, _, notes = checked(workshop, "dataset(x, x)")
    assert checker.reading == "examples"
    assert "read as single examples (set data.batched: true if they are batches)" in notes[0]
    checker, examples, _ = checked(workshop, "dataset(x, y).batch(5)", batched=False)
    assert (checker.reading, len(examples)) == ("examples", 2)


def test_arrays_are_said_with_count_and_shapes(workshop: Workshop) -> None:
    _, _, notes = checked(workshop, "x, y")
    assert notes == ["data.py:load: returned arrays of 10 examples: x float32[8] and y int64[]"]


def test_text_is_stored_and_read_back(workshop: Workshop) -> None:
    pairs = "[b'a\\0', b'', b'\\xff\\0'] * 2, [[u, 'é'] for u in 'pqrstu']"
    workshop.write("data.py", f"def load():\n    return {pairs}\n")
    for changed in ({}, {"shard_examples": 1}):
        ref = workshop.prepare(LOAD, validation_fraction=0, **changed)
        manifest = load_manifest(workshop.storage, ref)
        assert [(each.dtype, each.encoding, each.shape) for each in manifest.features] == [
            ("string", "text", ()),
            ("string", "text", (2,)),
        ]
        found = {(example["x"], *example["y"]) for example in workshop.examples(ref)}
        values = [b"a\0", b"", b"\xff\0"] * 2
        assert found == {(value, letter.encode(), "é".encode()) for value, letter in zip(values, "pqrstu", strict=True)}


def test_lists_become_tuples_for_the_model() -> None:
    names = ["x[0]", "x[1]", "y/a", "sample_weight[0]", "sample_weight[1]"]
    found = unflatten(dict(zip(names, range(5), strict=True)))
    assert found == ((0, 1), {"a": 2}, (3, 4))


def test_examples_takes_the_first_of_an_endless_source(workshop: Workshop) -> None:
    for returned, batched in [
        ("itertools.cycle(zip(x, y))", None),
        ("dataset(x, y).repeat()", None),
        ("dataset(x, y).repeat().batch(4)", None),
        ("((x, y) for _ in itertools.count())", True),
    ]:
        _, examples, _ = checked(workshop, returned, examples=13, batched=batched)
        assert [int(each["y"]) for each in examples] == [*range(10), 0, 1, 2]
    with pytest.raises(SourceError, match=r"data\.examples: 11: data\.py:load has 10 examples only; set it to 10"):
        checked(workshop, "x, y", examples=11)
    with pytest.raises(RunFileError, match=r"data\.examples: 5: the source digits does not use it"):
        workshop.prepare("digits", examples=5)


def test_new_keys_change_the_name_only_if_set(workshop: Workshop) -> None:
    workshop.write("data.py", f"{HEAD}def load():\n    return ((x, y) for _ in range(2))\n")
    names = [
        workshop.prepare(LOAD, **keys).folder
        for keys in ({"batched": False}, {"batched": True}, {"batched": True, "examples": 12})
    ]
    assert len(set(names)) == 3
    assert workshop.prepare(LOAD).folder == names[0]


def test_relative_paths_start_at_the_run_files_folder(workshop: Workshop, tmp_path: Path) -> None:
    workshop.write("numbers/one.txt", "1 2")
    code = """
    import os
    import numpy as np
    AT_IMPORT = open("numbers/one.txt").read()
    def load():
        for value in AT_IMPORT.split():
            yield float(value)
        for value in np.loadtxt("numbers/one.txt"):
            yield np.float32(value)
    """
    workshop.write("data.py", textwrap.dedent(code))
    before = Path.cwd()
    source = open_source(DataSpec(source=LOAD), workshop.code)
    with source.surroundings():
        found = [example for _, example in source.read()]
    assert Path.cwd() == before
    assert found == [1.0, 2.0, 1.0, 2.0]
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        source = open_source(DataSpec(source=LOAD), workshop.code)
        with source.surroundings():
            assert len(list(source.read())) == 4
    finally:
        os.chdir(before)


def test_random_numbers_are_the_same_in_each_reading(workshop: Workshop) -> None:
    body = """
    def load():
        noise = tf.data.Dataset.range(3).shuffle(3).map(lambda each: tf.random.uniform([]))
        for each in noise:
            fresh = np.random.default_rng().random()
            yield np.float32([random.random(), np.random.rand(), tf.random.normal([]), each, fresh])
    """
    workshop.write("data.py", HEAD + textwrap.dedent(body))

    def drawn(seed: int) -> list[Any]:
        source = open_source(DataSpec(source=LOAD), workshop.code, seed)
        return [np.asarray(example).tolist() for _, example in source.read()]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert first == again
    values = zip(np.ravel(first), np.ravel(other), strict=True)
    assert all(here != there for here, there in values)
    assert np.random.default_rng().random() != np.random.default_rng().random()


ROWS = """
class Label:
    names = ["no", "yes"]


class Rows:
    features = {"x": None, "label": Label()}

    def __iter__(self):
        return zip(x, y % 2)


def load():
"""


@pytest.mark.parametrize(
    "body", ["found = dataset(x, y % 2)\n    found.class_names = ['no', 'yes']\n    return found", "return Rows()"]
)
def test_names_of_classes_are_kept(workshop: Workshop, body: str) -> None:
    """As `keras.utils.image_dataset_from_directory` and Hugging Face's datasets have them."""
    workshop.write("data.py", f"{HEAD}{ROWS}    {body}\n")
    assert load_manifest(workshop.storage, workshop.prepare(LOAD)).class_names == ("no", "yes")
