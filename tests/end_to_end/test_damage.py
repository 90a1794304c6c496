"""Promise 2: damaged, unfinished and foreign files are never restored; the run continues from an earlier checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.flows.commands.main import main
from tests.support.fake_run import flip_a_byte
from tests.support.homes import read_history, tip_of

pytestmark = pytest.mark.slow

CUT = ["train.segment_steps=10"]


def test_nothing_damaged_unfinished_or_foreign_is_restored(
    train_without_prefect: Callable[..., Any],
    stored_bytes: Callable[[str], Any],
    straight_digits: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_without_prefect("digits", tmp_path, "--until-step", "40", extra=CUT)
    home = tmp_path / "digits-cnn"

    shard = next((tmp_path / "datasets").glob("*/train-*"))
    flip_a_byte(shard, shard.stat().st_size // 2)
    refused = train_without_prefect("digits", tmp_path, extra=CUT, code=4)
    assert shard.name in refused.stderr
    assert "DamagedDataset" in refused.stderr
    flip_a_byte(shard, shard.stat().st_size // 2)

    tip = home / tip_of(home).path
    data = next(tip.glob("ckpt.data-*"))
    flip_a_byte(data, data.stat().st_size // 2)
    assert main(["verify", str(home), "--json"]) == 4
    verdict = capsys.readouterr().out
    assert data.name in verdict
    assert tip.name in verdict
    unfinished = home / "checkpoints" / f"00000050-{99999999:08d}-{'0' * 32}"
    unfinished.mkdir()
    (unfinished / "ckpt.index").write_bytes(b"torn")
    (home / "checkpoints" / "checkpoint").write_text('model_checkpoint_path: "elsewhere"\n')
    (home / "checkpoint").write_text('model_checkpoint_path: "elsewhere"\n')
    (home / "log" / ".unfinished-abc").write_text('{"format": 1, "num')
    (home / "log" / "HINT").write_text("99999999")

    resumed = train_without_prefect("digits", tmp_path, extra=CUT)
    assert "quarantined" in resumed.stderr
    assert resumed.result["state_digest"] == straight_digits["state_digest"]
    assert stored_bytes(resumed.result["checkpoint"]) == stored_bytes(straight_digits["checkpoint"])
    assert read_history(home) == read_history(straight_digits["home"])
    assert main(["status", str(home), "--json"]) == 0
    assert tip.name in json.dumps(json.loads(capsys.readouterr().out)["quarantined"])
    assert main(["verify", str(home)]) == 0
