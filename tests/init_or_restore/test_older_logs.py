"""Logs without newer identity keys: the default of that time applies, and another value is a change."""

from typing import Any

import pytest

from tasks.foundation.contracts.identity import require_same_identity
from tasks.foundation.errors import IdentityChanged

OLD = {"train.seed": 0, "train.global_batch_size": 8}
NOW = {
    **OLD,
    "train.accumulate": 1,
    "train.precision": None,
    "train.class_weight": None,
    "train.callbacks": None,
    "init.weights": [],
    "init.freeze": [],
}


def test_older_log_is_continued() -> None:
    assert require_same_identity(OLD, NOW, home="runs/old") == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.accumulate", 4),
        ("train.precision", "bfloat16"),
        ("train.class_weight", {"0": 2.0}),
        ("train.callbacks", {"function": "build"}),
        ("init.freeze", ["encoder/*"]),
    ],
)
def test_older_log_refuses_another_value(key: str, value: Any) -> None:
    with pytest.raises(IdentityChanged, match=key):
        require_same_identity(OLD, {**NOW, key: value}, home="runs/old")
    (found, *_) = require_same_identity(OLD, {**NOW, key: value}, home="runs/old", accept=[key])
    assert found.of == key
