"""The runs of a storage folder: sorted, filtered, on one page; and one that is deleted, safely."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from baton.flows.commands import list_runs
from baton.flows.commands.main import main
from baton.tasks.foundation.checkpoint.fork import fork
from baton.tasks.foundation.contracts.log_entry import Lineage, UnfinishedFork
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.fake_run import FakeRun

FAILED = {"ended": "NonFinite", "message": "the loss is not finite on vm-17", "host": "vm-17"}


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, FakeRun]:
    """Runs a, b, c and d; d has no evaluation, and failed."""
    made = {}
    for name, accuracy, metadata in (("a", 0.5, {"team": "vision"}), ("b", 0.9, {}), ("c", 0.75, {"team": "text"})):
        run = made[name] = FakeRun(tmp_path, name, target=200)
        run.metadata = dict(metadata)
        run.train(100, 200)
        run.evaluate(accuracy)
    made["d"] = FakeRun(tmp_path, "d", target=200).train(100)
    made["d"].attempt("x", **FAILED)
    return made


@pytest.fixture
def listed(runs: dict[str, FakeRun], capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    def names(*words: str) -> list[str]:
        assert main(["list", runs["a"].root.uri, *words, "--json"]) == 0
        return [each["run"] for each in json.loads(capsys.readouterr().out)["runs"]]

    return names


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--sort", "accuracy"], "acbd"),
        (["--sort", "-accuracy"], "bcad"),
        (["--sort", "-accuracy", "--limit", "1"], "b"),
        (["--sort", "team"], "cabd"),
        (["--sort", "step"], "dabc"),
        (["--where", "accuracy>=0.75"], "bc"),
        (["--where", "accuracy>0.5", "--where", "accuracy<0.9"], "c"),
        (["--where", "state=failed"], "d"),
        (["--where", "state!=failed", "--sort", "-run"], "cba"),
        (["--where", "team=vision"], "a"),
        (["--where", "team!=vision"], "bcd"),
        (["--where", "step=100"], "d"),
    ],
)
def test_list_is_sorted_and_filtered(listed: Callable[..., list[str]], words: list[str], names: str) -> None:
    """By metrics, by the metadata of run files, and by state and step; runs without the key come last."""
    assert "".join(listed(*words)) == names


def test_list_shows_the_tags_of_runs(runs: dict[str, FakeRun], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", runs["a"].root.uri]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "team vision" in line] == ["a"]
    assert lines[0].split()[-2:] == ["metadata", "cause"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--where", "acuracy>0.5"], "no run has acuracy; they have: team, accuracy, best, run, state, step"),
        (["--sort", "-f1"], "no run has f1"),
        (["--where", "accuracy"], "--where accuracy is no condition; write KEY=VALUE"),
        (["--sort", "accuracy", "--after", "a"], "--after is for a list by name"),
        (["--html", "nowhere/page.html"], "--html nowhere/page.html cannot be written"),
    ],
)
def test_what_cannot_be_listed_is_refused(
    runs: dict[str, FakeRun], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", runs["a"].root.uri, *words]) == 2
    assert message in capsys.readouterr().err


def test_page_has_all_runs_above_their_curves(
    runs: dict[str, FakeRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs["a"].root.write("broken/log/00000000.json", b"{")
    page = tmp_path / "all.html"
    assert main(["list", runs["a"].root.uri, "--html", str(page)]) == 4  # as without a page
    assert f"page: {page}" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "<title>runs: 5 runs | Baton</title>" in text
    table = text[text.index("<h2>Runs") : text.index("<h2>Curves")]
    assert all(f"<strong>{name}</strong>" in table for name in (*"abcd", "broken"))
    for words in (
        "NonFinite: the loss is not finite on its host<",
        ">vision<",
        ">failed<",
        ">damaged<",
        "validation accuracy",
    ):
        assert words in table
    assert text.index("<h2>Curves") < text.index('class="key run3"') < text.index("<figcaption>loss")
    assert str(tmp_path) not in text


def answering(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    monkeypatch.setattr(list_runs.typer, "confirm", lambda *_given, **_named: answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)


def test_delete_says_what_goes_and_asks(
    runs: dict[str, FakeRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs["a"]
    fork(run.root, "a", "copied", at_step=100, attempt="f" * 32)
    before = run.files()
    assert main(["delete", run.address]) == 2
    said = capsys.readouterr().err
    assert "checkpoints (9 files)" in said
    assert "copied: complete without it" in said
    assert "add --yes" in said
    answering(monkeypatch, answer=False)
    assert main(["delete", run.address]) == 1
    assert run.files() == before
    answering(monkeypatch, answer=True)
    assert main(["delete", run.address]) == 0
    assert run.files() == {path: data for path, data in before.items() if not path.startswith("a/")}
    assert not run.path("").exists()
    assert main(["verify", run.root.at("copied").uri]) == 0, "a fork has copies of its own"
    assert main(["delete", run.address, "--yes"]) == 2
    assert "no run is at" in capsys.readouterr().err


def test_a_run_at_work_is_not_deleted(runs: dict[str, FakeRun], capsys: pytest.CaptureFixture[str]) -> None:
    run = runs["d"]
    run.attempt("y", alive=datetime.now(UTC).isoformat(), host="tpu-vm-3", pid=4711)
    before = run.files()
    assert main(["delete", run.address, "--yes"]) == 3
    assert "d is at work: process 4711 on tpu-vm-3" in capsys.readouterr().err
    assert run.files() == before
    assert main(["delete", run.address, "--yes", "--force"]) == 0
    assert not run.path("").exists()


def test_what_an_unfinished_fork_reads_is_not_deleted(
    runs: dict[str, FakeRun], capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs["a"]
    lineage = Lineage(home=run.address, path=run.tip.path, step=200, state_digest=run.tip.state_digest, entry=3)
    run.root.write("begun/fork.json", UnfinishedFork(lineage=lineage).to_json())
    before = run.files()
    assert main(["delete", run.address, "--yes"]) == 2
    said = capsys.readouterr().err
    assert "the unfinished fork begun still reads it" in said
    assert f"finish it first: baton fork {run.address} --at-step 200 --as begun" in said
    assert run.files() == before
    assert main(["delete", run.address, "--yes", "--force"]) == 0


def test_a_home_with_other_runs_below_is_not_deleted(
    runs: dict[str, FakeRun], capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs["a"]
    for path in runs["b"].home.files("log"):
        run.home.write(f"inner/{path}", runs["b"].home.read(path))
    before = run.files()
    assert main(["delete", run.address, "--yes", "--force"]) == 2
    assert "holds other runs (inner)" in capsys.readouterr().err
    assert run.files() == before


def test_a_deletion_that_was_cut_goes_on(runs: dict[str, FakeRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """The log goes last, so what is left is still a run, and no command begins a new one in it."""
    run, original = runs["a"], LocalStorage.delete
    deleted: list[str] = []

    def cut(storage: LocalStorage, folder: str, **named: Any) -> None:
        deleted.append(folder)
        if folder == "log":
            raise KeyboardInterrupt
        original(storage, folder, **named)

    monkeypatch.setattr(LocalStorage, "delete", cut)
    assert main(["delete", run.address, "--yes"]) != 0
    assert deleted[-1] == "log"
    assert {path.partition("/")[0] for path in run.home.files("")} == {"log"}
    monkeypatch.undo()
    assert main(["delete", run.address, "--yes"]) == 0
    assert not run.path("").exists()
