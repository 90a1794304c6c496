"""Verbs on homes whose files were changed: exit 4 with the name of the file, before anything is written.

A property test changes the JSON of every kind of file, with and without the digests that would show it.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.flows.commands.main import main
from baton.flows.opened_run import open_run
from baton.flows.verification import Damage, verify_home
from baton.tasks.foundation.contracts.home_files import SAVED_CODE, saved_code_path
from baton.tasks.foundation.errors import AnotherVersion
from baton.tasks.foundation.log.files import entry_path
from tests.support.fake_run import DATASET, FakeRun
from tests.support.small_logs import signed

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
    "another environment": ('"environment":{"entry":0', '"environment":{"entry":1'),
    "another best": ('"value":0.5', '"value":0.7'),
    "more commits": ('"commits":4', '"commits":5'),
    "another state digest": (f'"state_digest":"{300:064x}"', f'"state_digest":"{301:064x}"'),
    "another retired path": ('"retired":[{"path":"checkpoints/00000000', '"retired":[{"path":"checkpoints/00000100'),
    "finished": ('"environment":', '"finished":{"step":300,"reason":"x"},"environment":'),
    "a newer version": ('"format":1', '"format":2'),
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
    path = change(run, *CHANGES["more commits"])
    assert main(["status", run.address]) == 4
    err = capsys.readouterr().err
    assert "hint: restore the file from a backup" in err
    assert f"move {path} out of {run.address}/log" in " ".join(err.split())
    run.path(path).rename(run.folder / "damaged.json")
    assert main(["verify", run.address]) == 0
    capsys.readouterr()
    assert main(["status", run.address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entry"] == before.number


CODE = b'{"format": 1, "files": []}'
ODD = [
    None, True, -1, 10**30, 1.5, math.nan, "", "x", "newest", "\u0663", "../x", "checkpoints/x", "9" * 5000,
    "checkpoints/" + "9" * 200 + "-0-a", [], {}, [1], {"a": 1},
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """The document with one key or one value changed, left out, or repeated."""
    kind = draw(st.sampled_from(["below", "below", "below", "name", "drop", "replace"]))
    if kind == "replace" or not isinstance(document, dict | list) or not document:
        is_number = isinstance(document, int) and not isinstance(document, bool)
        near = [document + 1, -document - 1, str(document)] if is_number else []
        return draw(st.sampled_from(near or ODD) | st.sampled_from(ODD))
    if isinstance(document, list):
        at = draw(st.integers(0, len(document) - 1))
        new = {"below": [draw(mutated(document[at]))], "name": [document[at]] * 2, "drop": []}[kind]
        return [*document[:at], *new, *document[at + 1 :]]
    key = draw(st.sampled_from(sorted(document)))
    if kind == "below":
        return {**document, key: draw(mutated(document[key]))}
    return {(key[:-1] if name == key else name): at for name, at in document.items() if kind == "name" or name != key}


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    """A run with entries of several kinds, pages of retained checkpoints and saved code."""
    run = FakeRun(tmp_path_factory.mktemp("every_kind"), identity={SAVED_CODE: saved_code_path(CODE)})
    run.home.write(saved_code_path(CODE), CODE)
    run.train(100, 200, 300, 400, 500, 600)
    run.evaluate(0.5)
    run.retire(keep_last=5)
    return run


@pytest.mark.parametrize("examples", [100, pytest.param(300, marks=pytest.mark.nightly)])
def test_verify_names_whatever_was_changed(every_kind: FakeRun, examples: int) -> None:
    """Every outcome is that nothing is damaged, or the names of files; nothing else is raised, whatever the JSON is."""
    run = every_kind
    files = sorted(path for path in run.root.files("") if path.endswith(".json"))

    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(files))
        file, is_entry = run.root.root / path, "/log/0" in path
        sound = file.read_bytes()
        changed = data.draw(mutated(json.loads(sound)))
        as_written = is_entry and isinstance(changed, dict) and data.draw(st.booleans())
        spoiled = signed(changed) if as_written else json.dumps(changed).encode()
        assume(spoiled != sound)  # a value may be replaced by its like
        file.write_bytes(spoiled)
        try:
            found = verify_home(open_run(run.address, None)).damages
        except AnotherVersion as fault:
            found = [Damage(path, str(fault))]
            assert as_written or path.startswith("datasets/")
        finally:
            file.write_bytes(sound)
        assert all(damage.file in damage.what for damage in found)
        retained = any(ref.path in path for ref in run.head.retained) or "/checkpoints/" not in path
        has_digest = retained and not as_written and not path.startswith("datasets/")
        if has_digest and (not is_entry or not isinstance(changed, dict) or "sha256" in changed):
            assert found, changed

    check()


def test_a_list_shows_the_other_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FakeRun(tmp_path, "sound")
    for name, harm in (("fifo", os.mkfifo), ("linked", lambda path: path.symlink_to("/etc/passwd"))):
        file = FakeRun(tmp_path, name).path(entry_path(1))
        file.unlink()
        harm(file)
    assert main(["list", str(tmp_path / "runs"), "--json"]) == 4
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["run"], run.get("error_class")) for run in listed] == [
        ("fifo", "PathRefused"), ("linked", "PathRefused"), ("sound", None)
    ]  # fmt: skip


def test_the_manifest_of_a_dataset_has_a_remedy(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = run.root.root / DATASET / "manifest.json"
    sound = manifest.read_text()
    for text in ("", "{}", sound.replace('"examples": 10', '"examples": 11', 1)):
        manifest.write_text(text)
        assert main(["verify", run.address]) == 4
        out = " ".join(capsys.readouterr().out.split())
        assert "delete that folder and run again; Baton then prepares the dataset again from the source" in out
