"""Homes that earlier versions of Baton made are continued.

The folders in tests/older_homes are named for the commits that made them. Each holds a run file and a run that stopped
at step 20 of 40. In `33ed8fb-staged` the segment to step 20 is staged and not committed: a remote stage trained it, and
its flow run's result is in the home. The run of `8322cfc` keeps every checkpoint; the model of `8322cfc-jit` is
compiled with `jit_compile=True`.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.foundation.contracts.log_entry import Change, Commit, Entry
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.homes import commits_in, entries_of, log_bytes, tip_of
from tests.support.prefect_server import baton, environment_with, post
from tests.support.shipped_runs import DRIVER

pytestmark = pytest.mark.slow

HOMES = CHECKOUT / "tests" / "older_homes"
# The machine that trained the homes of 33ed8fb; another one may compute other bits.
MAKER = "5fa0f61c05afa0ad"


def train(folder: Path, *settings: str) -> tuple[dict[str, Any], str]:
    """Train the run of a folder to its end; the result and what the console showed."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, str(DRIVER), str(folder / "run" / "run.yaml"), *words]
    done = forked.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["step"] == 40
    return result, done.stderr


def copy_of(home: str, folder: Path) -> Path:
    shutil.copytree(HOMES / home, folder / "copy")
    return folder / "copy"


def continued(folder: Path, *settings: str) -> tuple[str, list[Entry]]:
    """What the console showed, and the log."""
    _result, console = train(folder, *settings)
    return console, entries_of(folder / "storage" / "small")


@pytest.fixture(scope="module")
def straight_digest(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """The digest of the run that this version trains from its beginning; None on a machine that computes other bits."""
    folder = tmp_path_factory.mktemp("straight")
    shutil.copytree(HOMES / "33ed8fb" / "run", folder / "run")
    result, _console = train(folder)
    commits = {ref.step: ref for ref in commits_in(entries_of(folder / "storage" / "small"))}
    same_bits = commits[20].state_digest == tip_of(HOMES / "33ed8fb" / "storage" / "small").state_digest
    return str(result["state_digest"]) if same_bits or machine() == MAKER else None


def machine() -> str:
    """A digest of what the bits depend on: the processor's model and features, and the number of cores."""
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    first = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    return hashlib.sha256(repr([os.cpu_count(), *map(first.get, wanted)]).encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def continued_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the older home, continued to its end."""
    folder = copy_of("33ed8fb", tmp_path_factory.mktemp("continued"))
    result, console = train(folder)
    assert "the environment changed" not in console
    steps = [ref.step for ref in commits_in(entries_of(folder / "storage" / "small"))]
    assert steps == [0, 10, 20, 30, 40]
    return str(result["state_digest"])


def test_older_home_continues_with_deterministic_operations(tmp_path: Path) -> None:
    console, entries = continued(copy_of("0032a4b", tmp_path))
    assert "the environment changed" in console
    assert "from here on TensorFlow uses deterministic operations only" in console
    (change,) = [entry.body for entry in entries if isinstance(entry.body, Change)]
    assert change.environment.deterministic
    assert change.identity is None
    tip = entries[-1].head.tip
    assert tip is not None
    assert tip.step == 40


def test_older_home_continues_unchanged_on_request(tmp_path: Path) -> None:
    console, entries = continued(copy_of("0032a4b", tmp_path), "train.deterministic=false")
    assert "train.deterministic is false: operations that are not deterministic are allowed" in console
    assert "the environment changed" not in console
    assert not any(isinstance(entry.body, Change) for entry in entries)
    last = [entry.body for entry in entries if isinstance(entry.body, Commit)][-1]
    assert last.checkpoint.step == 40


def test_older_home_continues_to_the_same_bits(straight_digest: str | None, continued_digest: str) -> None:
    assert straight_digest in {None, continued_digest}


def test_log_that_repeats_everything_goes_on_lean(continued_digest: str, tmp_path: Path) -> None:
    folder = copy_of("8322cfc", tmp_path)
    home = folder / "storage" / "small"
    before = log_bytes(home)
    same_bits = tip_of(home).state_digest == tip_of(HOMES / "33ed8fb" / "storage" / "small").state_digest
    result, _console = train(folder)
    assert not same_bits or result["state_digest"] == continued_digest
    after = log_bytes(home)
    assert {name: after[name] for name in before} == before
    schemas = [json.loads(data)["schema_version"] for data in after.values()]
    assert schemas == [1] * len(before) + [2] * (len(after) - len(before))
    assert max(len(data) for name, data in after.items() if name not in before) < 4096
    assert [ref.step for ref in commits_in(entries_of(home))] == [0, 10, 20, 30, 40]
    assert [ref.step for ref in entries_of(home)[-1].head.retained] == [0, 10, 20, 30, 40]


def test_compiled_model_of_an_older_home_goes_on_with_xla(tmp_path: Path) -> None:
    """The version before ignored `jit_compile=True`, so the bits change from here on, and the command says why."""
    folder = copy_of("8322cfc-jit", tmp_path)
    _result, console = train(folder)
    assert "XLA compiles the train step (jit_compile=True)" in console
    assert "warning: this process traced another train step than the one that committed step 20" in console
    assert [ref.step for ref in commits_in(entries_of(folder / "storage" / "small"))] == [0, 10, 20, 30, 40]


def test_staged_segment_of_an_older_version_is_committed(continued_digest: str, server: str, tmp_path: Path) -> None:
    folder = copy_of("33ed8fb-staged", tmp_path)
    home = folder / "storage" / "staged"
    (staged,) = (home / "checkpoints").glob("00000020-*")
    # No worker serves this deployment, so a segment that is not taken from the home never comes.
    flow = post(server, "flows/", {"name": "train-segment"})["id"]
    post(server, "deployments/", {"name": "unserved", "flow_id": flow})
    remote = ["--set", "stages.train_segment.deployment=train-segment/unserved", "--until-step", "20"]
    environment = environment_with(tmp_path / "prefect", PREFECT_API_URL=server)
    done = baton(environment, "run", str(folder / "run" / "run.yaml"), *remote)
    assert done.returncode == 0, done.stderr
    assert tip_of(home).path == f"checkpoints/{staged.name}"
    assert not list((home / "answers").iterdir())
    result, _console = train(folder)
    assert result["state_digest"] == continued_digest
    assert [ref.step for ref in commits_in(entries_of(home))] == [0, 10, 20, 30, 40]
