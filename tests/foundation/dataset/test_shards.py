"""Encoding examples into records, and parsing them back."""

import numpy as np
import pytest

from baton.tasks.foundation.contracts.dataset import Feature
from baton.tasks.foundation.dataset.features import flatten, unflatten

X, Y, W = np.ones((2, 2), np.float32), np.int64(3), np.float32(0.5)


@pytest.mark.parametrize(
    ("example", "names", "parts"),
    [
        (X, ["x"], 1),
        ((X,), ["x"], 1),
        ((X, Y), ["x", "y"], 2),
        ((X, Y, W), ["x", "y", "sample_weight"], 3),
        (({"b": X, "a": Y}, Y), ["x/b", "x/a", "y"], 2),
        (({"a/b": X}, {"out": Y}, W), ["x/a/b", "y/out", "sample_weight"], 3),
        ({"tokens": X}, ["x/tokens"], 1),
    ],
)
def test_example_survives_encoding_and_parsing(example: object, names: list[str], parts: int) -> None:
    flat = flatten(example)
    assert list(flat) == names
    back = unflatten(flat)
    assert len(back) == parts
    assert list(flatten(back)) == names
    for name, array in flatten(back).items():
        np.testing.assert_array_equal(array, flat[name])


def test_unflatten_keeps_tensors() -> None:
    import tensorflow as tf

    x, y = tf.ones([4, 2]), tf.zeros([4])
    assert unflatten({"x/a": x, "y": y})[0]["a"] is x
    assert flatten((x, y))["x"].shape == (4, 2)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (3, "int64"),
        (3.0, "float32"),
        (True, "bool"),
        ([1, 2], "int64"),
        ([[0.5], [1]], "float32"),
        (np.float64(3), "float64"),
        ([np.float64(3)], "float64"),
        (np.zeros(2), "float64"),
        (np.zeros(2, ">i2"), "int16"),
        (np.zeros(2, np.float16), "float16"),
    ],
)
def test_python_numbers_get_model_dtypes_and_arrays_keep_theirs(value: object, dtype: str) -> None:
    array = flatten(value)["x"]
    assert array.dtype.name == dtype
    assert array.dtype.newbyteorder("<") == array.dtype


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ((), "a tuple of 0"),
        ((X, Y, W, W), "a tuple of 4; yield x, (x, y) or (x, y, sample_weight)"),
        ((X, None), "y is None"),
        (({}, Y), "x is an empty dict"),
        ((X, Y, {}), "sample_weight is an empty dict"),
        (([X, ({}, Y)], Y), "x[1] is a nested tuple"),
        ({1: X}, "x has the key 1"),
        ({"": X}, "x has the key ''"),
        ({"a": {"b": X}}, "x/a is a nested dict"),
        ([[1, 2], [3]], "x is ragged"),
        ((X, ["cat", 1]), "y has dtype object[2] with a int at [1]"),
        ((X, object()), "y has dtype object"),
        (np.array([1, None]), "x has dtype object"),
        (np.zeros(2, np.longdouble), "x has dtype"),
        (np.zeros(2, "datetime64[s]"), "x has dtype datetime64[s]"),
    ],
)
def test_unsupported_examples_are_refused(example: object, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        flatten(example)
    assert expected in str(refused.value)


FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]
DTYPES = ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), *FLOATS]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (0,), (2, 0, 3)])
def test_every_dtype_is_preserved(dtype: str, shape: tuple[int, ...]) -> None:
    import tensorflow as tf

    from baton.tasks.foundation.dataset.shards import encode, parse

    rng = np.random.default_rng(0)
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        arrays = [rng.integers(limits.min, limits.max, shape, dtype, endpoint=True) for _ in range(3)]
    else:
        arrays = [np.asarray(rng.normal(size=shape) * 3).astype(dtype) for _ in range(3)]
    records = [encode({"x": np.asarray(array)}) for array in arrays]
    parsed = parse(tf.constant(records), [Feature(name="x", dtype=dtype, shape=shape)])["x"]
    assert parsed.dtype.name == dtype
    np.testing.assert_array_equal(parsed.numpy(), np.stack(arrays).reshape(3, *shape))


def test_record_does_not_depend_on_feature_order() -> None:
    from baton.tasks.foundation.dataset.shards import encode

    arrays = {f"x/{key}": np.arange(3) for key in "abcdefgh"}
    assert encode(arrays) == encode(dict(reversed(arrays.items())))
