"""Promise 2: damaged, unfinished and foreign files are never restored; the run continues from an earlier checkpoint."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.homes import read_history

pytestmark = pytest.mark.slow


def baton(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.commands.main", *words]
    return forked.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_checkpoint_with_a_flipped_byte_is_quarantined(
    train_without_prefect: Callable[..., Any], stored_bytes: Callable[[str], Any], tmp_path: Path
) -> None:
    cut = ["train.segment_steps=10"]
    straight = train_without_prefect("digits", tmp_path / "straight", extra=cut).result
    half = train_without_prefect("digits", tmp_path / "damaged", "--until-step", "40", extra=cut).result
    data = next(Path(half["checkpoint"]).glob("ckpt.data-*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    verdict = baton("verify", half["home"], "--json")
    assert verdict.returncode == 4
    assert data.name in verdict.stdout
    assert Path(half["checkpoint"]).name in verdict.stdout

    resumed = train_without_prefect("digits", tmp_path / "damaged", extra=cut)
    assert "quarantined" in resumed.stderr
    assert resumed.result["state_digest"] == straight["state_digest"]
    assert stored_bytes(resumed.result["checkpoint"]) == stored_bytes(straight["checkpoint"])
    assert read_history(half["home"]) == read_history(straight["home"])
    status = json.loads(baton("status", half["home"], "--json").stdout.splitlines()[-1])
    assert Path(half["checkpoint"]).name in json.dumps(status["quarantined"])


def test_uncommitted_checkpoints_are_ignored(train_without_prefect: Callable[..., Any], tmp_path: Path) -> None:
    cut = ["train.segment_steps=10"]
    straight = train_without_prefect("digits", tmp_path / "straight", extra=cut).result
    half = train_without_prefect("digits", tmp_path / "littered", "--until-step", "20", extra=cut).result
    home = Path(half["home"])
    unfinished = home / "checkpoints" / f"00000030-{99999999:08d}-{'0' * 32}"
    unfinished.mkdir()
    (unfinished / "ckpt.index").write_bytes(b"torn")
    (home / "checkpoints" / "checkpoint").write_text('model_checkpoint_path: "elsewhere"\n')
    (home / "checkpoint").write_text('model_checkpoint_path: "elsewhere"\n')
    (home / "log" / ".unfinished-abc").write_text('{"format": 1, "num')
    (home / "log" / "HINT").write_text("99999999")
    resumed = train_without_prefect("digits", tmp_path / "littered", extra=cut).result
    assert resumed["state_digest"] == straight["state_digest"]
    assert baton("verify", half["home"]).returncode == 0


def test_damaged_shard_is_named(train_without_prefect: Callable[..., Any], tmp_path: Path) -> None:
    half = train_without_prefect("digits", tmp_path, "--until-step", "20", extra=["train.segment_steps=10"]).result
    shard = next((Path(half["home"]).parent / "datasets").glob("*/train-*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    refused = train_without_prefect("digits", tmp_path, extra=["train.segment_steps=10"], code=4)
    assert shard.name in refused.stderr
    assert "DamagedDataset" in refused.stderr
