"""`baton fork`, and what the reading verbs print about a fork."""

import json
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from baton.flows.commands.main import main
from baton.tasks.foundation.contracts.home_files import SAVED_CODE
from baton.tasks.foundation.contracts.log_entry import Change, Rewind
from tests.support.fake_run import FakeRun


@pytest.fixture
def run(tmp_path: Any) -> FakeRun:
    return FakeRun(tmp_path).train(100, 200)


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def test_fork_by_run_file_prints_the_next_command(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(run.run_file())
    assert main(["fork", file, "--at-step", "100", "--as", "digits-b"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^run +digits-b, forked from {run.address} at step 100$", out, re.MULTILINE)
    assert f"baton run {file} --set run=digits-b" in out
    assert main(["fork", file, "--at-step", "100", "--as", "digits-b"]) == 0
    assert "digits-b, was forked from" in capsys.readouterr().out
    facts = json_of(capsys, "status", file, "--set", "run=digits-b")
    assert facts["step"] == 100
    assert [kept["step"] for kept in facts["retained"]] == [100]
    assert facts["segments"] == 0
    assert (facts["forked_from"]["home"], facts["forked_from"]["step"]) == (run.address, 100)


def test_fork_of_a_linked_home_lies_beside_the_link(
    run: FakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "other-storage"
    storage.mkdir()
    (storage / "link").symlink_to(run.home.root)
    before = sorted(run.root.root.rglob("*"))
    facts = json_of(capsys, "fork", str(storage / "link"), "--as", "other")
    assert facts["home"] == str(storage / "other")
    assert json_of(capsys, "status", facts["home"])["step"] == 200
    assert sorted(run.root.root.rglob("*")) == before


def test_fork_by_address(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json_of(capsys, "fork", run.address, "--as", "other")
    home = f"{run.root.uri}/other"
    assert (facts["run"], facts["home"], facts["step"], facts["already_there"]) == ("other", home, 200, False)
    assert facts["forked_from"] == {
        "home": run.address,
        "path": run.tip.path,
        "step": 200,
        "state_digest": run.tip.state_digest,
        "entry": 3,
        "parent": None,
    }
    assert facts["checkpoint"].startswith(f"{home}/checkpoints/00000200-00000000-")
    assert json_of(capsys, "fork", run.address, "--as", "other")["already_there"] is True
    # `verify` finds the fork complete, even after the other run is deleted.
    shutil.rmtree(run.home.root)
    assert json_of(capsys, "verify", home)["ok"] is True
    assert main(["log", home]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"forked from {run.address} at step 200; cpu, 2 replicas, threads 2/1" in lines[0]
    assert re.search(r"  200  checkpoints/00000200-\S+  .*  forked$", lines[1])
    assert main(["report", home]) == 0
    page = (Path(home) / "report" / "index.html").read_text()
    assert f"forked from step 200 of STORAGE/digits ({facts['forked_from']['path']})" in page


def test_damaged_code_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = f"code/{0:016x}.json"
    run = FakeRun(tmp_path, identity={SAVED_CODE: code})
    run.home.write(code, b"{}")
    assert main(["fork", run.address, "--as", "other"]) == 0
    assert f"{code}, the saved code, cannot be read" in caplog.text
    assert run.root.read(f"other/{code}") == b"{}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--as", "a/b"], "--as 'a/b' cannot be a run's name: use letters"),
        (["--as", ""], "--as '' cannot be a run's name"),
        (["--as", "datasets"], "--as 'datasets' cannot be a run's name"),
        (["--as", "digits"], "holds a run already, at step 200; take another name"),
        (["--as", "new", "--at-step", "150"], "it retains steps 0, 100, 200"),
        (["--as", "new", "--at-step", "x"], "--at-step"),
        ([], "--as"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    run: FakeRun, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    files = run.files()
    assert main(["fork", run.address, *arguments]) == 2
    assert words in capsys.readouterr().err
    assert run.files() == files


def test_an_empty_home_cannot_be_forked(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fork", f"{run.root.uri}/nowhere", "--as", "new"]) == 2
    assert "no run is at" in capsys.readouterr().err


def test_the_log_shows_rewinds_and_accepted_changes(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    environment = run.head.environment
    rewind = Rewind(to=run.head.retained[1], blown_up_at=150, reason="the loss is NaN", skip_batches=7)
    change = Change(environment=environment, identity={**run.head.identity, "train.seed": 3}, accepted=("train.seed",))
    versions = {"tensorflow": "2.19.1", "keras": "3.16"}
    other = environment.model_copy(update={"replicas": 8, "inter_op_threads": 4, "versions": versions})
    for body in (rewind, change, Change(environment=environment), Change(environment=other)):
        run.log.append(lambda _, body=body: body, attempt=uuid.uuid4().hex)  # type: ignore[misc]
    assert main(["log", run.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.search(
        r" rewind +100  back to checkpoints/00000100-\S+, skips 7 batches; step 150: the loss is NaN$", lines[-4]
    )
    assert re.search(r" change +accepted train.seed: train.seed: 0 -> 3; cpu, 2 replicas, threads 2/1$", lines[-3])
    assert re.search(r" change +cpu, 2 replicas, threads 2/1$", lines[-2])
    assert json_of(capsys, "verify", run.address)["ok"] is True
    assert main(["report", run.address]) == 0
    page = re.sub(r"<[^>]+>", " ", run.path("report/index.html").read_text())
    for words in (
        "rewound to step 100, skipping 7 global batches: the loss is NaN",
        "accepted train.seed: train.seed: 0 -&gt; 3",
        "environment: replicas: 2 -&gt; 8; operations at a time: 1 -&gt; 4; version of keras: none -&gt; 3.16",
    ):
        assert words in page, words
