"""One's own model by following the README only: its files are taken from the README as they stand."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import CHECKOUT

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def relay(folder: Path, *words: str) -> dict[str, object]:
    driver = Path(__file__).with_name("run_plainly.py")
    command = [sys.executable, str(driver), str(folder / "run.yaml"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_readme_files_train_and_resume_outside_the_checkout(tmp_path: Path) -> None:
    files = dict(BLOCK.findall((CHECKOUT / "README.md").read_text()))
    assert files.keys() == {"model.py", "layers.py", "data.py", "run.yaml"}
    results = {}
    for name in ("straight", "resumed"):
        folder = tmp_path / name
        folder.mkdir()
        for file, content in files.items():
            (folder / file).write_text(content)
        if name == "resumed":
            assert relay(folder, "--max-segments", "2")["exit_reason"] == "max_segments"
        results[name] = relay(folder)
        assert (folder / "runs" / "iris" / "log" / "00000000.json").is_file()
    assert results["straight"]["state_digest"] == results["resumed"]["state_digest"]
    assert results["straight"]["step"] == 400
    assert results["straight"]["metrics"]["validation_accuracy"] > 0.9  # type: ignore[index]
