"""Homes that 1.0 made, one of each kind (`make.py`), are read, verified and continued by this version."""

import json
import shutil
from pathlib import Path

import pytest

from baton.flows.commands.main import main
from baton.flows.opened_run import OpenedRun
from baton.flows.result import Goal
from baton.flows.train import train
from baton.tasks.foundation.contracts.identity import VALIDATION
from baton.tasks.foundation.contracts.log_entry import Quarantine, Rewind
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.foundation.telemetry.events import Silent
from tests.homes.make import KINDS, home_of, write_run
from tests.support.checkout import CHECKOUT
from tests.support.homes import entries_of, log_bytes, tip_of
from tests.support.lab import in_fresh_process

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


def train_each(folder: str) -> None:
    """Train each home to its end, as a process of its own does."""
    for kind in KINDS:
        home = home_of(Path(folder) / kind)
        run = OpenedRun.open(load_run_file(Path(folder) / kind / "run.yaml", [f"run={home.name}"]))
        PROCESS_STATE.forget()
        train(run, Goal.of(run.spec), telemetry=Silent())


@pytest.mark.slow
def test_homes_are_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {}
    for kind in KINDS:
        shutil.copytree(HOMES / kind, tmp_path / kind)
        write_run(tmp_path / kind)
        before[kind] = log_bytes(home_of(tmp_path / kind))
    in_fresh_process(train_each, folder=str(tmp_path))
    for kind, logged in before.items():
        home = home_of(tmp_path / kind)
        after = log_bytes(home)
        assert {name: after[name] for name in logged} == logged, kind
        assert tip_of(home).step == 40, kind
        # The best, the two newest and the one that was read whole are still in the head.
        assert entries_of(home)[-1].head.kept_for_good == (5 if kind == "kept_for_good" else 0), kind
        assert answer(capsys, "verify", str(home))["ok"], kind
