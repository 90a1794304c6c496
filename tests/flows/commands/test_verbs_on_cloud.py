"""Every verb prints the same for a run on gs:// as for the same run in a folder; a refusing store gives exit code 2."""

import json
import re
import sys
from pathlib import Path

import pytest

from baton.flows.commands.main import main
from tests.fakes.gcs.server import FakeGcs
from tests.support.checkout import CHECKOUT
from tests.support.fake_run import FakeRun

DIGITS = CHECKOUT / "deploy/runs/digits/run.yaml"


@pytest.fixture
def run(tmp_path: Path, cloud: FakeGcs) -> FakeRun:
    """A run in a folder, and a copy at gs://bucket/team."""
    run = FakeRun(tmp_path).train(100, 200, 300)
    copy_up(run, cloud)
    return run


def copy_up(run: FakeRun, cloud: FakeGcs) -> None:
    for path in run.root.files(""):
        cloud.store.put("bucket", f"team/{path}", run.root.read(path))


@pytest.mark.parametrize(
    "words", [["status"], ["log"], ["verify"], ["status", "--json"], ["log", "--json"], ["verify", "--json"]]
)
def test_verbs_print_the_same_for_cloud_homes(
    run: FakeRun, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for address in (run.address, "gs://bucket/team/digits"):
        assert main([words[0], address, *words[1:]]) == 0
        printed.append(re.sub(r" +", " ", capfd.readouterr().out.replace(address, "HOME")))
    assert printed[0] == printed[1]
    assert "HOME" in printed[0] or words[0] == "log"


def test_list_prints_the_same_for_cloud_storage(run: FakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    printed = []
    for address in (run.root.uri, "gs://bucket/team"):
        assert main(["list", address, "--json"]) == 0
        printed.append(json.loads(capfd.readouterr().out.replace(address, "ROOT")))
    assert printed[0] == printed[1]
    assert [run["run"] for run in printed[0]["runs"]] == ["digits"]


def test_a_fork_stays_in_the_bucket(run: FakeRun, cloud: FakeGcs, capfd: pytest.CaptureFixture[str]) -> None:
    cloud.reset_counters()
    assert main(["fork", "gs://bucket/team/digits", "--at-step", "200", "--as", "other"]) == 0
    assert cloud.count("object.rewrite") == 2
    assert main(["verify", "gs://bucket/team/other"]) == 0
    assert main(["status", "gs://bucket/team/other", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (facts["step"], facts["forked_from"]["home"]) == (200, "gs://bucket/team/digits")
    assert run.tip.step == 300


def test_verify_prints_progress(cloud: FakeGcs, run: FakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "gs://bucket/team/digits"]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"verified {run.head.number + 1} log entries"
    assert [line.split("(")[1] for line in lines[1:-1]] == [f"{n} of 4 checkpoints)" for n in (1, 2, 3, 4)]
    assert lines[-1].startswith("verified datasets/")
    assert cloud.counts["GET", "object.media"] > 12


REFUSING = {
    "gs://no-such-bucket/runs": ([], "bucket gs://no-such-bucket not found"),
    "gs://bucket/create": (["storage.objects.create"], "no permission to create objects"),
    "gs://bucket/delete": (["storage.objects.delete"], "no permission to delete or replace objects"),
    "gs://bucket/read": (["storage.objects.get", "storage.objects.list"], "no permission to read objects"),
    "gs://Bucket/runs": ([], "'Bucket' is not a valid bucket name"),
}


@pytest.mark.parametrize("storage", REFUSING)
def test_a_refusing_store_is_reported_before_the_run_starts(
    cloud: FakeGcs, storage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Importing these modules now fails, so the store is checked before it.
    for name in ("prefect", "tensorflow"):
        monkeypatch.setitem(sys.modules, name, None)
    denied, printed = REFUSING[storage]
    cloud.store.set_bucket("bucket", denied=denied)
    assert main(["run", str(DIGITS), "--set", f"storage={storage}"]) == 2
    assert printed in " ".join(capsys.readouterr().err.split())
    left = [name for name in cloud.store.names("bucket") if ".probe-" not in name]
    assert left == []
