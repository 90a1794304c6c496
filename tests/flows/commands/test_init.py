"""`baton init` writes a run that trains, and a command without a run file takes ./run.yaml."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from baton.flows.commands.main import VERBS as DESCRIBED
from baton.flows.commands.main import app, main
from baton.flows.opened_run import OpenedRun
from baton.flows.result import Goal
from baton.flows.train import train
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.telemetry.events import Silent

VERBS = list(getattr(typer.main.get_command(app), "commands"))  # noqa: B009 - a group has it, a command has not
# What these need besides the run.
REQUIRED = {"fork": ["--as", "other"], "export": ["--format", "keras", "--to", "x.keras"]}


def test_files_are_written_into_a_new_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "below" / "spirals"
    assert main(["init", str(folder)]) == 0
    assert sorted(file.name for file in folder.iterdir()) == ["data.py", "model.py", "run.yaml"]
    assert f"cd {folder} && baton run" in capsys.readouterr().out


def test_json_names_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "folder": str(tmp_path),
        "files": ["run.yaml", "model.py", "data.py"],
    }


@pytest.mark.parametrize("name", ["run.yaml", "model.py", "data.py"])
def test_nothing_is_overwritten(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).symlink_to("nowhere")
    assert main(["init", str(tmp_path)]) == 2
    assert f"{tmp_path / name} is already there" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["init", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


# These take no run file, or, as `delete`, one that is named.
WITHOUT_RUN_FILE = {"init", "compare", "delete", "hosts", "slice-server"}


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in WITHOUT_RUN_FILE])
def test_missing_run_file_leads_to_init(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([verb, *REQUIRED.get(verb, [])]) == 2
    assert capsys.readouterr().err == (
        "error: there is no run.yaml in this folder\nhint: name a run file, or write one with: baton init\n"
    )
    assert not list(tmp_path.iterdir())


def test_command_without_arguments_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("Usage: baton")
    assert not printed.err


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_fits_into_80_columns(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = [verb] if verb else []
    assert main([*words, "--help"]) == 0
    printed = capsys.readouterr().out
    assert main([*words, "-h"]) == 0
    assert capsys.readouterr().out == printed
    assert max(map(len, printed.splitlines())) <= 80
    assert not re.search(r"\w\.\.\.$", printed, flags=re.MULTILINE)  # typer cuts what does not fit
    assert not verb or f"Examples:\n    baton {verb}" in printed
    assert not verb or f"\n\n  {DESCRIBED[verb].summary}\n" in printed


def test_shell_completes_verbs() -> None:
    asked = {"_BATON_COMPLETE": "complete_bash", "COMP_WORDS": "baton st", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "baton.flows.commands.main"],
        env=os.environ | asked, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["status"], done.stderr


@pytest.mark.slow
def test_initialized_run_trains_to_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "x"]) == 0
    monkeypatch.chdir(tmp_path / "x")
    opened = OpenedRun.open(load_run_file(Path("run.yaml")))
    done = train(opened, Goal.of(opened.spec), telemetry=Silent())
    assert (done.exit_reason, done.step) == ("complete", 842)
    assert Path("runs/spirals/report/index.html").is_file()
    capsys.readouterr()
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["evaluation"]["metrics"]["accuracy"] > 0.95


def test_help_imports_no_verb() -> None:
    program = "import sys\nfrom baton.flows.commands.main import main\nmain(['--help'])\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"baton.flows.opened_run", "baton.flows.commands.run", "yaml"} & set(
        done.stdout.splitlines()[-1].split()
    )
