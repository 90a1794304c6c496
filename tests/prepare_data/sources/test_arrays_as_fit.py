"""Whole arrays become what Keras's own adapters make of them, form by form; what Baton refuses, it names."""

from collections.abc import Callable
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.dataset.features import unflatten
from baton.tasks.foundation.errors import SourceError
from baton.tasks.prepare_data.example_checks import Checker
from baton.tasks.prepare_data.sources.function import Reader

N = 6
Y = np.arange(N)
F = np.linspace(0.1, 1.3, N)
F.flags.writeable = False
TEXT = list("abcdef")
# Baton takes it, though Keras does not.
ONLY_HERE = "only here"
SAME = "same"

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", ">i4")
NUMBERS = ("bool", *INTEGERS, "float16", "float32", "float64", ">f8", ">f4", "complex64", "complex128")


def square(dtype: Any) -> Any:
    return np.linspace(0, 9.7, 2 * N).reshape(N, 2).astype(dtype)


def series(dtype: str, values: Any = range(N)) -> Any:
    return pd.Series(np.asarray(values)).astype(dtype)


def frame(*dtypes: str) -> Any:
    """Columns of numbers; their names are not in alphabetical order."""
    columns = {
        name: series(dtype, np.arange(N) + at) for at, (name, dtype) in enumerate(zip("cab", dtypes, strict=False))
    }
    return pd.DataFrame(columns)


def in_keras(*given: Any) -> Any:
    return next(iter(get_data_adapter(*given, batch_size=N).get_tf_dataset()))


def here(*given: Any) -> tuple[Any, list[str]]:
    notes: list[str] = []
    checker = Checker(DataSpec(source="data.py:load"))
    rows = [
        checker.check(*located)
        for located in Reader(reference="data.py:load", note=lambda note: notes.append(note.text)).read(given)
    ]
    return unflatten({name: np.stack([row[name] for row in rows]) for name in rows[0]}), notes


def dense(value: Any) -> Any:
    return tf.sparse.to_dense(value).numpy() if isinstance(value, tf.SparseTensor) else value.numpy()


