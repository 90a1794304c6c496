"""The shipped run files reach their results unchanged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.shipped_runs import DRIVER, run_file

pytestmark = pytest.mark.slow


def test_digits_reach_their_accuracy_in_five_segments(tmp_path: Path) -> None:
    command = [sys.executable, str(DRIVER), str(run_file("digits")), "--set", f"storage={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["segments"] >= 5
    assert result["metrics"]["validation_accuracy"] >= 0.985
    (file,) = tmp_path.glob("digits-cnn/confusion/*.json")
    counts = json.loads(file.read_bytes())["counts"]
    right, total = sum(counts[each][each] for each in range(10)), sum(map(sum, counts))
    assert right / total == pytest.approx(result["metrics"]["validation_accuracy"])


def test_text_run_learns_from_the_standard_library(tmp_path: Path) -> None:
    command = [sys.executable, str(DRIVER), str(run_file("text")), "--set", f"storage={tmp_path}"]
    done = subprocess.run([*command, "--until-step", "200"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["exit_reason"] == "until_step"
    # An even guess needs 8 bits.
    assert result["metrics"]["bits_per_byte"] < 4.5


def test_images_are_learned_with_augmentation(tmp_path: Path) -> None:
    command = [sys.executable, str(DRIVER), str(run_file("images")), "--set", f"storage={tmp_path}"]
    done = subprocess.run([*command, "--until-step", "400"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["metrics"]["validation_accuracy"] > 0.75
