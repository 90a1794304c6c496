"""What needs neither Prefect nor TensorFlow is refused before they are waited for."""

import sys
import textwrap
from pathlib import Path

import pytest

from flows.commands.main import main
from tasks.foundation.contracts.run_file import load_run_file

RUN = """
run: small
storage: ./runs
data: {source: "data.py:load"}
model: model.py:build
train: {steps: 2, global_batch_size: 8}
"""
REFUSED = {
    "a built-in source that is none": (["data={source: digit}"], ["data.source: 'digit'", "did you mean digits?"]),
    "an option that it has not": (
        ["data={source: csv, options: {path: t.csv, lable: y}}"],
        ["data.options.lable: 'y'", "did you mean label?"],
    ),
    "a file that is not there": (
        ["data={source: csv, options: {path: t.csv, label: y}}"],
        ["data.options.path: 't.csv'", "t.csv is not there", "model.py"],
    ),
    "batches": (["data.batched=true"], ["data.batched is true", "batches are not read yet", "yield from zip(x, y)"]),
    "a package of the model": (["model=other.py:build"], ["other.py, line 1, imports no_such_package"]),
    "a package of the data": (["data.source=other.py:load"], ["other.py:load: other.py, line 1"]),
    "a package of the callbacks": (["train.callbacks=other.py:build"], ["other.py:build: other.py, line 1"]),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    good = "def load(): ...\ndef build(): ...\n"
    for name, text in (("run.yaml", RUN), ("model.py", good), ("data.py", good)):
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    (tmp_path / "other.py").write_text(f"import no_such_package\n{good}", encoding="utf-8")
    return tmp_path / "run.yaml"


@pytest.mark.parametrize("name", REFUSED)
def test_the_command_refuses_it_at_once(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Whoever imports these fails: the command has to be done before.
    monkeypatch.setitem(sys.modules, "prefect", None)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    overrides, words = REFUSED[name]
    assert main(["run", str(file), *(word for override in overrides for word in ("--set", override))]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert [word for word in words if word not in told] == [], told
    assert not (file.parent / "runs").exists()


def test_what_stages_elsewhere_need_is_not_looked_for_here(file: Path) -> None:
    from flows.goal import require_packages_and_source

    overrides = ["data={source: csv, options: {path: t.csv, label: y}}", "model=other.py:build"]
    places = [f"stages.{stage}=a/b" for stage in ("prepare_data", "init_or_restore", "train_segment")]
    require_packages_and_source(load_run_file(file, [*overrides, *places]))


def test_a_mistyped_key_is_told_before_the_key_that_is_missing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(RUN.replace("steps:", "stepz:"), encoding="utf-8")
    assert main(["run", str(file)]) == 2
    told = capsys.readouterr().err
    assert "did you mean train.steps?" in told
    assert told.index("did you mean train.steps?") < told.index("train.steps is missing")