def assert_same(mine: Any, of_keras: Any) -> None:
    if isinstance(of_keras, dict):
        assert list(mine) == list(of_keras)
        for key, value in of_keras.items():
            assert_same(mine[key], value)
    elif isinstance(of_keras, tuple):
        assert isinstance(mine, tuple)
        assert len(mine) == len(of_keras)
        for one, other in zip(mine, of_keras, strict=True):
            assert_same(one, other)
    else:
        expected = dense(of_keras)
        assert (mine.dtype, mine.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(mine, expected)


NUMPY = {
    **{f"NumPy {dtype}": (lambda dtype=dtype: square(dtype), SAME) for dtype in NUMBERS},
    "NumPy bfloat16": (lambda: square(ml_dtypes.bfloat16), SAME),
    "NumPy longdouble": (lambda: square("longdouble"), ["x has dtype float128"]),
    "NumPy of one dimension": (lambda: F, SAME),
    "NumPy of four dimensions": (lambda: np.ones((N, 2, 3, 1)), SAME),
    "NumPy without columns": (lambda: np.ones((N, 0)), SAME),
    "NumPy in Fortran order": (lambda: np.asfortranarray(square("f8")), SAME),
    "NumPy, every second row": (lambda: np.linspace(0, 1, 2 * N)[::2], SAME),
    "NumPy matrix": (lambda: np.asmatrix(np.eye(N)), SAME),
    "NumPy, nothing masked": (lambda: np.ma.masked_array(F, mask=False), SAME),
    "NumPy, one masked": (lambda: np.ma.masked_array(F, mask=Y == 1), ["masked array", "x.filled(0)"]),
    "NumPy text": (lambda: np.array(TEXT), ONLY_HERE),
    "NumPy bytes": (lambda: np.array([b"a"] * N), ONLY_HERE),
    "NumPy objects, text": (lambda: np.array(TEXT, object), SAME),
    "NumPy objects, columns of text": (lambda: np.array(TEXT, object)[:, None], ONLY_HERE),
    "NumPy objects, numbers": (lambda: Y.astype(object), ["x has dtype object[6] with a int at [0]"]),
    "NumPy dates": (lambda: Y.astype("datetime64[D]"), ["datetime64[D]", "give seconds"]),
    "NumPy durations": (lambda: Y.astype("timedelta64[h]"), ["timedelta64[h]", "give seconds"]),
    "NumPy structured": (lambda: np.zeros(N, [("a", "f4"), ("b", "i4")]), ["x.dtype.names"]),
    "NumPy records": (lambda: np.rec.fromarrays([F, Y], names="a,b"), ["x.dtype.names"]),
}
PANDAS = {
    **{
        f"Series of {dtype}": (lambda dtype=dtype: series(dtype), SAME)
        for dtype in ("bool", "int8", "int64", "uint8", "float16", "float32", "float64", "string")
    },
    "Series with another index": (lambda: pd.Series(F, index=[5, 3, 1, 0, 2, 4]), SAME),
    "Series sorted by its index": (lambda: pd.Series(F, index=[5, 3, 1, 0, 2, 4]).sort_index(), SAME),
    "Series of Int64": (lambda: series("Int64"), ONLY_HERE),
    "Series of Float64": (lambda: series("Float64"), ONLY_HERE),
    "Series of Int64 with a gap": (
        lambda: pd.Series([1, None] * 3, dtype="Int64"),
        ["x has missing values", "x.fillna(0)"],
    ),
    "Series of boolean with a gap": (lambda: pd.Series([True, None] * 3, dtype="boolean"), ["x has missing values"]),
    "Series of text": (lambda: pd.Series(TEXT), ONLY_HERE),
    "Series of text with a gap": (lambda: pd.Series(["a", None] * 3), ["missing value", "fillna"]),
    "Series of categories": (lambda: pd.Series(TEXT).astype("category"), ONLY_HERE),
    "Series of dates": (lambda: pd.Series(pd.date_range("2020", periods=N)), ["datetime64", "give seconds"]),
    "Series of dates with a zone": (lambda: pd.Series(pd.date_range("2020", periods=N, tz="UTC")), ["Timestamp"]),
    "Series of mixed objects": (lambda: pd.Series(["a", 1] * 3), ["with a int at [1]"]),
    "sparse Series": (lambda: pd.Series(pd.arrays.SparseArray(F)), ONLY_HERE),
    "Index": (lambda: pd.Index(F), SAME),
    "RangeIndex": (lambda: pd.RangeIndex(N), SAME),
    "array of pandas": (lambda: pd.array(list(range(N))), SAME),
    "Categorical": (lambda: pd.Categorical(TEXT), ONLY_HERE),
    **{
        f"frame of {dtypes}": (lambda dtypes=dtypes: frame(*dtypes.split()), SAME)
        for dtypes in (
            "float64",
            "float32",
            "bool bool",
            "int64 int64",
            "int64 int32",
            "uint8 int8",
            "int64 uint64",
            "float32 float32",
            "float64 float64",
            "float16 float16",
            "float64 float32",
            "float16 int64",
            "float32 int64",
            "float64 int64 bool",
            "int64 bool float64",
            "float64 Int64",
        )
    },
    **{
        f"frame of {dtypes}": (lambda dtypes=dtypes: frame(*dtypes.split()), ["c ", "a ", "no dtype in common", remedy])
        for dtypes, remedy in {
            "int64 bool": 'x.astype("float32")',
            "float32 bool": 'x.astype("float32")',
            "float32 int64 bool": 'x.astype("float32")',
            "float64 string": "dict(x)",
            "float64 category": "dict(x)",
            "int64 category": "dict(x)",
            "float32 object": "dict(x)",
            "int64 datetime64[ns]": "dict(x)",
        }.items()
    },
    "frame of Int64 float64": (lambda: frame("Int64", "float64"), ONLY_HERE),
    "frame of large integers": (lambda: pd.DataFrame({"a": F, "b": np.arange(N) + 2**53 + 1}), SAME),
    "frame with a gap": (
        lambda: pd.DataFrame({"a": F, "b": pd.array([1, None] * 3)}),
        ["x has missing values", "x.fillna(0)"],
    ),
    "frame with NaN": (lambda: pd.DataFrame({"a": [1.0, None] * 3}), ["x contains nan"]),
    "frame of text": (lambda: pd.DataFrame({"a": TEXT, "b": TEXT}), ONLY_HERE),
    "frame with another index": (lambda: frame("float64", "int64").iloc[::-1], SAME),
    "frame with two columns of one name": (lambda: pd.concat([frame("float64")] * 2, axis=1), SAME),
    "frame of some rows": (lambda: pd.DataFrame({"a": np.arange(9.0), "b": 1}).iloc[1 : N + 1], SAME),
    "dict of a frame": (lambda: dict(frame("float64", "int64", "bool")), SAME),
    "dict of text and numbers": (lambda: dict(pd.DataFrame({"b": F, "a": pd.array(TEXT, "string")})), SAME),
}
TENSORS = {
    **{
        f"tensor of {dtype}": (lambda dtype=dtype: tf.cast(tf.reshape(tf.range(2 * N), (N, 2)), dtype), SAME)
        for dtype in ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    },
    "tensor of text": (lambda: tf.constant(TEXT), SAME),
    "tf.Variable": (lambda: tf.Variable(F), SAME),
    "keras.Variable": (lambda: keras.Variable(F), SAME),
    "ragged tensor": (lambda: tf.ragged.constant([[1.0], [2.0, 3.0]] * 3), ["RaggedTensor", "to_tensor"]),
    # As dense arrays: shards hold no sparse ones.
    "sparse tensor": (lambda: tf.sparse.from_dense(np.eye(N)), SAME),
    "sparse matrix": (lambda: scipy.sparse.csr_matrix(np.eye(N)), SAME),
    "sparse matrix of integers": (lambda: scipy.sparse.coo_matrix(np.eye(N, dtype="i4")), SAME),
    "sparse array": (lambda: scipy.sparse.csr_array(np.eye(N)), SAME),
}
STRUCTURES = {
    "list of numbers": (F.tolist, ONLY_HERE),
    "list of lists": (lambda: square("f8").tolist(), ONLY_HERE),
    "list of two arrays": (lambda: [F, Y], SAME),
    "list of one array": (lambda: [F], SAME),
    "list of arrays and Series": (lambda: [F, pd.Series(F)], SAME),
    "tuple of two arrays": (lambda: (square("f8"), Y), SAME),
    "dict": (lambda: {"b": F, "a": Y}, SAME),
    "dict in a dict": (lambda: {"a": {"b": F}}, ["x/a is a nested dict"]),
    "tuple in a dict": (lambda: {"a": (F, F)}, ["x/a is a nested tuple"]),
    "dict in a tuple": (lambda: ({"a": F}, F), ["x[0] is a nested dict"]),
    "arrays of other lengths": (lambda: [F, F[:-1]], ["different lengths", "float64[5]"]),
    "list of rows of other lengths": (lambda: [[1.0], [2.0, 3.0]] * 3, ["x is ragged", "data.pad"]),
    "None": (lambda: None, ["different lengths: x None"]),
}
FORMS: dict[str, tuple[Callable[[], Any], Any]] = NUMPY | PANDAS | TENSORS | STRUCTURES
LABELS: dict[str, tuple[Callable[[], tuple[Any, ...]], Any]] = {
    "float64 labels": (lambda: (F, F), SAME),
    "a Series of labels": (lambda: (F, pd.Series(F)), SAME),
    "a frame of labels": (lambda: (F, frame("float64", "int64")), SAME),
    "two outputs": (lambda: (F, [F, pd.Series(Y)]), SAME),
    "named outputs": (lambda: (F, {"q": F, "p": Y}), SAME),
    "float64 weights": (lambda: (F, Y, F), SAME),
    "integer weights": (lambda: (F, Y, Y), SAME),
    "a Series of weights": (lambda: (F, Y, pd.Series(F)), SAME),
    "a Series of weights for a Series": (lambda: (F, pd.Series(Y), pd.Series(F)), SAME),
    "weights for two outputs": (lambda: (F, [F, Y], [F, F]), SAME),
    "weights by name": (lambda: (F, {"q": F, "p": Y}, {"q": F, "p": F}), SAME),
    "one array of weights for two outputs": (lambda: (F, [F, Y], F), SAME),
    "a Series of weights for named outputs": (lambda: (F, {"q": F, "p": Y}, pd.Series(F)), SAME),
    "weights with several numbers": (lambda: (F, [F, F], square("f4")), ["sample_weight has several numbers"]),
    "weights with more dimensions": (lambda: (F, Y, square("f4")), ["cannot weigh the labels"]),
}
ROWS = {name: (lambda form=form: (form(), Y), wanted) for name, (form, wanted) in FORMS.items()} | LABELS


def test_table_is_large() -> None:
    assert len(ROWS) > 100


@pytest.mark.parametrize("name", ROWS)
def test_arrays_are_those_of_fit_or_refused_by_name(name: str) -> None:
    form, wanted = ROWS[name]
    if isinstance(wanted, list):
        with pytest.raises(SourceError) as refused:
            here(*form())
        assert [word for word in wanted if word not in str(refused.value)] == [], refused.value
        return
    if wanted is ONLY_HERE:
        with pytest.raises((ValueError, IndexError)):
            in_keras(*form())
        here(*form())
        return
    assert_same(here(*form())[0], in_keras(*form()))
