"""Store outages, and SIGTERM during one: the process ends in time with a message, and every commit stays."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.tasks.foundation.checkpoint.verify import find_damage
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from tests.fakes.gcs.server import FakeGcs, FaultPlan
from tests.support import forked
from tests.support.cloud_runs import HOMES, entries_in
from tests.support.prefect_server import environment_with
from tests.support.shipped_runs import SLOW, settings, slow_digits
from tests.support.watching import wait_until

pytestmark = pytest.mark.slow

# An endless segment with a commit a second. A commit waits up to five minutes for the store.
ENDLESS = [*SLOW, "train.steps=2000000", "train.segment_steps=2000000"]
OFTEN = [*ENDLESS, "checkpoint.every_seconds=1", "stop.grace_seconds=4"]
# Without the deadline it would take more than five minutes.
LONGEST_SECONDS = 240.0
OUTAGES = {
    "responds with 503": {"fault": "status", "code": 503},
    "does not respond": {"fault": "stall", "stall_seconds": 3600.0},
}


@contextmanager
def child(
    module: str, words: Sequence[str], folder: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Train the digits run on gs:// in a process during the block; its output goes to `folder`/output."""
    command = [sys.executable, "-W", "ignore", "-m", module, *words, str(slow_digits(folder / "code"))]
    command += settings("digits", "gs://bucket/runs", extra=OFTEN)
    with (
        (folder / "output").open("wb") as output,
        forked.killed_at_end(
            forked.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        ) as process,
    ):
        yield process


@pytest.mark.parametrize(
    ("module", "words", "outage"),
    [
        ("baton.flows.train", [], "does not respond"),
        pytest.param("baton.flows.commands.main", ["run"], "responds with 503", marks=pytest.mark.nightly),
    ],
    ids=["plain", "baton run"],
)
def test_refusals_are_waited_for_and_sigterm_ends_during_an_outage(
    cloud: FakeGcs, tmp_path: Path, module: str, words: list[str], outage: str
) -> None:
    environment = environment_with(tmp_path / "prefect")
    home = f"runs/{HOMES['digits']}/"
    # A fault without effect; its log shows that a command probes the storage once.
    probe = {"match": {"kind": "object.insert", "path": r"/\.probe"}, "fault": "slow", "times": None}
    cloud.faults = FaultPlan.scripted([probe])
    with child(module, words, tmp_path, environment) as process:
        wait_until(lambda: entries_in(cloud, home) >= 4, process)
        assert len(cloud.fault_run.log) == 1
        refused = {"match": {"kind": "object.insert"}, "times": 6, "fault": "status", "code": 403}
        cloud.faults = FaultPlan.scripted([refused])
        wait_until(lambda: len(cloud.fault_run.log) == 6, process)
        known = entries_in(cloud, home)
        wait_until(lambda: entries_in(cloud, home) > known, process)
        cloud.faults = FaultPlan.scripted([{"match": {"kind": ""}, "times": None, **OUTAGES[outage]}])
        # Usually during a commit: there is one a second.
        requests = cloud.count("")
        wait_until(lambda: cloud.count("") >= requests + 3, process)
        committed = {
            name: cloud.store.bytes("bucket", name) for name in cloud.store.names("bucket") if "/log/0" in name
        }
        process.send_signal(signal.SIGTERM)
        code = process.wait(LONGEST_SECONDS)
    output = (tmp_path / "output").read_text()
    assert code == 3, output[-3000:]
    assert "Injected by the fake. (403); retrying" in output, output[-3000:]
    assert "the store does not respond" in output
    assert "what is committed stays" in output
    assert "Traceback" not in output, output[-3000:]
    cloud.faults = None
    after = {name: cloud.store.bytes("bucket", name) for name in committed}
    assert after == committed
    log = RunLog(CloudStorage("bucket", home.rstrip("/")))
    tip = log.require_head().tip
    assert tip is not None
    assert find_damage(log.home, tip, read_bytes=True) is None


@pytest.mark.nightly
def test_refusal_that_stays_ends_the_run(cloud: FakeGcs, tmp_path: Path) -> None:
    environment = environment_with(tmp_path / "prefect") | {"BATON_STORAGE_PATIENCE_SECONDS": "15"}
    home = f"runs/{HOMES['digits']}/"
    with child("baton.flows.train", [], tmp_path, environment) as process:
        wait_until(lambda: entries_in(cloud, home) >= 4, process)
        refused = {"match": {"kind": "object.insert"}, "times": None, "fault": "status", "code": 403}
        cloud.faults = FaultPlan.scripted([refused])
        assert process.wait(LONGEST_SECONDS) == 1
    output = (tmp_path / "output").read_text()
    assert "Injected by the fake. (403); retrying" in output, output[-3000:]
    assert "gave up after" in output, output[-3000:]
    assert "what is committed stays; run the same command to continue" in output
    assert "Traceback" not in output, output[-3000:]
