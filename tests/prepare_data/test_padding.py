"""`data.pad`: sequences of different lengths become arrays of one shape, with nothing lost unless it is said."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.foundation.contracts.data_spec import DataSpec, PadRule
from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.errors import RunFileError, SourceError
from baton.tasks.prepare_data.sequences import Padding
from tests.prepare_data.conftest import Workshop

HEAD = """
import numpy as np
import tensorflow as tf
x = [list(range(1, n + 1)) for n in (3, 0, 5, 1)]
y = [0, 1, 2, 3]
"""
FORMS = {
    "examples": "zip(x, y)",
    "lists": "(x, y)",
    "array of lists": "(np.array(x, object), np.array(y))",
    "ragged tensor": "(tf.ragged.constant(x, tf.int64), np.array(y))",
    "dict": "({'x': np.array(x, object)}, np.array(y))",
    "dataset": "tf.data.Dataset.from_generator(lambda: zip(x, y), output_signature=(tf.TensorSpec([None], tf.int64), "
    "tf.TensorSpec([], tf.int64)))",
    "ragged batches": "tf.data.Dataset.from_tensor_slices((tf.ragged.constant(x, tf.int64), y)).batch(3)",
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_sequences_is_padded(form: str, workshop: Workshop) -> None:
    workshop.write("data.py", f"{HEAD}def load():\n    return {FORMS[form]}\n")
    ref = workshop.prepare("data.py:load", validation_fraction=0, pad={"x": 6})
    name = "x/x" if form == "dict" else "x"
    found = {int(each["y"]): each[name].tolist() for each in workshop.examples(ref)}
    assert found == {label: [*range(1, n + 1), *[0] * (6 - n)] for label, n in enumerate((3, 0, 5, 1))}
    assert {each.name: each.shape for each in load_manifest(workshop.storage, ref).features} == {name: (6,), "y": ()}


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    longest=st.integers(1, 12),
    inner=st.sampled_from([(), (2,)]),
    value=st.sampled_from([0, -1, 0.5]),
)
def test_padding_adds_at_the_end_alone(lengths: list[int], longest: int, inner: tuple[int, ...], value: float) -> None:
    padding = Padding({"x": PadRule(length=longest, value=value, longer="truncate")})
    for length in lengths:
        array = np.random.default_rng(length).normal(size=(length, *inner)).astype(np.float32)
        padded = padding.apply("here", {"x": array, "y": np.array(1)})["x"]
        kept = min(length, longest)
        assert padded.shape == (longest, *inner)
        assert padded.dtype == np.float32
        assert padded[:kept].tobytes() == array[:kept].tobytes()
        assert (padded[kept:] == np.float32(value)).all()


@pytest.mark.parametrize(
    ("pad", "words"),
    [
        ({"x": 4}, ["data.py:load, example 2: x has length 5, but data.pad.x is 4", "longer: truncate"]),
        ({"z": 6}, ["data.pad.z: the examples have no such feature; they have x, y"]),
        ({"x": 6, "y": 6}, ["example 0: data.pad.y: y is a single value, not a sequence"]),
        ({"x": {"length": 6, "value": 0.5}}, ["data.pad.x.value: 0.5", "int64"]),
        ({"x": {"length": 6, "value": "a"}}, ["data.pad.x.value: 'a'", "int64"]),
    ],
)
def test_padding_that_cannot_hold_is_refused(pad: Any, words: list[str], workshop: Workshop) -> None:
    workshop.write("data.py", f"{HEAD}def load():\n    return zip(x, y)\n")
    with pytest.raises(SourceError) as refused:
        workshop.prepare("data.py:load", validation_fraction=0, pad=pad)
    assert all(word in str(refused.value) for word in words), refused.value
    assert workshop.files() == {}


def test_truncated_and_other_padding_are_other_datasets(workshop: Workshop) -> None:
    workshop.write("data.py", f"{HEAD}def load():\n    return zip(x, y)\n")
    rules: list[Any] = [6, {"length": 6, "value": -1}, {"length": 4, "longer": "truncate"}]
    refs = [workshop.prepare("data.py:load", validation_fraction=0, pad={"x": rule}) for rule in rules]
    assert len({ref.folder for ref in refs}) == len(rules)
    rows = [{int(each["y"]): each["x"].tolist() for each in workshop.examples(ref)} for ref in refs]
    assert [each[2] for each in rows] == [[1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, -1], [1, 2, 3, 4]]


def test_text_is_padded_with_empty_strings(workshop: Workshop) -> None:
    workshop.write("data.py", "def load():\n    yield ['a', 'b'], 0\n    yield ['c'], 1\n")
    ref = workshop.prepare("data.py:load", validation_fraction=0, pad={"x": 3})
    assert {int(each["y"]): each["x"].tolist() for each in workshop.examples(ref)} == {
        0: [b"a", b"b", b""],
        1: [b"c", b"", b""],
    }


@pytest.mark.parametrize("rule", [0, -1, True, {"value": 0}, {"length": 3, "longer": "drop"}])
def test_wrong_rules_of_padding_are_refused(rule: Any) -> None:
    with pytest.raises(ValueError, match="pad"):
        DataSpec(source="data.py:load", pad={"x": rule})


@pytest.mark.parametrize("key", [{"pad": {"x": 4}}, {"pack": 4}])
def test_built_in_sources_are_not_padded_or_packed(key: dict[str, Any], workshop: Workshop) -> None:
    with pytest.raises(RunFileError, match="the source digits does not use it"):
        workshop.prepare("digits", **key)
