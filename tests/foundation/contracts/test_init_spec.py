"""`init:` of the run file: its short forms, its errors, and its JSON."""

from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.run_spec import InitSpec, RunSpec
from baton.tasks.foundation.errors import RunFileError

BASE = "run: a\nstorage: s\ndata: {source: digits}\nmodel: model.py:build\ntrain: {steps: 1, global_batch_size: 1}\n"


def read(tmp_path: Path, init: str, *overrides: str) -> RunSpec:
    (tmp_path / "run.yaml").write_text(f"{BASE}init: {init}\n")
    return load_run_file(tmp_path / "run.yaml", overrides).spec


@pytest.mark.parametrize(
    ("text", "sources", "freeze"),
    [
        ("{weights: x.keras}", [("x.keras", ("*",))], ()),
        ("{weights: {source: ../runs/a, step: best, include: enc}}", [("../runs/a", ("enc",))], ()),
        ("{weights: [x, {source: y, include: [a, b]}], freeze: enc}", [("x", ("*",)), ("y", ("a", "b"))], ("enc",)),
        ("{freeze: [a, b]}", [], ("a", "b")),
    ],
)
def test_init_accepts_short_and_long_forms(
    tmp_path: Path, text: str, sources: list[Any], freeze: tuple[str, ...]
) -> None:
    spec = read(tmp_path, text)
    assert [(each.source, each.include) for each in spec.init.weights] == sources
    assert spec.init.freeze == freeze
    assert RunSpec.from_json(spec.to_json(), where="here", error=RunFileError) == spec
    assert read(tmp_path, "{}", f"init={text}") == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{weights: 5}", "init.weights is 5: a source is an address, or a mapping of source, step, include"),
        ("{weights: {sauce: x}}", "source should be a .weights.h5 or .keras file"),
        ("{weights: {source: x, stirct: false}}", "stirct is no key of a source; the keys are source, step, include"),
        ("{weights: [a, {source: x, step: worst}]}", "step should be of a Baton run: which checkpoint"),
        ("{weights: {source: x, include: []}}", "include should be patterns of the model's variable paths"),
        ("{weights: {source: x, rename: [a]}}", "rename should be the model's names to the source's"),
        ("{freeze: 5}", "init.freeze is 5, which is not accepted; patterns of paths of layers or variables"),
    ],
)
def test_errors_within_init_name_their_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(RunFileError) as refused:
        read(tmp_path, text)
    assert words in str(refused.value)
    assert "run.yaml, line 6" in str(refused.value)


def test_init_defaults_to_nothing() -> None:
    assert InitSpec() == InitSpec(weights=(), freeze=())
