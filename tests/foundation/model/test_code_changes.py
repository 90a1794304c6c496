"""What changed in the user's code since its home saved it: shown by statement, with file, line and function."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.home_files import SAVED_CODE, SavedCode, SavedFile, saved_code_path
from baton.tasks.foundation.contracts.identity import require_same_identity
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import IdentityChanged
from baton.tasks.foundation.model.code_changes import (
    CodeReason,
    certain_changes,
    changes_since_saved,
    code_changes,
    lines_of,
)
from baton.tasks.foundation.model.saved_code import save_code
from baton.tasks.foundation.storage.local import LocalStorage

MODEL = '''
"""The model."""
import keras
from . import layers

WIDTH = 4


@keras.saving.register_keras_serializable()
class Block(keras.layers.Layer):
    """Doubles."""

    def __init__(self, units=4):
        super().__init__()
        self.units = units  # as many

    def call(self, x):
        if self.units > 2:
            return x * 2.0
        return x


def build(rate=0.1):
    model = keras.Sequential([
        keras.Input((6,)),
        keras.layers.Dense(WIDTH),  # hidden
        Block(),
        layers.last(),
    ])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model
'''
LAYERS = "import keras\n\n\ndef last():\n    return keras.layers.Dense(1)\n"
FILES = {"model.py": MODEL, "layers.py": LAYERS}
IDENTITY = {"model.code": {"model.Block": "a" * 16}, "model.config": {"layers": 3}}


def spec_of(**train: Any) -> RunSpec:
    common = {"run": "r", "storage": "s", "data": {"source": "digits"}, "model": "model.py:build"}
    return RunSpec.model_validate({**common, "train": {"steps": 2, "global_batch_size": 8, **train}})


def edited(folder: Path, *edits: tuple[str, str, str]) -> tuple[SavedCode, RunSpec]:
    """Save the code, and write it with edits: (file, old text, new text)."""
    saved = SavedCode.of(spec_of(), {name: text.encode() for name, text in FILES.items()})
    now = dict(FILES)
    for file, old, new in edits:
        assert now[file].count(old) == 1, old
        now[file] = now[file].replace(old, new)
    for name, text in now.items():
        (folder / name).write_text(text, encoding="utf-8")
    return saved, spec_of()


def shown(folder: Path, *edits: tuple[str, str, str]) -> str:
    saved, spec = edited(folder, *edits)
    return "\n".join(lines_of(code_changes(saved, spec, folder)))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("model.py", "  # as many", "  # as few"),
        ("model.py", '"""Doubles."""', '"""Doubles.\n\n    Twice.\n    """'),
        ("model.py", "    return model\n", "    # compiled\n\n    return (model)\n"),
        ("model.py", "        keras.Input((6,)),\n", "        keras.Input(\n            (6,)\n        ),\n"),
        ("layers.py", "import keras\n\n\n", "import keras\n"),
    ],
)
def test_comments_docstrings_and_layout_are_no_change(tmp_path: Path, file: str, old: str, new: str) -> None:
    assert shown(tmp_path, (file, old, new)) == ""


def test_lines_that_differ_are_shown_with_file_line_and_function(tmp_path: Path) -> None:
    edits = [
        ("model.py", "return x * 2.0", "return x * 3.0"),
        ("model.py", "  # as many", "  # more"),
        ("layers.py", "1)", "2)"),
    ]
    text = """
    layers.py:5, in last:
        def last():
      -     return keras.layers.Dense(1)
      +     return keras.layers.Dense(2)
    model.py:19, in Block.call:
        if self.units > 2:
      -     return x * 2.0
      +     return x * 3.0
        return x
    """
    assert shown(tmp_path, *edits) == textwrap.dedent(text).strip()


def test_a_statement_of_several_lines_is_shown_by_its_lines_that_differ_without_comments(tmp_path: Path) -> None:
    edits = [
        ("model.py", "Dense(WIDTH),  # hidden", "Dense(8),  # wider"),
        ("model.py", "        Block(),\n", "        Block(),  # own\n"),
    ]
    text = """
    model.py:26, in build:
        keras.Input((6,)),
      - keras.layers.Dense(WIDTH),
      + keras.layers.Dense(8),
        Block(),
    """
    assert shown(tmp_path, *edits) == textwrap.dedent(text).strip()


def test_new_gone_and_other_statements_are_shown(tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text("def twice(x):\n    return 2 * x\n", encoding="utf-8")
    block = MODEL[MODEL.index("@keras") : MODEL.index("def build")]
    edits = [("model.py", block, ""), ("model.py", "from . import layers\n", "from . import layers, more\n")]
    found = shown(tmp_path, *edits, ("model.py", "WIDTH = 4", "WIDTH = 5"))
    assert found.endswith("\nmore.py:1, in twice:\n  + def twice(x):\n  +     return 2 * x")
    assert "model.py:9, in Block is gone; it was:\n  - @keras.saving" in found
    assert "model.py:4:\n" in found
    assert "\n  + from . import layers, more\n  + WIDTH = 5\n" in found


def test_a_long_diff_is_cut_and_secrets_are_masked(tmp_path: Path) -> None:
    lines = "".join(f"    value{number} = {number}\n" for number in range(50))
    secret = f'    login(password="hunter2", token="{"x" * 200}")\n'
    found = shown(tmp_path, ("layers.py", "def last():\n", f"def last():\n{secret}{lines}")).split("\n")
    assert len(found) <= 20
    assert max(map(len, found)) < 130
    assert found[0] == "layers.py:5, in last:"
    assert found[-1].endswith("more lines")
    assert "hunter2" not in "".join(found)


def require(folder: Path, saved: SavedCode, spec: RunSpec, now: dict[str, Any]) -> None:
    home = LocalStorage(folder / "home")
    data = saved.to_json()
    home.write(saved_code_path(data), data)
    recorded = {**IDENTITY, SAVED_CODE: saved_code_path(data)}
    reason = CodeReason(home=home, recorded=recorded, spec=spec, folder=folder)
    require_same_identity(recorded, {**IDENTITY, **now}, home="/runs/r", code=reason)


def test_a_refusal_shows_the_function_whose_digest_differs(tmp_path: Path) -> None:
    """Others have changed too, and still build the same model."""
    saved, spec = edited(tmp_path, ("model.py", "* 2.0", "* 3.0"), ("layers.py", "(1)", "(units=1)"))
    with pytest.raises(IdentityChanged) as refused:
        require(tmp_path, saved, spec, {"model.code": {"model.Block": "b" * 16}})
    assert str(refused.value).split("\n")[:8] == [
        "/runs/r was started with other settings, data or code",
        "  model.code.model.Block: changed",
        "  model.py:19, in Block.call:",
        "      if self.units > 2:",
        "    -     return x * 2.0",
        "    +     return x * 3.0",
        "      return x",
        "hint: restore the lines with - in place of those with +",
    ]
    with pytest.raises(IdentityChanged, match=r"layers\.py:5, in last:\n(.*\n)*  model\.py:19"):
        require(tmp_path, saved, spec, {"model.config": {"layers": 4}})


def test_a_function_that_the_identity_names_is_a_change_for_certain(tmp_path: Path) -> None:
    saved, spec = edited(tmp_path, ("model.py", "* 2.0", "* 3.0"))
    changes = code_changes(saved, spec, tmp_path)
    now = certain_changes(changes, IDENTITY, spec, tmp_path)
    assert now["model.code"]["model.Block"] != IDENTITY["model.code"]["model.Block"]
    assert certain_changes(changes, {}, spec, tmp_path) == {}, "the model may not use it"


@pytest.mark.parametrize(
    "edits",
    [
        [("model.py", "Dense(WIDTH)", "Dense(units=WIDTH)")],
        [("model.py", "* 2.0", "* 3.0"), ("layers.py", "(1)", "(units=1)")],
        [("model.py", "class Block(", "class Other(")],
        [("model.py", "* 2.0", "* 3.0"), ("model.py", "WIDTH = 4\n", "class Block: ...\n")],
    ],
)
def test_what_may_build_the_same_model_is_no_change_for_certain(
    tmp_path: Path, edits: list[tuple[str, str, str]]
) -> None:
    saved, spec = edited(tmp_path, *edits)
    changes = code_changes(saved, spec, tmp_path)
    assert changes
    assert certain_changes(changes, IDENTITY, spec, tmp_path) == {}


@pytest.mark.parametrize("damage", ["another number", "torn", "missing", "too large"])
def test_damaged_saved_code_is_said_and_compared_with_nothing(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved, spec = edited(tmp_path)
    home, data = LocalStorage(tmp_path / "home"), saved.to_json()
    path = saved_code_path(data)
    harmed = {"another number": data.replace(b"* 2.0", b"* 4.0"), "torn": data[:-9], "too large": b" " * (64 << 20)}
    home.write(path, data)
    assert changes_since_saved(home, {SAVED_CODE: path}, spec, tmp_path) == ()
    assert caplog.messages == []
    home.delete(path) if damage == "missing" else (tmp_path / "home" / path).write_bytes(harmed[damage])
    for _ in range(2):
        assert changes_since_saved(home, {SAVED_CODE: path}, spec, tmp_path) == ()
    [warning] = caplog.messages
    assert warning.startswith(
        f"{path}, the saved code, cannot be read, which no training needs; restore it from a backup"
    )
    assert f"--run-file FILE: {home.uri}/{path}" in warning


def test_damaged_saved_code_is_written_again_where_it_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, spec = edited(tmp_path)
    home = LocalStorage(tmp_path / "home")
    path = save_code(home, spec, tmp_path)[SAVED_CODE]
    whole = home.read(path)
    for damaged in (whole[:100], whole.replace(b"2.0", b"4.0"), b" " * (64 << 20)):
        (tmp_path / "home" / path).write_bytes(damaged)
        caplog.clear()
        assert save_code(home, spec, tmp_path) == {SAVED_CODE: path}
        assert home.read(path) == whole
        assert caplog.messages == [f"{home.uri}/{path} was damaged, and is written once more"]
    caplog.clear()
    save_code(home, spec, tmp_path)
    assert caplog.messages == []


def test_a_home_whose_code_cannot_be_compared_changes_nothing(tmp_path: Path) -> None:
    deep, spec = f"x = {'-' * 5000}1\n".encode(), spec_of()
    (tmp_path / "model.py").write_bytes(deep + b"def build(): ...\n")
    for file in (SavedFile.of("model.py", deep), SavedFile(path="model.py", base64="a")):
        data = SavedCode(run_file=spec, files=(file,)).to_json()
        home = LocalStorage(tmp_path / "home")
        home.write(saved_code_path(data), data)
        assert changes_since_saved(home, {SAVED_CODE: saved_code_path(data)}, spec, tmp_path) == ()
