"""The `baton doctor` command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.flows.commands.main import main
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.faulty_runs import ALL_CHECKS, make_run

RUNS = CHECKOUT / "deploy" / "runs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "options"),
    [
        ("small", ["--for", "v5litepod-8"]),
        pytest.param("digits", ["--for", "v5litepod-8"], marks=pytest.mark.nightly),
        pytest.param("digits", [], marks=pytest.mark.nightly),
        pytest.param("text", ["--for", "v5litepod-8"], marks=pytest.mark.nightly),
    ],
)
def test_sound_runs_pass(run: str, options: list[str], tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    file = make_run(tmp_path / "run") if run == "small" else RUNS / run / "run.yaml"
    words = ["doctor", str(file), "--set", f"storage={storage}", "--json", *options]
    command = [sys.executable, "-m", "baton.flows.commands.main", *words]
    done = forked.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    output = json.loads(done.stdout)
    assert list(output) == ["schema_version", "file", "for", "ok", "findings"]
    assert output["ok"] is True
    assert [list(finding) for finding in output["findings"]] == [["check", "verdict", "text", "remedy"]] * len(
        ALL_CHECKS
    )
    verdicts = {finding["check"]: finding["verdict"] for finding in output["findings"]}
    assert list(verdicts) == ALL_CHECKS
    # 32 examples on eight replicas are four each, which a TPU pads.
    expected = {"batch"} if run == "text" else set()
    assert {check for check, verdict in verdicts.items() if verdict != "pass"} == expected
    assert list(storage.iterdir()) == []


def test_invalid_run_file_exits_2_without_tensorflow(tmp_path: Path) -> None:
    file = make_run(tmp_path / "run", ("run.yaml", "steps:", "stepz:"))
    script = (
        "import sys; from baton.flows.commands.main import main; code = main(sys.argv[1:]); "
        "print({'tensorflow', 'prefect'} & set(sys.modules), code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "doctor", str(file)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "set() 2"
    assert lines[-2] == f"1 fail, {len(ALL_CHECKS) - 1} skipped"
    assert lines[0].startswith("fail     run file     ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--for", "v5litepod-9"], ["v5litepod-8", "unknown TPU type"]),
        (["--for", "h100"], ["v5litepod-8"]),
        (["--step-seconds", "0"], ["--step-seconds = 0.0 must be more than 0"]),
        (["--preempted-every-hours", "inf"], ["--preempted-every-hours"]),
        (["--nonsense"], ["--nonsense", "--help"]),
    ],
)
def test_usage_errors_exit_2(options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "run.yaml", *options, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert [word for word in words if word not in captured.err] == []
    assert json.loads(captured.out)["exit_code"] == 2


def test_multiline_finding_is_aligned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = make_run(tmp_path / "run")
    assert main(["doctor", str(file), "--set", "train.steps=0", "--set", "train.seed=x"]) == 2
    first, second = capsys.readouterr().out.splitlines()[:2]
    column = first.index("--set train.")
    assert second.index("--set train.") == column
    assert second[:column].strip() == ""
