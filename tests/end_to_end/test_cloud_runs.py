"""Training on gs:// gives the same run as on a local folder, whatever faults the store has."""

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gcs.server import FakeGcs, FaultPlan
from tests.support.cloud_runs import CloudChild, copied, left_on
from tests.support.homes import commits_in, damaged, entries_of, head_of, read_history, tip_of, unexpected_folders

pytestmark = pytest.mark.slow

SEGMENTS = ["train.segment_steps=20", "checkpoint.keep_last=2"]
RATES = {
    "status": 0.03,
    "reset-before-body": 0.01,
    "reset-after-body": 0.01,
    "response-lost": 0.03,
    "reset-in-response": 0.01,
    "truncate": 0.02,
    "truncate-quietly": 0.02,
    "corrupt-download": 0.03,
    "corrupt-upload": 0.02,
    "duplicate": 0.03,
    "slow": 0.02,
}


@pytest.fixture(scope="module")
def local(train_without_prefect: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of the uninterrupted digits run on a local folder."""
    return train_without_prefect("digits", tmp_path_factory.mktemp("local"), extra=SEGMENTS).result


def test_processes_share_only_the_store(
    cloud: FakeGcs, tmp_path: Path, local: Any, stored_bytes: Callable[[str], Any]
) -> None:
    for number, words in enumerate((["--max-segments", "1"], ["--max-segments", "1"], ["--report"])):
        disk = tmp_path / f"machine-{number}"
        child = CloudChild(cloud, "digits", *words, root="team/runs", disk=disk, extra=SEGMENTS, own_home=True)
        result = child.finish()
        assert "Warning" not in child.stderr
        assert left_on(disk) == []
    assert result["home"] == "gs://bucket/team/runs/digits-cnn"
    assert result["exit_reason"] == "complete"
    assert result["state_digest"] == local["state_digest"]
    assert result["metrics"] == local["metrics"]
    here = copied(cloud, "team/runs", tmp_path / "copy")
    home = here / "digits-cnn"
    assert stored_bytes(str(home / "checkpoints" / Path(result["checkpoint"]).name)) == stored_bytes(
        local["checkpoint"]
    )
    assert read_history(home) == read_history(Path(local["home"]))
    _assert_only_known_files(here)
    _assert_commands_read_the_home(cloud, home)


def _assert_only_known_files(root: Path) -> None:
    head = head_of(root / "digits-cnn")
    assert head is not None
    names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    folders = {ref.path for ref in head.retained} | {old.path for old in head.retired}
    shapes = [
        r"digits-cnn/log/(\d{8}\.json|HINT)",
        rf"digits-cnn/({'|'.join(sorted(folders))})/(ckpt\.index|ckpt\.data-\d{{5}}-of-\d{{5}}|manifest\.json)",
        r"digits-cnn/code/[0-9a-f]{16}\.json",
        r"digits-cnn/confusion/\d{8}-\d{8}-[0-9a-f]{32}\.json",
        r"digits-cnn/attempts/[0-9a-f]{32}\.json",
        r"digits-cnn/tensorboard/(train|validation)/events\.out\.tfevents\.\d{10}\.step-\d+",
        r"digits-cnn/report/[\w.]+",
        r"datasets/[0-9a-f]{24}/((train|validation)-[\w-]+\.tfrecord|manifest\.json)",
    ]
    beyond = [name for name in names if not any(re.fullmatch(shape, name) for shape in shapes)]
    assert beyond == []
    assert unexpected_folders(root / "digits-cnn", head) == set()


def _assert_commands_read_the_home(cloud: FakeGcs, home: Path) -> None:
    """Assert that status, verify and list need only the address, and that status does not import TensorFlow."""
    address = "gs://bucket/team/runs/digits-cnn"
    ask = (
        "import sys; from baton.flows.commands.main import main; code = main(sys.argv[1:]); "
        "sys.stderr.write(str('tensorflow' in sys.modules)); sys.exit(code)"
    )

    def baton(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", ask, *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        return done

    status = baton("status", address)
    assert "step        60" in status.stdout
    assert status.stderr == "False", "status needs no TensorFlow"
    cloud.reset_counters()
    verified = baton("verify", address)
    assert "all bytes agree" in verified.stdout
    assert "verified" in verified.stderr
    head = head_of(home)
    assert head is not None
    files = {path.relative_to(home).as_posix() for ref in head.retained for path in (home / ref.path).iterdir()}
    read = {name.split("digits-cnn/")[1] for (_, name) in cloud.tally.media if "/checkpoints/" in name}
    assert read == files, "every committed byte is read"
    assert "digits-cnn" in baton("list", "gs://bucket/team/runs").stdout
    assert "no run is at gs://bucket/team/other" in baton("status", "gs://bucket/team/other", code=2).stderr
    name = next(name for name in cloud.store.names("bucket") if "/checkpoints/" in name and ".data" in name)
    cloud.store.put("bucket", name, cloud.store.bytes("bucket", name)[:-1] + b"x")
    damaged_ = baton("verify", address, code=4)
    assert name.split("digits-cnn/")[1] in damaged_.stdout


def test_dataset_larger_than_the_cache_is_fetched_again(
    cloud: FakeGcs, train_without_prefect: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 shards of 15 kB in a cache for 6: two windows in use and one that is read ahead."""
    small = [*SEGMENTS, "data.shard_examples=50", "data.window_shards=2"]
    here = train_without_prefect("digits", tmp_path / "local", extra=small).result
    monkeypatch.setenv("BATON_CACHE_BYTES", "96000")
    child = CloudChild(cloud, "digits", root="runs", disk=tmp_path / "machine", extra=small)
    result = child.finish(0)
    assert result["state_digest"] == here["state_digest"]
    fetched = {name: count for (_, name), count in cloud.tally.media.items() if "/train-" in name}
    assert len(fetched) == 33
    # 60 steps of 64 examples are 2.4 epochs, so dropped shards are fetched again, once for each epoch.
    assert sum(fetched.values()) > 2 * len(fetched)
    assert max(fetched.values()) <= 3 + 1


def test_corrupt_downloads_are_not_restored_or_quarantined(cloud: FakeGcs, tmp_path: Path, local: Any) -> None:
    """The newest checkpoint is sound in the store; only its download is damaged."""
    CloudChild(cloud, "digits", "--max-segments", "2", root="runs", disk=tmp_path / "first", extra=SEGMENTS).finish()
    before = copied(cloud, "runs", tmp_path / "before") / "digits-cnn"
    tip = tip_of(before)
    match = {"kind": "object.media", "path": rf"{tip.path}/ckpt\.data"}
    cloud.faults = FaultPlan.scripted([{"match": match, "fault": "corrupt-download", "times": None}])
    child = CloudChild(cloud, "digits", root="runs", disk=tmp_path / "second", extra=SEGMENTS)
    child.finish(1)
    assert "damaged in transit" in child.stderr
    assert "the file is intact" in child.stderr
    assert entries_of(copied(cloud, "runs", tmp_path / "after") / "digits-cnn") == entries_of(before)
    cloud.faults = None
    result = CloudChild(cloud, "digits", root="runs", disk=tmp_path / "third", extra=SEGMENTS).finish(0)
    assert result["state_digest"] == local["state_digest"]


def test_corrupt_uploads_are_never_committed(cloud: FakeGcs, tmp_path: Path, local: Any) -> None:
    CloudChild(cloud, "digits", "--max-segments", "1", root="runs", disk=tmp_path / "first", extra=SEGMENTS).finish()
    before = copied(cloud, "runs", tmp_path / "before") / "digits-cnn"
    cloud.faults = FaultPlan.scripted(
        [
            {"match": {"kind": kind, "path": r"ckpt\.data"}, "fault": "corrupt-upload", "times": None}
            for kind in ("object.insert", "upload.chunk")  # a repeated upload is a session
        ]
    )
    child = CloudChild(cloud, "digits", root="runs", disk=tmp_path / "second", extra=SEGMENTS)
    child.finish(1)
    assert "StorageError" in child.stderr
    assert "the store received other bytes than were sent" in child.stderr
    after = copied(cloud, "runs", tmp_path / "after") / "digits-cnn"
    assert len(commits_in(entries_of(after))) == len(commits_in(entries_of(before)))
    cloud.faults = None
    result = CloudChild(cloud, "digits", root="runs", disk=tmp_path / "third", extra=SEGMENTS).finish(0)
    assert result["state_digest"] == local["state_digest"]


# `make chaos` runs a dozen.
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(int(os.environ.get("BATON_TEST_CLOUD_RUNS", "2"))))
def test_runs_through_faults_and_kills_end_the_same(seed: int, tmp_path: Path, local: Any) -> None:
    assert _plan(seed, tmp_path, local) == []


def _plan(seed: int, folder: Path, local: Any) -> list[str]:
    """Run with store faults, interrupt once, resume to the end; returns what went wrong."""
    chance = random.Random(seed)
    off = []
    with FakeGcs() as server:
        server.faults = FaultPlan.random(seed, RATES)
        first = CloudChild(server, "digits", root="runs", disk=folder / "first", extra=SEGMENTS)
        if first.until_entries(chance.randrange(1, 7)):
            first.process.send_signal(chance.choice((signal.SIGKILL, signal.SIGTERM)))
        first.process.wait(300)
        last = CloudChild(server, "digits", root="runs", disk=folder / "last", extra=SEGMENTS)
        result = last.finish(0)
        if result["state_digest"] != local["state_digest"]:
            off.append(f"another end, {result['state_digest']}")
        home = copied(server, "runs", folder / "copy") / "digits-cnn"
        if read_history(home) != read_history(Path(local["home"])):
            off.append("another history")
        off += [f"{path} is damaged" for path in damaged(home)]
        steps = [ref.step for ref in commits_in(entries_of(home))]
        if steps != sorted(set(steps)):
            off.append(f"committed twice, {steps}")
        if not server.fault_run.log:
            off.append("no fault ever happened")
    return off
