"""Promise 2: damaged, unfinished and foreign files are never restored; the run continues from an earlier checkpoint."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.homes import read_history, tip_of

pytestmark = pytest.mark.slow


def baton(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.commands.main", *words]
    return forked.run(command, capture_output=True, text=True, timeout=300, check=False)


CUT = ["train.segment_steps=10"]


@pytest.fixture(scope="module")
def straight(train_without_prefect: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of the undamaged run."""
    return train_without_prefect("digits", tmp_path_factory.mktemp("straight"), extra=CUT).result


@pytest.fixture(scope="module")
def stopped(train_without_prefect: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage root of the run, stopped at step 40."""
    root: Path = tmp_path_factory.mktemp("stopped")
    train_without_prefect("digits", root, "--until-step", "40", extra=CUT)
    return root


@pytest.fixture
def home(stopped: Path, tmp_path: Path) -> Path:
    """The home of a copy of the stopped run, in the storage root `tmp_path`."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    return tmp_path / "digits-cnn"


def test_checkpoint_with_a_flipped_byte_is_quarantined(
    train_without_prefect: Callable[..., Any], stored_bytes: Callable[[str], Any], straight: Any, home: Path
) -> None:
    tip = home / tip_of(home).path
    data = next(tip.glob("ckpt.data-*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    verdict = baton("verify", str(home), "--json")
    assert verdict.returncode == 4
    assert data.name in verdict.stdout
    assert tip.name in verdict.stdout

    resumed = train_without_prefect("digits", home.parent, extra=CUT)
    assert "quarantined" in resumed.stderr
    assert resumed.result["state_digest"] == straight["state_digest"]
    assert stored_bytes(resumed.result["checkpoint"]) == stored_bytes(straight["checkpoint"])
    assert read_history(str(home)) == read_history(straight["home"])
    status = json.loads(baton("status", str(home), "--json").stdout.splitlines()[-1])
    assert tip.name in json.dumps(status["quarantined"])


def test_uncommitted_checkpoints_are_ignored(
    train_without_prefect: Callable[..., Any], straight: Any, home: Path
) -> None:
    unfinished = home / "checkpoints" / f"00000050-{99999999:08d}-{'0' * 32}"
    unfinished.mkdir()
    (unfinished / "ckpt.index").write_bytes(b"torn")
    (home / "checkpoints" / "checkpoint").write_text('model_checkpoint_path: "elsewhere"\n')
    (home / "checkpoint").write_text('model_checkpoint_path: "elsewhere"\n')
    (home / "log" / ".unfinished-abc").write_text('{"format": 1, "num')
    (home / "log" / "HINT").write_text("99999999")
    resumed = train_without_prefect("digits", home.parent, extra=CUT).result
    assert resumed["state_digest"] == straight["state_digest"]
    assert baton("verify", str(home)).returncode == 0


def test_damaged_shard_is_named(train_without_prefect: Callable[..., Any], home: Path) -> None:
    shard = next((home.parent / "datasets").glob("*/train-*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    refused = train_without_prefect("digits", home.parent, extra=CUT, code=4)
    assert shard.name in refused.stderr
    assert "DamagedDataset" in refused.stderr
