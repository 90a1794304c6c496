"""The schedule is the supervisor; and three ways to train ad hoc are one. A real server, real workers, real kills."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.foundation.contracts.log_entry import Evaluation
from tests.support.homes import commits_in, entries_of, log_bytes, tip_of
from tests.support.prefect_deployments import ENDED, Prefect
from tests.support.prefect_server import Server, ask, baton
from tests.support.shipped_runs import SHORT, Finished, run_file
from tests.support.watching import attempts_of, commits_of, trains, wait_until

pytestmark = pytest.mark.slow

FILE = str(run_file("digits"))
# Segments that last long enough to be met while they train.
LONG = [*SHORT["digits"], "train.steps=6000", "evaluate.every_steps=null"]
TICK_SECONDS = 15


@pytest.fixture(scope="module")
def straight(plainly: Callable[..., Finished], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same run in one piece, without Prefect."""
    return plainly("digits", tmp_path_factory.mktemp("straight"), extra=[*LONG, "train.segment_steps=6000"]).result


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that keeps what it knows of held slots where a restart finds it, as deploy/README.md asks for."""
    leases = "prefect.server.concurrency.lease_storage.filesystem"
    server = Server(tmp_path_factory.mktemp("prefect-server"), PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=leases)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def prefect(own_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Prefect:
    return Prefect(own_server.url, tmp_path_factory.mktemp("prefect"))


def overrides_for(storage: Path, segment_steps: int) -> list[str]:
    return [f"storage={storage}", "accelerator.kind=cpu", *LONG, f"train.segment_steps={segment_steps}"]


def without_tensorflow(folder: Path) -> dict[str, str]:
    """The environment of a machine where TensorFlow cannot be imported."""
    for name in ("tensorflow", "keras"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise ImportError('{name} is not to be loaded')\n")
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}:{known}" if known else str(folder)}


@pytest.mark.timeout(1500)
def test_the_schedule_supervises(
    own_server: Server, prefect: Prefect, straight: dict[str, Any], told: Callable[[str], Any], tmp_path: Path
) -> None:
    home = tmp_path / "digits-cnn"
    parameters = {"run_file": FILE, "overrides": overrides_for(tmp_path, 3000), "max_segments": 1}
    nightly = prefect.deploy_shipped("train-run", "nightly", "--interval", str(TICK_SECONDS), **parameters)
    deployed = prefect.deployment(nightly)
    assert deployed["global_concurrency_limit"]["limit"] == 1
    assert deployed["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"

    def running() -> str:
        """The tick that is at work."""
        runs: list[dict[str, Any]] = []
        wait_until(lambda: bool(runs) or bool(runs.extend(prefect.runs(nightly, "RUNNING"))))
        return str(runs[0]["id"])

    with prefect.worker() as worker:
        # The first tick: its server dies and comes back while it trains.
        wait_until(lambda: len(attempts_of(home)) == 1 and trains(home, 0))
        own_server.kill()
        own_server.start()
        wait_until(lambda: (3000, "segment_end") in commits_of(home))

        # The second: its machine dies, with its worker.
        wait_until(lambda: len(attempts_of(home)) == 2 and trains(home, 1))
        killed = running()
        worker.kill()
        os.kill(attempts_of(home)[-1].pid, signal.SIGKILL)
        worker.wait()
    assert [step for step, _ in commits_of(home)] == [0, 3000]

    # Nobody has told the server, so the dead tick holds the one slot. Prefect lets go of it when its lease runs out,
    # five minutes after its last renewal, or as soon as somebody says that it has crashed: deploy/automations does so
    # by its missing heartbeats, and here the test, which has not that much time.
    assert prefect.state(killed) == "RUNNING"
    prefect.set_state(killed, type="CRASHED", name="Crashed")

    with prefect.worker():
        wait_until(lambda: tip_of(home).step == 6000 and bool(attempts_of(home)[-1].ended))
        prefect.pause(nightly)  # a tick that is stopped with its worker would hold the slot too
        wait_until(lambda: not prefect.runs(nightly, "RUNNING", "PENDING"))

    assert [step for step, _ in commits_of(home)] == [0, 3000, 6000]
    attempts = attempts_of(home)
    assert [(each.from_step, each.committed_step) for each in attempts] == [(0, 3000), (3000, 3000), (3000, 6000)]
    assert [each.ended for each in attempts] == ["max_segments", None, "complete"]
    assert tip_of(home).state_digest == straight["state_digest"]
    assert told(str(home)) == told(straight["home"])

    # Ticks after the end find nothing to do, on a machine that could not do anything.
    before, done = log_bytes(home), {run["id"] for run in prefect.runs(nightly, *ENDED)}

    def idle() -> list[dict[str, Any]]:
        ended = [run for run in prefect.runs(nightly, *ENDED) if run["id"] not in done]
        return [run for run in ended if run["state_type"] != "CANCELLED"]

    prefect.resume(nightly)
    with prefect.worker(**without_tensorflow(tmp_path / "poor")):
        wait_until(lambda: len(idle()) > 0)
    assert [(run["state_type"], run["state_name"]) for run in idle()[:1]] == [("COMPLETED", "Completed")]
    print("a tick with nothing to do:", [run["total_run_time"] for run in idle()], "s")  # noqa: T201
    assert log_bytes(home) == before
    assert len(attempts_of(home)) == len(attempts)
    prefect.pause(nightly)


EVALUATIONS = """
import sys
from flows.evaluate_best import evaluate_best

