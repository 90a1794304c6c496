"""A schedule restarts and finishes a killed run, and three ways to start a run continue the same run."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.log_entry import Evaluation
from tests.support import forked
from tests.support.homes import commits_in, entries_of, log_bytes, read_history, tip_of
from tests.support.prefect_deployments import ENDED, Prefect
from tests.support.prefect_server import Server, baton, post
from tests.support.shipped_runs import NO_PAUSES, SHORT, SLOW, Finished, run_file, slow_digits
from tests.support.watching import attempts_of, commits_of, trains, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

FILE = str(run_file("digits"))
TICK_SECONDS = 15


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that keeps the leases of concurrency slots on disk, as deploy/README.md recommends."""
    leases = "prefect.server.concurrency.lease_storage.filesystem"
    server = Server(tmp_path_factory.mktemp("prefect-server"), PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=leases)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def prefect(own_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Prefect:
    return Prefect(own_server.url, tmp_path_factory.mktemp("prefect"))


def overrides_for(storage: Path, *settings: str) -> list[str]:
    return [f"storage={storage}", "accelerator.kind=cpu", *settings]


def without_tensorflow(folder: Path) -> dict[str, str]:
    """An environment where TensorFlow cannot be imported."""
    for name in ("tensorflow", "keras"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise ImportError('{name} is not to be loaded')\n")
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}:{known}" if known else str(folder)}


@pytest.mark.timeout(1500)
def test_schedule_restarts_and_finishes_a_run(
    own_server: Server, prefect: Prefect, train_without_prefect: Callable[..., Finished], tmp_path: Path
) -> None:
    file, steps = slow_digits(tmp_path / "slow"), [*SLOW, "train.steps=1200"]
    one_segment = [*steps, "train.segment_steps=1200"]
    straight = train_without_prefect(
        "digits", tmp_path / "straight", extra=one_segment, file=file, environment=NO_PAUSES
    ).result
    home = tmp_path / "digits-cnn"
    overrides = overrides_for(tmp_path, *steps, "train.segment_steps=600")
    parameters = {"run_file": str(file), "overrides": overrides, "max_segments": 1}
    nightly = prefect.deploy_shipped("train-run", "nightly", "--interval", str(TICK_SECONDS), **parameters)
    deployed = prefect.deployment(nightly)
    assert deployed["global_concurrency_limit"]["limit"] == 1
    assert deployed["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"

    def running() -> str:
        """Return the id of the running flow run."""
        runs: list[dict[str, Any]] = []
        wait_until(lambda: bool(runs) or bool(runs.extend(prefect.runs(nightly, "RUNNING"))))
        return str(runs[0]["id"])

    with prefect.worker() as worker:
        # First tick: the server is killed and restarted during training.
        wait_until(lambda: len(attempts_of(home)) == 1 and trains(home, 0))
        own_server.kill()
        own_server.start()
        wait_until(lambda: (600, "segment_end") in commits_of(home))

        # Second tick: its process and its worker are killed.
        wait_until(lambda: len(attempts_of(home)) == 2 and trains(home, 1))
        killed = running()
        worker.kill()
        os.kill(attempts_of(home)[-1].pid, signal.SIGKILL)
        worker.wait()
    assert [step for step, _ in commits_of(home)] == [0, 600]

    # The server does not know, so the dead tick still holds the only slot. Prefect releases it when its lease expires
    # after five minutes, or when the flow run is set to Crashed. The automation in deploy/automations does that after
    # missing heartbeats; here the test does, to save the time.
    assert prefect.state(killed) == "RUNNING"
    prefect.set_state(killed, type="CRASHED", name="Crashed")

    with prefect.worker():
        wait_until(lambda: tip_of(home).step == 1200 and bool(attempts_of(home)[-1].ended))
        prefect.pause(nightly)  # a tick that stops with its worker would hold the slot too
        wait_until(lambda: not prefect.runs(nightly, "RUNNING", "PENDING"))

    assert [step for step, _ in commits_of(home)] == [0, 600, 1200]
    attempts = attempts_of(home)
    assert [(each.from_step, each.committed_step) for each in attempts] == [(0, 600), (600, 600), (600, 1200)]
    assert [each.ended for each in attempts] == ["max_segments", None, "complete"]
    assert tip_of(home).state_digest == straight["state_digest"]
    assert read_history(str(home)) == read_history(straight["home"])

    # Ticks after the end find nothing to do, even on a machine without TensorFlow.
    before, done = log_bytes(home), {run["id"] for run in prefect.runs(nightly, *ENDED)}

    def idle() -> list[dict[str, Any]]:
        ended = [run for run in prefect.runs(nightly, *ENDED) if run["id"] not in done]
        return [run for run in ended if run["state_type"] != "CANCELLED"]

    prefect.resume(nightly)
    with prefect.worker(**without_tensorflow(tmp_path / "without-tensorflow")):
        wait_until(lambda: len(idle()) > 0)
    assert [(run["state_type"], run["state_name"]) for run in idle()[:1]] == [("COMPLETED", "Completed")]
    print("a tick with nothing to do:", [run["total_run_time"] for run in idle()], "s")  # noqa: T201
    assert log_bytes(home) == before
    assert len(attempts_of(home)) == len(attempts)
    prefect.pause(nightly)


EVALUATIONS = """
import sys
from baton.flows.with_prefect.run_flows import evaluate_best

for step in ("best", 45):
    print(evaluate_best(run_file=sys.argv[1], overrides=sys.argv[2:], step=step).model_dump_json())
"""


@pytest.mark.timeout(1500)
def test_deployment_and_command_continue_one_run(
    prefect: Prefect, train_without_prefect: Callable[..., Finished], tmp_path: Path
) -> None:
    steps = [*SHORT["digits"], "evaluate.every_steps=null"]
    straight = train_without_prefect("digits", tmp_path / "straight", extra=[*steps, "train.segment_steps=60"]).result
    home = tmp_path / "digits-cnn"
    overrides = overrides_for(tmp_path, *steps, "train.segment_steps=15")
    words = [FILE, *(word for setting in overrides for word in ("--set", setting))]

    def command(*more: str) -> int:
        """Run `baton run`; returns the exit code."""
        return baton(prefect.environment, "run", *words, *more).returncode

    assert command("--set", "train.steps=0") == 2
    assert not home.exists()

    # Each continues where the one before stopped.
    adhoc = prefect.deploy("flows/with_prefect/run_flows.py:train_run", "adhoc")
    refused = prefect.start(adhoc, run_file=FILE, overrides=["train.stepz=3"])
    given = {"run_file": FILE, "overrides": json.dumps(overrides), "until_step": 15}
    with prefect.worker():
        parameters = [word for key, value in given.items() for word in ("--param", f"{key}={value}")]
        prefect.command("deployment", "run", "train-run/adhoc", *parameters, "--watch", "--watch-interval", "1")
        wait_until(lambda: prefect.state(refused) in ENDED)
    assert sorted(run["state_name"] for run in prefect.runs(adhoc, *ENDED)) == ["Completed", "Failed"]
    assert "train.stepz" in prefect.run(refused)["state"]["message"]
    assert tip_of(home).step == 15
    assert command("--max-segments", "2") == 3
    assert tip_of(home).step == 45
    assert command() == 0
    entries = log_bytes(home)
    assert command() == 0
    assert log_bytes(home) == entries
    assert [ref.step for ref in commits_in(entries_of(home))] == [0, 15, 30, 45, 60]
    assert tip_of(home).state_digest == straight["state_digest"]
    assert read_history(str(home)) == read_history(straight["home"])

    # Only the best was evaluated during the run.
    done = forked.run(
        [sys.executable, "-c", EVALUATIONS, FILE, *overrides],
        env=prefect.environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    best, before = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert (best["step"], best["agrees"], best["metrics"]) == (60, True, best["logged"])
    assert (before["step"], before["agrees"], before["logged"]) == (45, None, None)
    entry = entries_of(home)[-1]
    assert isinstance(entry.body, Evaluation)
    assert (entry.body.checkpoint.step, entry.body.metrics) == (45, before["metrics"])
    assert len(log_bytes(home)) == len(entries) + 1
    runs = post(prefect.url, "flow_runs/filter", {"flows": {"name": {"any_": ["evaluate-best"]}}})
    assert {run["name"] for run in runs} == {"digits-cnn"}
    messages = sorted(run["state"]["message"] for run in runs)
    assert [text.partition(":")[0] for text in messages] == ["step 45, validation", "step 60, validation"]
    assert [text.rpartition("; ")[2] for text in messages] == ["not evaluated before", "same as the log"]
