"""The identity of a transform: its code, and the layers, arrays and tables that it uses."""

from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.model.model_identity import transforms_identity

CODE = """import functools

import keras
import numpy as np

from . import helpers

TURN = keras.layers.RandomRotation(0.1)
MEAN = np.asarray([0.5, 0.25])
TABLE = {"a": 1}
SCALE = 2.0


def augment(example, *, seed):
    def inner(x):
        return helpers.shift(TURN(x) - MEAN) * SCALE + TABLE["a"]
    return inner(example[0]), example[1]


def unused():
    return 1


made = functools.partial(augment)
"""
HELPERS = "SHIFT = [1, 2]\n\n\ndef shift(x):\n    return x + SHIFT[0]\n"


def identity(folder: Path, *edits: tuple[str, str], name: str = "augment") -> Any:
    """The recorded value of data.transform for an edited copy of the code."""
    code, helpers = CODE, HELPERS
    for old, new in edits:
        assert (code + helpers).count(old) >= 1
        code, helpers = code.replace(old, new), helpers.replace(old, new)
    folder.mkdir()
    (folder / "augment.py").write_text(code, encoding="utf-8")
    (folder / "helpers.py").write_text(helpers, encoding="utf-8")
    spec = RunSpec.model_validate(
        {
            "run": "r",
            "storage": "s",
            "data": {"source": "digits", "transform": f"augment.py:{name}"},
            "model": "model.py:build",
            "train": {"steps": 1, "global_batch_size": 1},
        }
    )
    found = transforms_identity(spec, folder)
    assert found["data.batch_transform"] is found["data.validation_transform"] is None
    return found["data.transform"]


@pytest.mark.parametrize("name", ["augment", "made"])
def test_another_folder_or_comment_is_the_same_transform(tmp_path: Path, name: str) -> None:
    one = identity(tmp_path / "one", name=name)
    edits = [
        ("def unused", "# A comment.\ndef unused"),
        ("RandomRotation(0.1)", "RandomRotation(0.1, seed=9, name='t')"),
    ]
    assert identity(tmp_path / "two", *edits[: 2 if name == "augment" else 1], name=name) == one


@pytest.mark.parametrize(
    "edit",
    [
        ("RandomRotation(0.1)", "RandomRotation(0.2)"),
        ("0.25", "0.26"),
        ('{"a": 1}', '{"a": 2}'),
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("SHIFT = [1, 2]", "SHIFT = [3, 2]"),
        ("x + SHIFT", "x - SHIFT"),
        ("inner(example[0])", "inner(-example[0])"),
    ],
)
def test_whatever_changes_the_result_changes_the_identity(tmp_path: Path, edit: tuple[str, str]) -> None:
    assert identity(tmp_path / "one") != identity(tmp_path / "two", edit)


def test_partial_function_has_the_digest_of_its_file(tmp_path: Path) -> None:
    one = identity(tmp_path / "one", name="made")
    assert identity(tmp_path / "two", ("0.25", "0.26"), name="made") != one