for step in ("best", 4500):
    print(evaluate_best(run_file=sys.argv[1], overrides=sys.argv[2:], step=step).model_dump_json())
"""


@pytest.mark.timeout(1500)
def test_three_ways_are_one_and_what_they_made_is_evaluated_again(
    prefect: Prefect, straight: dict[str, Any], told: Callable[[str], Any], tmp_path: Path
) -> None:
    home = tmp_path / "digits-cnn"
    overrides = overrides_for(tmp_path, 1500)
    words = [FILE, *(word for setting in overrides for word in ("--set", setting))]

    def module(*more: str) -> int:
        """`python -m flows.train_run`: its exit code."""
        command = [sys.executable, "-m", "flows.train_run", *words, *more]
        done = subprocess.run(command, env=prefect.environment, capture_output=True, timeout=600, check=False)
        return done.returncode

    def command(*more: str) -> int:
        """`baton run`: its exit code."""
        return baton(prefect.environment, "run", *words, *more).returncode

    # Refused alike, and nothing is there yet.
    assert (module("--set", "train.steps=0"), command("--set", "train.steps=0")) == (2, 2)
    assert not home.exists()

    # Each goes on where the one before has stopped.
    adhoc = prefect.deploy("flows/train_run.py:train_run", "adhoc")
    refused = prefect.start(adhoc, run_file=FILE, overrides=["train.stepz=3"])
    given = {"run_file": FILE, "overrides": json.dumps(overrides), "until_step": 1500}
    with prefect.worker():
        parameters = [word for key, value in given.items() for word in ("--param", f"{key}={value}")]
        prefect.command("deployment", "run", "train-run/adhoc", *parameters, "--watch", "--watch-interval", "1")
        wait_until(lambda: prefect.state(refused) in ENDED)
    assert sorted(run["state_name"] for run in prefect.runs(adhoc, *ENDED)) == ["Completed", "Failed"]
    assert "train.stepz" in prefect.run(refused)["state"]["message"]
    assert tip_of(home).step == 1500
    assert module("--max-segments", "1") == 3
    assert command("--max-segments", "1") == 3
    assert tip_of(home).step == 4500
    assert module() == 0
    entries = log_bytes(home)
    assert command() == 0
    assert log_bytes(home) == entries
    assert [ref.step for ref in commits_in(entries_of(home))] == [0, 1500, 3000, 4500, 6000]
    assert tip_of(home).state_digest == straight["state_digest"]
    assert told(str(home)) == told(straight["home"])

    # The best was evaluated when it was made, the one before the last was not.
    done = subprocess.run(
        [sys.executable, "-c", EVALUATIONS, FILE, *overrides],
        env=prefect.environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    best, before = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert (best["step"], best["agrees"], best["metrics"]) == (6000, True, best["logged"])
    assert (before["step"], before["agrees"], before["logged"]) == (4500, None, None)
    entry = entries_of(home)[-1]
    assert isinstance(entry.body, Evaluation)
    assert (entry.body.checkpoint.step, entry.body.metrics) == (4500, before["metrics"])
    assert len(log_bytes(home)) == len(entries) + 1
    runs = ask(prefect.url, "flow_runs/filter", {"flows": {"name": {"any_": ["evaluate-best"]}}})
    assert {run["name"] for run in runs} == {"digits-cnn"}
    said = sorted(run["state"]["message"] for run in runs)
    assert [text.partition(":")[0] for text in said] == ["step 4500", "step 6000"]
    assert [text.rpartition("; ")[2] for text in said] == ["not evaluated before", "as the log says"]
