"""Malformed and ambiguous sources: each is refused with the shapes that it has, and with the remedy."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import tensorflow as tf
from keras.utils import PyDataset

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.errors import SourceError
from baton.tasks.prepare_data.example_checks import Checker
from baton.tasks.prepare_data.sources.function import Reader

X, Y, W = np.zeros((40, 8), np.float32), np.arange(40), np.ones(40)
SHORT, IMAGES = np.arange(39), np.zeros((40, 6, 6, 1), np.uint8)
RAGGED_ROWS = np.array([np.zeros(2), np.zeros(3)], object)
NAN = X.copy()
NAN[3, 5] = np.nan


class Batches(PyDataset):
    """Batches of different x and y, and no length."""

    def __getitem__(self, index: int) -> Any:
        return X[:4], Y[:3]


class CountedBatches(Batches):
    def __len__(self) -> int:
        return 2


class FailingBatches(CountedBatches):
    def __getitem__(self, index: int) -> Any:
        raise OSError("file is gone")


def ragged() -> Any:
    # In functions, because no tensor may be made before the tests set the threads.
    return tf.ragged.constant([[1.0], [2.0, 3.0]] * 20)


def dataset(*parts: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices(parts)


def forever() -> Iterator[Any]:
    while True:
        yield X[0], 1


def yields(*examples: Any) -> Callable[[], Iterator[Any]]:
    """A function that yields these."""
    return lambda: iter(examples)


LENGTHS = "return arrays of the same length"
ONE_SET = "return x, y"
SINGLE = "set data.batched: false"
BATCHES = {"batched": True}
TWO = ["2 sets of 40, 9 examples of x float32[8] and y int64[]", "def load_validation():"]
VALIDATION = "    source: data.py:load\n    validation: data.py:load_validation\n"
PASTED = f"""
  and name them in the run file under data, in place of source and validation_fraction:
{VALIDATION}"""

# What load returns (a function is called), the keys of `data`, and words of the message: shapes and remedy.
REFUSED: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    # nothing that can be read
    "None": (None, {}, ["returned None", "return arrays (x, y)"]),
    "a number": (7, {}, ["returned a int", "make it a generator function"]),
    "text": ("digits", {}, ["returned a str", "return arrays (x, y)"]),
    "bytes": (b"digits", {}, ["returned a bytes", "return arrays (x, y)"]),
    "a function": (lambda: forever, {}, ["returned a function", "make it a generator function"]),
    "an array of no dimension": (np.float32(3), {}, ["returned a float32", "return arrays (x, y)"]),
    # whole arrays
    "y is shorter than x": ((X, SHORT), {}, ["x float32[40, 8] and y int64[39]", LENGTHS]),
    "weights are shorter than x": ((X, Y, W[:5]), {}, ["y int64[40] and sample_weight float64[5]", LENGTHS]),
    "inputs of different lengths": (
        ({"a": X, "b": X[:9]}, Y),
        {},
        ["x/a float32[40, 8], x/b float32[9, 8] and y int64[40]", LENGTHS],
    ),
    "a list of inputs of different lengths": (
        ([X, X[:9]], Y),
        {},
        ["x[0] float32[40, 8], x[1] float32[9, 8] and y int64[40]", LENGTHS],
    ),
    "outputs of different lengths": ((X, [Y, SHORT]), {}, ["y[0] int64[40] and y[1] int64[39]", LENGTHS]),
    "a dict of different lengths": ({"one": X, "other": X[:5]}, {}, ["x/other float32[5, 8]", LENGTHS]),
    "an array and one label": ((X, 3), {}, ["x float32[40, 8] and y int '3'", LENGTHS]),
    "one example, returned": ((X[0], np.int64(3)), {}, ["x float32[8] and y int64[]", LENGTHS]),
    "x alone is missing": ((None, Y), {}, ["x None and y int64[40]", LENGTHS]),
    "no example": ((X[:0], Y[:0]), {}, ["no examples", "x float32[0, 8] and y int64[0]", "give at least one"]),
    "no example in x": (X[:0], {}, ["no examples", "x float32[0, 8]", "give at least one"]),
    "an empty dict": (({}, Y), {}, ["x is an empty dict", "y int64[40]", "yield an array"]),
    "a nested dict": (({"a": {"b": X}}, Y), {}, ["x/a is a nested dict", "one flat dict"]),
    "a name that is a number": (({1: X}, Y), {}, ["x has the key 1", "non-empty strings"]),
    "a nested list": (([X, (X, X)], Y), {}, ["x[1] is a nested tuple", "one flat list"]),
    "weights for steps that y lacks": (
        (X, Y, np.ones((40, 3))),
        {},
        ["sample_weight cannot weigh", "y int64[] and sample_weight float32[3]", "one number for each"],
    ),
    "weights of text": ((X, Y, ["a"] * 40), {}, ["sample_weight string[]", "one number for each"]),
    "a ragged tensor": (lambda: (ragged(), Y), {}, ["x is a RaggedTensor [40, None]", "x.to_tensor(shape=[None, n])"]),
    "rows of different lengths": (
        (RAGGED_ROWS, Y[:2]),
        {},
        ["x has dtype object[2]: ragged", "(2,) at [0]", "keras.utils.pad_sequences"],
    ),
    "lists of different lengths": (([[1], [2, 3]], [0, 1]), {}, ["x is ragged", "x list of 2", "pad_sequences"]),
    "numbers and text in one array": (
        (np.array([1, "u"], object), Y[:2]),
        {},
        ["x has dtype object[2] with a int at [0]", "name columns"],
    ),
    "a missing value": ((np.array(["u", None]), Y[:2]), {}, ["object[2] with a missing value (None) at [1]", "fillna"]),
    "a table of different columns": (
        (pd.DataFrame({"age": [1, 2], "city": ["u", "v"]}), Y[:2]),
        {},
        ["columns have no dtype in common (age int64, city str)", "dict(x)"],
    ),
    "a nested list of arrays": (yields(([X, [X, X]], 1)), {}, ["x[1] is a nested list of arrays", "np.stack"]),
    "a list of arrays in a dict": (yields({"a": [X[0], X[1]]}), {}, ["x/a is a nested list of arrays", "np.stack"]),
    "dates": ((np.zeros(40, "datetime64[s]"), Y), {}, ["x has dtype datetime64[s]", "int64"]),
    "a matrix of another length": ((scipy.sparse.eye(5).tocsr(), Y), {}, ["x float64[5, 5] and y int64[40]", LENGTHS]),
    "NaN in an array": ((NAN, Y), {}, ["row 3: x contains nan at [5]", "data.allow_nan"]),
    "arrays with data.batched": ((X, Y), BATCHES, ["whole arrays: x float32[40, 8] and y", "remove data.batched"]),
    "a dict with data.batched: false": ({"k": X}, {"batched": False}, ["x/k float32[40, 8]", "remove data.batched"]),
    # several sets
    "training and test set": (((X, Y), (X[:9], Y[:9])), {}, [*TWO, f"return load_sets()[1]{PASTED}", ONE_SET]),
    "two equal sets": (((X, Y), (X, Y)), {}, ["2 sets of 40, 40", "2 single examples: (x float32[40, 8]", SINGLE]),
    "x and y of two sets": ((X, Y, X[:9], Y[:9]), {}, [*TWO, f"return load_sets()[2:4]{PASTED}", ONE_SET]),
    "two sets as of scikit-learn": ((X, X[:9], Y, Y[:9]), {}, [*TWO, f"return load_sets()[1::2]{PASTED}"]),
    "three sets as of scikit-learn": (
        (X, X[:9], X[:5], Y, Y[:9], Y[:5]),
        {},
        [
            "3 sets of 40, 9, 5 examples",
            "def load_test():\n        return load_sets()[2::3]",
            "test: data.py:load_test",
        ],
    ),
    "x, y and validation data as in fit": ((X, Y, (X[:9], Y[:9])), {}, [*TWO, f"return load_sets()[2]{PASTED}"]),
    "sets by name": ({"train": (X, Y), "val": (X[:9], Y[:9])}, {}, [*TWO, f'return load_sets()["val"]{PASTED}']),
    "sets of x alone by name": (
        {"train": X, "test": X[:5]},
        {},
        ["2 sets of 40, 5 examples of x float32[8]", VALIDATION],
    ),
    "arrays of sets by name": (
        {"y_train": Y, "x_train": X, "x_test": X[:9], "y_test": Y[:9]},
        {},
        [*TWO, f'        sets = load_sets()\n        return sets["x_test"], sets["y_test"]{PASTED}'],
    ),
    "a dataset for training and one for validation": (
        lambda: (dataset(X, Y), dataset(X, Y)),
        BATCHES,
        ["2 sets (float32[8], int64[], float32[8], int64[])", f"return load_sets()[1]{PASTED}"],
    ),
    "datasets by name": (lambda: {"train": dataset(X, Y), "test": dataset(X, Y)}, {}, [f'()["test"]{PASTED}']),
    "a dataset with a description": (lambda: (dataset(X, Y), {}), {}, ["returned a tuple of", "return train_dataset"]),
    # two readings
    "a list of x and y": ([X, Y], {}, ["2 single examples: x float32[40, 8]", "one set of 40", ONE_SET]),
    "a list of two equal arrays": ([X, X], {}, ["2 single examples", "one set of 40 examples of x float32[8]", SINGLE]),
    "a dict of x and y": ({"x": X, "y": Y}, {}, ["x float32[40, 8] and y int64[40]", "x/x float32[40, 8]", ONE_SET]),
    "a list that is inputs or rows": (
        ([X[:2], X[:2]], Y[:2]),
        {},
        ["two ways", "x[0] float32[2, 8], x[1] float32[2, 8]", "x list of 2", "np.stack"],
    ),
    # batches
    "a batch of different lengths": (
        yields((X[:4], Y[:4]), (X[:4], Y[:3])),
        BATCHES,
        ["batch 1", "x float32[4, 8] and y int64[3]", SINGLE],
    ),
    "examples, said to be batches": (yields((X[0], Y[0])), BATCHES, ["batch 0", "x float32[8] and y int64[]", SINGLE]),
    "a batch of four parts": (yields((X, Y, W, W)), BATCHES, ["batch 0: a tuple of 4", "yield x, (x, y)"]),
    "a batch of other features": (
        yields((X[:2], Y[:2]), (X[:2, :7], Y[:2])),
        BATCHES,
        ["batch 1, its example 0: x has shape (7,)", "(8,)", "the same names, dtypes and shapes"],
    ),
    "a batch with y missing": (yields((X, Y), X), BATCHES, ["has x, but the first", "has x, y", "the same names"]),
    "a PyDataset of different lengths": (
        CountedBatches(workers=1),
        {},
        ["batch 0", "x float32[4, 8] and y int64[3]", "one first dimension"],
    ),
    "a PyDataset, said to yield examples": (
        CountedBatches(workers=1),
        {"batched": False},
        ["whose items are batches", "remove data.batched"],
    ),
    "a PyDataset that raises": (FailingBatches(workers=1), {}, ["OSError: file is gone", "batch 0", "line "]),
    "a dataset of ragged batches": (
        lambda: dataset(ragged(), Y).batch(4),
        {},
        ["RaggedTensor", "dataset.map(lambda x, y: (x.to_tensor(shape=[None, n]), y))"],
    ),
    "a last batch among examples": (
        yields((X, IMAGES), (X[:9], IMAGES[:9])),
        {},
        ["x has shape (9, 8)", "(40, 8)", "if these are batches, set data.batched: true"],
    ),
    # examples
    "sequences of different lengths": (
        yields((np.zeros(3), 1), (np.zeros(5), 1)),
        {},
        ["example 1: x has shape (5,)", "(3,)", "pad sequences", "keras.utils.pad_sequences"],
    ),
    "an example with another dtype": (
        yields((X[0], 1), (X[0].astype(float), 1)),
        {},
        ["x has dtype float64", "float32", "the same names, dtypes and shapes"],
    ),
    "an example of text among numbers": (yields((1.0, 1), ("u", 1)), {}, ["x has dtype string", "float32", "the same"]),
    "numbers and text in one list": (yields((["u", 1], 1)), {}, ["x has dtype object[2] with a int at [1]", "'city'"]),
    "an example of four parts": (yields((1, 2, 3, 4)), {}, ["a tuple of 4", "yield x, (x, y)"]),
    "an example without y": (yields((X[0], None)), {}, ["y is None", "remove it"]),
    "an example of objects": (yields((X[0], object())), {}, ["y has dtype object[] with a object", "float32 or int64"]),
    # no end
    "itertools.cycle": (itertools.cycle([(X[0], 1)]), {}, ["itertools.cycle", "data.examples: N"]),
    "itertools.repeat": (itertools.repeat((X[0], 1)), {}, ["itertools.repeat", "data.examples: N"]),
    "itertools.count": (itertools.count(), {}, ["itertools.count", "data.examples: N"]),
    "a repeated dataset": (lambda: dataset(X, Y).repeat(), {}, ["tf.data.Dataset with repeat()", "data.examples: N"]),
    "a PyDataset without a length": (Batches(workers=1), {}, ["without __len__", "data.examples: N"]),
}


def read_all(load: Callable[[], object], **keys: Any) -> None:
    checker = Checker(DataSpec(source="data.py:load"))
    for where, example in Reader(reference="data.py:load", **keys).read(load()):
        checker.check(where, example)


@pytest.mark.parametrize("name", REFUSED)
def test_source_is_refused_with_shapes_and_remedy(name: str) -> None:
    returned, keys, words = REFUSED[name]
    load = returned if callable(returned) else lambda: returned
    with pytest.raises(SourceError) as refused:
        read_all(load, **keys)
    message = str(refused.value)
    assert [word for word in words if word not in message] == [], message
    assert "data.py:load" in message


def test_sixty_sources_are_refused() -> None:
    assert len(REFUSED) >= 60


def test_repeat_with_a_number_is_not_endless() -> None:
    assert len(list(Reader(reference="data.py:load").read(itertools.repeat((X[0], 1), 3)))) == 3
