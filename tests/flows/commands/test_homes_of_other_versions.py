"""Homes of other versions of Baton are refused by name, and reading changes none."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from baton.flows.commands.main import main
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.log_entry import SegmentRequest
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import AnotherVersion
from baton.tasks.foundation.log.stage_results import find_segment, take_answer, write_answer
from tests.support.fake_run import FakeRun
from tests.support.small_logs import signed


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    assert main([*arguments, "--json"]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path).train(100, 200)


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) | changes
    path.write_bytes(signed(data) if path.parent.name == "log" else json.dumps(data).encode())


def test_every_verb_refuses_an_entry_of_a_newer_version(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run.path("log/00000003.json"), format=3)
    before = run.files()
    for verb in (["status"], ["log"], ["verify"], ["fork", "--as", "new"], ["report"]):
        assert main([verb[0], run.address, *verb[1:]]) == AnotherVersion.exit_code == 2
        err = capsys.readouterr().err
        assert "log/00000003.json: this Entry was written by another version of Baton: format is 3" in err
        assert "hint: use the version of Baton that wrote it" in err
        assert "delete" not in err
    assert run.files() == before


def test_every_verb_refuses_a_home_of_an_earlier_revision(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    file = run.path("log/00000003.json")
    values = json.loads(file.read_text())
    del values["format"]
    file.write_bytes(signed({"schema_version": 2, **values}))
    before = run.files()
    for verb in (["status"], ["log"], ["verify"], ["fork", "--as", "new"], ["report"]):
        assert main([verb[0], run.address, *verb[1:]]) == 2
        err = " ".join(capsys.readouterr().err.split())
        assert "was written by a revision of Baton before 1.0, and revision 28ffee9 is the last that reads it" in err
    assert run.files() == before


def test_list_includes_a_run_of_a_newer_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newer = FakeRun(tmp_path, "newer")
    FakeRun(tmp_path, "sound")
    edit(newer.path("log/00000001.json"), format=3)
    [listed] = as_json(capsys, "list", str(newer.root.root), code=2)
    assert [(run["run"], run.get("error_class")) for run in listed["runs"]] == [
        ("newer", "AnotherVersion"),
        ("sound", None),
    ]
    assert main(["list", str(newer.root.root)]) == 2
    assert re.search(r"^newer +newer +.*format is 3", capsys.readouterr().out, re.MULTILINE)
    FakeRun(tmp_path, "torn").path("log/00000001.json").write_bytes(b"{")
    as_json(capsys, "list", str(newer.root.root), code=4)


def test_verify_ignores_unknown_keys(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run.path("log/00000001.json"), signed_by="z")
    edit(run.root.root / "datasets/0123456789ab/manifest.json", licence="CC0")
    *_, found = as_json(capsys, "verify", run.address)
    assert found["ok"]


def test_a_dataset_of_a_newer_version_is_not_damage(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run.root.root / "datasets/0123456789ab/manifest.json", format=3)
    assert main(["verify", run.address]) == 2
    assert "this DatasetManifest was written by another version" in capsys.readouterr().err


def test_stage_results_of_a_newer_version_are_refused(run: FakeRun) -> None:
    answer = DatasetRef(
        folder="datasets/a", content_digest="c", train_examples=1, validation_examples=0, already_prepared=True
    )
    write_answer(run.home, "first", answer)
    edit(run.path("answers/first.json"), took_seconds=3)
    assert take_answer(run.home, "first", DatasetRef) == answer
    write_answer(run.home, "second", answer)
    edit(run.path("answers/second.json"), format=2)
    with pytest.raises(AnotherVersion, match=r"answers/second\.json: this DatasetRef was written by another version"):
        take_answer(run.home, "second", DatasetRef)
    assert run.home.exists("answers/second.json")
    # The unreadable answer does not block another segment.
    request = SegmentRequest(
        spec=load_run_file(run.run_file()).spec, dataset=answer, start=run.tip, base=run.head.base, skipped_batches=0,
        until_step=300, number=1,
    )  # fmt: skip
    assert find_segment(run.home, request) is None
