"""`baton prove` with fake processes: what it prints, stores and removes."""

import json
from functools import partial
from pathlib import Path

import pytest

from baton.flows.commands import prove as verb
from baton.flows.commands.main import main
from baton.flows.proof.execute import Execution, Laboratory
from baton.flows.supervisor import Outcome
from baton.tasks.foundation.contracts.home_files import ProofReceipt
from baton.tasks.foundation.contracts.run_file import RunFile
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.storage import local_files
from tests.support.fake_executions import ENVIRONMENT, FakeExecutions, small_run_file


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return small_run_file(tmp_path)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeExecutions:
    fakes = FakeExecutions()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(verb.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(verb, "FreshProcesses", lambda **_settings: fakes)
    monkeypatch.setattr(verb, "Laboratory", partial(Laboratory, saved=fakes.saved))
    return fakes


def test_receipt_is_stored_in_the_home(run: RunFile, fakes: FakeExecutions, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", str(run.path)]) == 0
    out = capsys.readouterr().out
    assert "proved: mine: 31 steps straight, and again cut at 7, 14, 21, 28 with a SIGKILL at 14: the same bits" in out
    proofs = list((run.folder / "runs" / "mine" / "proofs").iterdir())
    assert len(proofs) == 1
    assert str(proofs[0]) in out
    kept = ProofReceipt.from_json(proofs[0].read_bytes(), where="", error=BatonError)
    assert (kept.verdict, kept.run, kept.run_file, kept.environment) == ("same", "mine", "run.yaml", ENVIRONMENT)
    assert kept.identity == {"data.content_digest": "c"}
    assert not fakes.ended[0].storage.exists()


def test_first_difference_is_printed(run: RunFile, fakes: FakeExecutions, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.result = lambda name: "other" if name == "cut" else "same"
    assert main(["prove", str(run.path), "--json", "--keep"]) == 1
    captured = capsys.readouterr()
    facts = json.loads(captured.out)
    assert facts["verdict"] == "different"
    assert facts["first_difference"]["path"] == "model/dense/bias"
    assert Path(facts["receipt"]).is_file()
    assert fakes.ended[0].storage.is_dir()
    assert facts["kept"] == str(fakes.ended[0].storage.parent)
    assert main(["prove", str(run.path)]) == 1
    out = capsys.readouterr().out
    assert out.count("model/dense/bias  float32[2, 3]: 2 of its values differ in 2 bits, by up to 2") == 1
    assert "first differ at step 16" in out
    assert len(list((run.folder / "runs" / "mine" / "proofs").iterdir())) == 2


def test_scratch_folder_is_removed_after_an_interrupt(run: RunFile, fakes: FakeExecutions, tmp_path: Path) -> None:
    def interrupted(_: Execution) -> Outcome:
        raise KeyboardInterrupt

    fakes.run_to_end = interrupted  # type: ignore[method-assign]
    assert main(["prove", str(run.path)]) == 130
    assert fakes.killed
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not (run.folder / "runs").exists()


def test_scratch_of_killed_proofs_is_removed_but_kept_ones_stay(
    run: RunFile, fakes: FakeExecutions, tmp_path: Path
) -> None:
    for left in ("baton-proving-killed", "baton-doctor-killed"):
        (tmp_path / "temporary" / left / "shared").mkdir(parents=True)
    assert main(["prove", str(run.path), "--keep"]) == 0
    local_files.sweep_once.cache_clear()  # as in a new process
    assert main(["prove", str(run.path)]) == 0
    assert [path.name for path in (tmp_path / "temporary").iterdir()] == [fakes.ended[0].storage.parent.name]


def test_home_with_only_proofs_is_not_a_run(
    run: RunFile, fakes: FakeExecutions, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", str(run.path), "--set", "data.source=text"]) == 0
    assert fakes.ended[0].settings[0] == "data.source=text"
    for word in ("status", "log", "verify", "report"):
        assert main([word, str(run.path)]) == 2
        assert "has not been run yet" in capsys.readouterr().err
    assert main(["list", str(run.path)]) == 0
    assert capsys.readouterr().out.startswith("no runs below")


def test_bad_input_is_refused_before_a_process_starts(
    run: RunFile, fakes: FakeExecutions, capsys: pytest.CaptureFixture[str]
) -> None:
    for setting, words in (
        ("storage=memory://x", "ends with this process"),
        ("model.build=model.py:none", "none"),
        ("train.steps=0", "train.steps"),
    ):
        assert main(["prove", str(run.path), "--set", setting]) == 2
        assert words in capsys.readouterr().err
    assert not fakes.killed
