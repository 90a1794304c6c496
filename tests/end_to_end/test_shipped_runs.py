"""The shipped run files reach their results unchanged."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import CHECKOUT
from tests.support.clones import add_programs, type_clone
from tests.support.homes import read_history
from tests.support.prefect_server import environment_with
from tests.support.shipped_runs import DRIVER, run_file
from tests.support.watching import commits_of

pytestmark = pytest.mark.slow


def readme_block(first: str) -> str:
    """The block of README.md, without a language, that begins with `first`."""
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(rf"^```\n({first}.*?)^```$", readme, flags=re.MULTILINE | re.DOTALL)
    return str(block)


def without_numbers(printed: str) -> list[str]:
    """The words of what `baton run` prints at its end, with N for numbers that depend on the machine."""
    last = printed[printed.index("Done: ") :].splitlines()[:4]
    return [*last[:1], *(re.sub(r"\b\d[\d.]*", "N", " ".join(line.split())) for line in last[1:])]


def test_readme_commands_train_the_digits_in_five_segments(tmp_path: Path) -> None:
    cloning, training, testing = readme_block("git clone").splitlines()
    assert cloning.endswith(" baton && cd baton")
    type_clone(cloning, tmp_path)
    clone = tmp_path / "baton"
    add_programs(clone)
    environment = environment_with(tmp_path / "prefect", PYTHONPATH=str(clone))
    command = ["/bin/sh", "-ec", training]
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert without_numbers(done.stdout) == without_numbers(readme_block("Done: "))
    home = clone / "deploy" / "runs" / "digits" / "runs" / "digits-cnn"
    assert [step for step, _ in commits_of(home)][:1] == [0]
    assert sum(reason == "segment_end" for _, reason in commits_of(home)) >= 5
    accuracy = dict(read_history(home)[1])[2000]["accuracy"]
    assert accuracy >= 0.985
    (file,) = home.glob("confusion/*.json")
    counts = json.loads(file.read_bytes())["counts"]
    right, total = sum(counts[each][each] for each in range(10)), sum(map(sum, counts))
    assert right / total == pytest.approx(accuracy)
    # This is what types it.
    assert testing.split()[:2] == ["make", "test"]
    assert "\nmake test\n" in (CHECKOUT / ".ci" / "run").read_text(encoding="utf-8")


def test_readme_installs_the_checkout_with_an_extra() -> None:
    """As far as pip goes without the network: what the lock has satisfies it, and it would install Baton."""
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    [typed] = re.findall(r"`(pip install .*?)`", readme)
    program, *words = shlex.split(typed)
    offline = {"PIP_NO_INDEX": "1", "PIP_DRY_RUN": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    done = subprocess.run(
        [sys.executable, "-m", program, *words],
        cwd=CHECKOUT, env=os.environ | offline, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Would install baton-relay-" in done.stdout


@pytest.mark.nightly
def test_text_run_learns_from_the_standard_library(tmp_path: Path) -> None:
    command = [sys.executable, str(DRIVER), str(run_file("text")), "--set", f"storage={tmp_path}"]
    done = subprocess.run([*command, "--until-step", "200"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["exit_reason"] == "until_step"
    # An even guess needs 8 bits.
    assert result["metrics"]["bits_per_byte"] < 4.5


@pytest.mark.nightly
def test_images_are_learned_with_augmentation(tmp_path: Path) -> None:
    command = [sys.executable, str(DRIVER), str(run_file("images")), "--set", f"storage={tmp_path}"]
    done = subprocess.run([*command, "--until-step", "400"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["metrics"]["validation_accuracy"] > 0.75
