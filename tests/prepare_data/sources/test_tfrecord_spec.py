"""Options of the source `tfrecord` that do not match the records."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from baton.tasks.foundation.errors import RunFileError
from tests.support.tfrecords import PLAIN, SPEC, file_of


def spec(**changed: Any) -> dict[str, Any]:
    return {"features": {**SPEC, **changed}}


KINDS = "code (bytes_list of 1), image (bytes_list of 1), label (int64_list of 1), values (float_list of 2)"
OPTIONS: list[tuple[Mapping[str, Any], list[str]]] = [
    ({"x": "value"}, ["data.options.x: 'value'", "has no such feature", "did you mean values?"]),
    ({"y": {"out": "lable"}}, ["data.options.y.out: 'lable'", "did you mean label?"]),
    ({"y": None, "sample_weight": "label"}, ["data.options.sample_weight: 'label'", "set data.options.y too"]),
    ({"sample_weight": "w"}, ["data.options.sample_weight: 'w'", "has no such feature"]),
    ({"x": {}}, ["data.options.x: {}", "each array needs a name"]),
    ({"x": 3}, ["data.options.x: 3"]),
    ({"features": {}}, ["data.options.features: {}", "the features of the records"]),
    (spec(label={"shape": []}), ["data.options.features.label.dtype is missing"]),
    (spec(label={"dtype": "int64", "shpe": []}), ["data.options.features.label.shpe", "the features of the records"]),
    (spec(label={"dtype": "int65"}), ["features.label.dtype: 'int65'", "did you mean int64?"]),
    (
        spec(label={"dtype": "complex64"}),
        ["features.label.dtype: 'complex64'", "encoding values does not support this dtype"],
    ),
    (spec(image={**SPEC["image"], "dtype": "int32"}), ["features.image.dtype: 'int32'", "available: float32, uint8"]),
    (spec(image={**SPEC["image"], "shape": [4, 5]}), ["features.image.shape: [4, 5]", "[height, width, channels]"]),
    (spec(image={**SPEC["image"], "shape": [4, 5, 2]}), ["features.image.shape: [4, 5, 2]", "1 or 3 channels"]),
    (spec(label={"dtype": "int64", "shape": [0]}), ["features.label.shape: [0]", "at least 1"]),
    ({**spec(lab={"dtype": "int64"}), "y": "lab"}, ["features.lab: {", "record 0 at byte 0", f"'lab'; it has {KINDS}"]),
    (
        {**spec(values={"dtype": "int64", "shape": [2]})},
        ["features.values: {'dtype': 'int64'", "part-0, record 0", "'values' is float_list, not int64_list"],
    ),
    ({"y": "image", **spec(image={"dtype": "int64"})}, ["'image' is bytes_list, not int64_list", "encoding"]),
    ({"x": "label", **spec(label={**SPEC["image"]})}, ["'label' is int64_list, not bytes_list"]),
    (spec(values={"dtype": "float32", "shape": [3]}), ["'values' has 2 values, but the shape [3] needs 3"]),
    (
        {"x": "code", **spec(code={"dtype": "int32", "shape": [3], "encoding": "raw"})},
        ["'code' has 6 bytes, but int32 [3] needs 12; correct dtype or shape"],
    ),
    ({"pth": "records"}, ["data.options.pth", "did you mean path?", "copy"]),
]


@pytest.mark.parametrize(("changed", "expected"), OPTIONS)
def test_invalid_tfrecord_options_are_refused(
    workshop: Any, files: Callable[..., Any], changed: Mapping[str, Any], expected: list[str]
) -> None:
    files(2)
    with pytest.raises(RunFileError) as refused:
        workshop.prepare("tfrecord", {**PLAIN, **changed})
    assert [part for part in expected if part not in str(refused.value)] == [], str(refused.value)
    assert workshop.files() == {}


def test_record_that_is_not_an_example_is_refused(workshop: Any) -> None:
    workshop.write("records", file_of([b"\xff\xff"], workshop.code))
    with pytest.raises(RunFileError, match=r"data\.options\.path: 'records': .*it is not a tf\.train\.Example"):
        workshop.prepare("tfrecord", PLAIN)
