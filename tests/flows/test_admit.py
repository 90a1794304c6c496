"""Checks that need neither Prefect nor TensorFlow run before either is imported."""

import sys
import textwrap
from pathlib import Path

import pytest

from flows.commands.main import main
from tasks.foundation.contracts.run_file import load_run_file
from tests.support.fake_run import FakeRun

RUN = """
run: small
storage: ./runs
data: {source: "data.py:load"}
model: model.py:build
train: {steps: 2, global_batch_size: 8}
"""
REFUSED = {
    "an unknown built-in source": (["data={source: digit}"], ["data.source: 'digit'", "did you mean digits?"]),
    "an unknown option of a source": (
        ["data={source: csv, options: {path: t.csv, lable: y}}"],
        ["data.options.lable: 'y'", "did you mean label?"],
    ),
    "a missing file": (
        ["data={source: csv, options: {path: t.csv, label: y}}"],
        ["data.options.path: 't.csv'", "t.csv does not exist", "model.py"],
    ),
    "a key of another source": (
        ["data={source: digits, examples: 5}"],
        ["data.examples: 5: the source digits does not use it", "remove it"],
    ),
    "a missing package of the model": (["model=other.py:build"], ["other.py, line 1, imports no_such_package"]),
    "a missing package of the data": (["data.source=other.py:load"], ["other.py:load: other.py, line 1"]),
    "a missing package of the callbacks": (["train.callbacks=other.py:build"], ["other.py:build: other.py, line 1"]),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    good = "def load(): ...\ndef build(): ...\n"
    for name, text in (("run.yaml", RUN), ("model.py", good), ("data.py", good)):
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    (tmp_path / "other.py").write_text(f"import no_such_package\n{good}", encoding="utf-8")
    return tmp_path / "run.yaml"


@pytest.mark.parametrize("name", REFUSED)
def test_input_is_refused_before_prefect_and_tensorflow_import(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Importing these modules now fails, so the command must end before it.
    monkeypatch.setitem(sys.modules, "prefect", None)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    overrides, words = REFUSED[name]
    assert main(["run", str(file), *(word for override in overrides for word in ("--set", override))]) == 2
    stderr = " ".join(capsys.readouterr().err.split())
    assert [word for word in words if word not in stderr] == [], stderr
    assert not (file.parent / "runs").exists()


def test_requirements_of_remote_stages_are_not_checked(file: Path) -> None:
    from flows.admit import require_packages_and_source
    from flows.opened_run import Run

    overrides = ["data={source: csv, options: {path: t.csv, label: y}}", "model=other.py:build"]
    places = [f"stages.{stage}=a/b" for stage in ("prepare_data", "init_or_restore", "train_segment")]
    require_packages_and_source(Run.open(load_run_file(file, [*overrides, *places])))


def test_a_mistyped_key_is_reported_before_the_missing_key(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(RUN.replace("global_batch_size:", "global_batch_sise:"), encoding="utf-8")
    assert main(["run", str(file)]) == 2
    stderr = capsys.readouterr().err
    assert "did you mean train.global_batch_size?" in stderr
    assert stderr.index("did you mean train.global_batch_size?") < stderr.index("train.global_batch_size is missing")


def test_changed_identity_is_refused_before_imports(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("prefect", "tensorflow"):
        monkeypatch.setitem(sys.modules, name, None)
    (file.parent / "model.py").write_text("def build_model(): ...\n", encoding="utf-8")
    run = FakeRun(file.parent).train(100)
    assert main(["run", str(run.run_file()), "--set", "train.seed=1"]) == 2
    assert "train.seed: 0 -> 1" in capsys.readouterr().err


def test_run_without_progress_is_refused_before_imports(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("prefect", "tensorflow"):
        monkeypatch.setitem(sys.modules, name, None)
    (file.parent / "model.py").write_text("def build_model(): ...\n", encoding="utf-8")
    run = FakeRun(file.parent).train(100)
    for number in range(2):
        run.attempt(f"{number}" * 32, process="gone", ended="error")
    assert main(["run", str(run.run_file()), "--set", "stop.attempts_without_progress=2"]) == 1
    assert "2 attempts in a row" in capsys.readouterr().err
