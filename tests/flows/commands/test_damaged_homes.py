"""Every verb on a home whose files were changed: exit 4 with the name of the file, before anything is written."""

import json
from pathlib import Path

import pytest

from flows.commands.main import main
from tasks.foundation.runlog.entry_paths import entry_path
from tests.support.fake_run import FakeRun

MODEL = "def build_model():\n    raise AssertionError('nothing is built of a damaged home')\n"


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """A run with a best checkpoint and a retired one; its newest entry says both."""
    (tmp_path / "model.py").write_text(MODEL)
    run = FakeRun(tmp_path, identity={"train.global_batch_size": 32}).train(100, 200, 300)
    run.evaluate(0.5)
    run.retire(keep_last=2)
    return run


def verbs(run: FakeRun) -> dict[str, list[str]]:
    """The arguments of each verb that reads a home."""
    file, home, out = str(run.run_file()), run.address, str(run.folder / "out.keras")
    return {
        "run": ["run", file],
        "status": ["status", home],
        "list": ["list", run.root.uri],
        "log": ["log", home],
        "report": ["report", home],
        "verify": ["verify", home],
        "fork": ["fork", home, "--as", "new"],
        "export": ["export", home, "--to", out, "--format", "keras", "--run-file", file],
        "evaluate": ["evaluate", home, "--run-file", file],
        "audit": ["audit", home, "--run-file", file],
        "compare": ["compare", home, home],
    }


def change(run: FakeRun, old: str, new: str) -> str:
    """Change the newest entry; returns its path in the home."""
    path = entry_path(run.head.number)
    file = run.path(path)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    return path


CHANGES = {
    "a thread more": ('"intra_op_threads":2', '"intra_op_threads":3'),
    "another best": ('"value":0.5', '"value":0.7'),
    "more commits": ('"commits":4', '"commits":5'),
    "another state digest": (f'"state_digest":"{300:064x}"', f'"state_digest":"{301:064x}"'),
    "another retired path": ('"retired":[{"path":"checkpoints/00000000', '"retired":[{"path":"checkpoints/00000100'),
    "finished": ('"environment":', '"finished":{"step":300,"reason":"x"},"environment":'),
    "a newer version": ('"schema_version":2', '"schema_version":3'),
}


@pytest.mark.parametrize(("old", "new"), CHANGES.values(), ids=CHANGES.keys())
def test_no_verb_believes_a_changed_entry(run: FakeRun, capsys: pytest.CaptureFixture[str], old: str, new: str) -> None:
    path = change(run, old, new)
    asked = verbs(run)
    before = run.files()
    for verb, words in asked.items():
        code = main(words)
        printed = capsys.readouterr()
        assert code == 4, f"{verb}: {printed}"
        assert path in "".join((printed.out + printed.err).split()), f"{verb}: {printed}"
        assert run.files() == before, verb


def test_what_the_message_says_continues_the_run(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    before = run.log.entry(run.head.number - 1).head
    path = change(run, *CHANGES["a thread more"])
    assert main(["status", run.address]) == 4
    err = capsys.readouterr().err
    assert "hint: restore the file from a backup" in err
    assert f"move {path} out of {run.address}/log" in " ".join(err.split())
    run.path(path).rename(run.folder / "damaged.json")
    assert main(["verify", run.address]) == 0
    capsys.readouterr()
    assert main(["status", run.address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entry"] == before.number
