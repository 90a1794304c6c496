"""Homes that 1.0 made, one of each kind (`make.py`), are read, verified and continued by this version."""

import json
import shutil
from pathlib import Path

import pytest

from flows.commands.main import main
from tasks.foundation.contracts.identity import VALIDATION
from tasks.foundation.contracts.log_entry import Quarantine, Rewind
from tests.homes.make import KINDS, home_of, train, write_run
from tests.support.checkout import CHECKOUT
from tests.support.homes import entries_of, log_bytes, tip_of

HOMES = CHECKOUT / "tests" / "homes" / "1.0"


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


@pytest.mark.parametrize("kind", KINDS)
def test_home_is_read_and_whole(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    home = home_of(HOMES / kind)
    status = answer(capsys, "status", str(home))
    assert status["step"] == (25 if kind == "quarantined" else 20)
    assert answer(capsys, "verify", str(home))["ok"]


def test_each_home_is_of_its_kind() -> None:
    entries = {kind: entries_of(home_of(HOMES / kind)) for kind in KINDS}
    heads = {kind: found[-1].head for kind, found in entries.items()}

    def having(kind_of_entry: type[Rewind | Quarantine]) -> list[str]:
        return [kind for kind in KINDS if any(isinstance(entry.body, kind_of_entry) for entry in entries[kind])]

    assert having(Rewind) == ["cut_and_rewound"]
    assert having(Quarantine) == ["quarantined"]
    assert [kind for kind in KINDS if heads[kind].kept_for_good] == ["kept_for_good"]
    assert [kind for kind in KINDS if heads[kind].identity.get(VALIDATION)] == ["own_sets"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_home_is_continued(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / kind
    shutil.copytree(HOMES / kind, folder)
    write_run(folder)
    home = home_of(folder)
    before = log_bytes(home)
    train(folder)
    after = log_bytes(home)
    assert {name: after[name] for name in before} == before
    assert tip_of(home).step == 40
    # The best, the two newest and the one that was read whole are still in the head.
    assert entries_of(home)[-1].head.kept_for_good == (5 if kind == "kept_for_good" else 0)
    assert answer(capsys, "verify", str(home))["ok"]
