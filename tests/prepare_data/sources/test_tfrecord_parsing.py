"""Records of the source `tfrecord` that differ from its options."""

from typing import Any

import pytest

from baton.tasks.foundation.errors import SourceError
from tests.support.tfrecords import PLAIN, SPEC, file_of, png, record

LATER: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "missing": ({"drop": "values"}, {}, ["it has no feature 'values'; it has code (bytes_list of 1)"]),
    "another kind": ({"values": [1, 2]}, {}, ["'values' is int64_list, not float_list"]),
    "too many": ({"label": [1, 2]}, {}, ["'label' has 2 values, but the shape [] needs 1"]),
    "of another length": ({"code": [b"1234"]}, {}, ["'code' has 4 bytes, but int16 [3] needs 6"]),
    "no image": ({"image": [b"GIF89a"]}, {}, ["'image' is GIF; save it as JPEG or PNG"]),
    "cut image": ({"image": "cut"}, {}, ["'image' is a PNG that is truncated or damaged"]),
    "NaN": ({"values": [0.0, float("nan")]}, {}, ["x/v contains nan at [1]", "data.allow_nan"]),
}


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("case", LATER)
def test_later_record_of_another_kind_is_named(workshop: Any, case: str, copy: bool) -> None:
    changed, data, expected = LATER[case]
    if changed.get("image") == "cut":
        changed = {"image": [png(1, 90, 90)[:-40]]}
    made = [record(each) for each in range(5)]
    workshop.write("records", file_of([*made, record(5, **changed), record(6, **changed)], workshop.code))
    options = {**PLAIN, "x": {"v": "values", "c": "code", "i": "image"}, "copy": copy}
    with pytest.raises(SourceError) as refused:
        workshop.prepare("tfrecord", options, shard_examples=1, **data)
    place = f"records, record 5 at byte {sum(16 + len(each) for each in made)}: "
    assert [part for part in (place, *expected) if part not in str(refused.value)] == [], str(refused.value)
    assert workshop.files() == {}


@pytest.mark.parametrize(
    ("dtype", "value"), [("uint8", 256), ("uint8", -1), ("int8", 200), ("bool", 2), ("uint64", -5), ("uint32", 2**32)]
)
def test_integer_out_of_range_is_refused(workshop: Any, dtype: str, value: int) -> None:
    workshop.write("records", file_of([record(0), record(1), record(2, label=[value])], workshop.code))
    options = {**PLAIN, "features": {**SPEC, "label": {"dtype": dtype}}}
    with pytest.raises(
        SourceError, match=rf"record 2 at byte \d+: 'label' contains {value}, which does not fit into {dtype}"
    ):
        workshop.prepare("tfrecord", options)
