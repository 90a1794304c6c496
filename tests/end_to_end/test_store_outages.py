"""The store is away when a process is asked to go: it goes in time, says so, and what is committed stays."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasks.foundation.checkpoint.verify import damage
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.gcs.storage import CloudStorage
from tests.fakes.gcs.fake_gcs import FakeGcs, FaultPlan
from tests.support import forked
from tests.support.cloud_runs import HOMES, entries_in
from tests.support.prefect_server import environment_with
from tests.support.shipped_runs import run_file, settings
from tests.support.watching import wait_until

pytestmark = pytest.mark.slow

# One segment without an end, with a commit a second; a commit that waits for the store has five minutes for it.
ENDLESS = ["train.steps=2000000", "train.segment_steps=2000000", "evaluate.every_steps=null"]
OFTEN = [*ENDLESS, "checkpoint.every_seconds=1", "stop.grace_seconds=4"]
# Against hanging alone: without a deadline it takes more than five minutes.
LONGEST_SECONDS = 240.0
GONE = {
    "answers 503": {"fault": "status", "code": 503},
    "answers nothing": {"fault": "stall", "stall_seconds": 3600.0},
}


@contextmanager
def child(
    module: str, words: Sequence[str], folder: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-W", "ignore", "-m", module, *words, str(run_file("digits"))]
    command += settings("digits", "gs://bucket/runs", extra=OFTEN)
    with (folder / "said").open("wb") as said:
        process = forked.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("module", "words", "gone"),
    [("flows.without_prefect", [], "answers nothing"), ("flows.commands.main", ["run"], "answers 503")],
    ids=["plain", "baton run"],
)
def test_sigterm_while_the_store_is_away(
    cloud: FakeGcs, tmp_path: Path, module: str, words: list[str], gone: str
) -> None:
    environment = environment_with(tmp_path / "prefect")
    home = f"runs/{HOMES['digits']}/"
    # No fault, but it is logged: the storage is tried out once for a command.
    tried_out = {"match": {"kind": "object.insert", "path": r"/\.probe"}, "fault": "slow", "times": None}
    cloud.faults = FaultPlan.scripted([tried_out])
    with child(module, words, tmp_path, environment) as process:
        wait_until(lambda: entries_in(cloud, home) >= 4, process)
        assert len(cloud.fault_run.log) == 1
        cloud.faults = FaultPlan.scripted([{"match": {"kind": ""}, "times": None, **GONE[gone]}])
        # In the middle of a commit, as a rule: there is one a second.
        asked = cloud.count("")
        wait_until(lambda: cloud.count("") >= asked + 3, process)
        committed = {
            name: cloud.store.bytes("bucket", name) for name in cloud.store.names("bucket") if "/log/0" in name
        }
        process.send_signal(signal.SIGTERM)
        code = process.wait(LONGEST_SECONDS)
    said = (tmp_path / "said").read_text()
    assert code == 3, said[-3000:]
    assert "the store could not be reached" in said
    assert "what is committed stays" in said
    assert "Traceback" not in said, said[-3000:]
    cloud.faults = None
    after = {name: cloud.store.bytes("bucket", name) for name in committed}
    assert after == committed
    log = RunLog(CloudStorage("bucket", home.rstrip("/")))
    tip = log.require_head().tip
    assert tip is not None
    assert damage(log.home, tip, read=True) is None
