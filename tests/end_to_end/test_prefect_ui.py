"""What Prefect's UI shows of a run, which has the bits of one without Prefect; and a run whose server is killed.

One server is for all tests of this file. The last one kills it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.homes import entries_of, head_of, tip_of
from tests.support.prefect_server import (
    Server,
    baton,
    ended_task_runs,
    environment_with,
    graph,
    post,
    serving,
    train_runs,
)
from tests.support.shipped_runs import SLOW, run_file, settings, slow_digits
from tests.support.watching import commits_of, trains, wait_until

pytestmark = pytest.mark.slow

# Without background traffic.
CHROMIUM = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--virtual-time-budget=15000", "--dump-dom",
)  # fmt: skip

CHARTS = ["loss", "accuracy", "learning rate of the next step", "throughput of each segment"]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run of 60 steps in two flow runs, as the server has it."""

    url: str
    home: Path
    printed: list[dict[str, Any]]  # by the two commands, with --json
    flow_runs: list[dict[str, Any]]
    artifacts: dict[str, dict[str, Any]]  # of the second flow run, by key


@pytest.fixture(scope="module")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of this file, with its pages."""
    server = Server(tmp_path_factory.mktemp("prefect-ui"), PREFECT_UI_ENABLED="true")
    with serving(server):
        yield server


@pytest.fixture(scope="module")
def recorded(prefect_server: Server, tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """Train a run in two flow runs, and read what the server has recorded."""
    folder, url = tmp_path_factory.mktemp("recorded"), prefect_server.url
    environment = environment_with(folder / "prefect", PREFECT_API_URL=url)
    extra = ["train.segment_steps=30", "evaluate.every_steps=30"]
    words = ["run", str(run_file("digits")), *settings("digits", folder / "runs", extra=extra), "--json"]
    commands = [baton(environment, *words, "--max-segments", "1"), baton(environment, *words)]
    assert [done.returncode for done in commands] == [3, 0], commands
    flow_runs = train_runs(url, folder)[::-1]
    newest = {"flow_runs": {"id": {"any_": [flow_runs[-1]["id"]]}}}
    artifacts = post(url, "artifacts/filter", newest)
    assert len({artifact["key"] for artifact in artifacts}) == len(artifacts)
    assert all(re.match("digits-cnn-[0-9a-f]{6}-", artifact["key"]) for artifact in artifacts)
    return RecordedRun(
        url=url,
        home=folder / "runs" / "digits-cnn",
        printed=[json.loads(done.stdout.splitlines()[-1]) for done in commands],
        flow_runs=flow_runs,
        artifacts={artifact["key"].rpartition("-")[2]: artifact for artifact in artifacts},
    )


def test_run_without_a_server_has_the_same_bytes_and_one_note(
    recorded: RecordedRun, stored_bytes: Callable[[str], Any], tmp_path: Path
) -> None:
    environment = environment_with(tmp_path / "prefect", PREFECT_API_URL="http://127.0.0.1:9/api")
    words = settings("digits", tmp_path / "runs", extra=["train.segment_steps=1000"])
    done = baton(environment, "run", str(run_file("digits")), *words)
    assert done.returncode == 0, done.stderr
    (note,) = [line for line in done.stdout.splitlines() if "Prefect" in line and "starting Prefect" not in line]
    assert "this run is not recorded in Prefect: " in note
    assert "no Prefect server responds there (ConnectError" in note
    assert "Traceback" not in done.stdout + done.stderr
    assert "Done: digits-cnn is at step 60 of 60" in done.stdout
    home = tmp_path / "runs" / "digits-cnn"
    first, second = recorded.printed
    assert (first["exit_reason"], second["exit_reason"]) == ("max_segments", "complete")
    assert {"run", "home", "step", "checkpoint", "state_digest", "segments", "metrics"} <= second.keys()
    assert second["state_digest"] == tip_of(home).state_digest
    assert stored_bytes(second["checkpoint"]) == stored_bytes(f"{home}/{tip_of(home).path}")


def test_flow_runs_have_names_tags_and_states(recorded: RecordedRun) -> None:
    first, second = recorded.flow_runs
    assert {run["name"] for run in recorded.flow_runs} == {"digits-cnn → 60"}
    assert all(set(run["tags"]) == {"baton", "run:digits-cnn"} for run in recorded.flow_runs)
    assert (first["state_type"], first["state_name"]) == ("COMPLETED", "Stopped")
    metrics = r"epoch \S+, validation loss \S+, accuracy \S+"
    message = rf"max segments: digits-cnn is at step 30 of 60, {metrics}, with work left to do"
    assert re.fullmatch(message, first["state"]["message"])
    assert (second["state_type"], second["state_name"]) == ("COMPLETED", "Completed")
    message = rf"digits-cnn is at step 60 of 60, {metrics}"
    assert re.fullmatch(message, second["state"]["message"])
    tasks = ended_task_runs(recorded.url, [second], 5)
    # Not in the order of their times: the commit and the evaluation run at once, and end within milliseconds.
    assert sorted(task["name"] for task in tasks) == [
        "checkpoint step 60",
        "evaluate step 60",
        "init-or-restore digits-cnn",
        "prepare-data digits",
        "train-segment to step 60",
    ]
    assert all({"baton", "run:digits-cnn"} <= set(task["tags"]) for task in tasks)
    assert graph(recorded.url, second["id"]) == {
        "prepare-data digits": [],
        "init-or-restore digits-cnn": ["prepare-data digits"],
        "train-segment to step 60": ["init-or-restore digits-cnn"],
        "checkpoint step 60": ["train-segment to step 60"],
        "evaluate step 60": ["train-segment to step 60"],
    }
    assert {task["state_type"] for task in tasks} == {"COMPLETED"}
    logs = post(recorded.url, "logs/filter", {"logs": {"flow_run_id": {"any_": [second["id"]]}}, "limit": 200})
    for words in ("step 60 committed", "evaluated on"):
        assert any(words in log["message"] for log in logs)


def test_commit_beside_the_training_is_a_task_run_of_its_own(prefect_server: Server, tmp_path: Path) -> None:
    url = prefect_server.url
    command = [sys.executable, "-m", "tests.support.call_function", "tests.support.recorded_stages", "run_beside", "{}"]
    environment = environment_with(tmp_path / "prefect", PREFECT_API_URL=url)
    done = forked.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    flow_run = json.loads(done.stdout.splitlines()[-1].removeprefix("result: "))
    recorded = ended_task_runs(url, [{"id": flow_run}], 3)
    first, commit, second = sorted(recorded, key=lambda run: str(run["start_time"]))
    names = [run["name"].split()[0] for run in (first, commit, second)]
    assert names == ["train-segment", "checkpoint", "train-segment"]
    assert first["start_time"] <= commit["start_time"] <= second["start_time"] <= commit["end_time"]
    assert {tuple(run["tags"]) for run in recorded} == {("baton",)}
    logs: list[dict[str, Any]] = []

    def logged() -> bool:
        logs[:] = post(url, "logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run]}}})
        return any(log["message"] == "trained" for log in logs)

    wait_until(logged)
    assert [log["task_run_id"] for log in logs if log["message"] == "trained"] == [second["id"]]


def test_a_commit_is_an_event_of_its_flow_run(recorded: RecordedRun) -> None:
    """By it, an automation notices that none comes, for which its flow is related."""
    expected = {f"prefect.flow-run.{run['id']}" for run in recorded.flow_runs}
    found: set[str] = set()

    def stored() -> bool:  # the server stores them every few seconds
        events = post(recorded.url, "events/filter", {"filter": {"event": {"name": ["baton.commit"]}}})["events"]
        found.update(
            event["resource"]["prefect.resource.id"] for event in events if "train-run" in related_flows(event)
        )
        return found >= expected

    wait_until(stored)
    assert found == expected


def related_flows(event: dict[str, Any]) -> list[str]:
    related = [each for each in event["related"] if each["prefect.resource.role"] == "flow"]
    return [each["prefect.resource.name"] for each in related]


def test_artifacts_show_what_the_log_holds(recorded: RecordedRun) -> None:
    kinds = {part: artifact["type"] for part, artifact in recorded.artifacts.items()}
    assert kinds == {"progress": "progress", "report": "markdown"}
    assert recorded.artifacts["progress"]["data"] == 100
    assert recorded.artifacts["progress"]["description"].startswith("step 60 of 60, epoch ")
    report = recorded.artifacts["report"]["data"]
    lines = [line for line in report.splitlines() if line.startswith("| ")]
    headings, _, *cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    rows = [dict(zip(headings, row, strict=True)) for row in cells]
    # Includes the commits of the first flow run.
    commits = [(int(row["step"]), row["ended by"].replace(" ", "_")) for row in reversed(rows)]
    assert commits == commits_of(recorded.home)
    assert [bool(row["validation metrics"]) for row in rows] == [True, True, False]
    assert f"`{recorded.home}/report/index.html`" in report


def test_pages_render_in_a_browser(recorded: RecordedRun, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        why = "no Chromium here (Debian: apt-get install --no-install-recommends chromium)"
        if os.environ.get("BATON_TEST_CONTAINERS") == "required":
            pytest.fail(why)
        pytest.skip(why)

    def page(address: str) -> str:
        """The page after its scripts ran."""
        profile = tmp_path / "profile"
        shutil.rmtree(profile, ignore_errors=True)
        command = [browser, *CHROMIUM, f"--user-data-dir={profile}", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Uncaught" not in done.stderr, done.stderr[-2000:]
        return re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", "data:picture", done.stdout)

    report = page((recorded.home / "report" / "index.html").as_uri())
    assert "<h1>digits-cnn</h1>" in report
    captions = [caption.strip() for caption in re.findall(r"<figcaption>([^<]+)", report)]
    assert captions == [*CHARTS, "processors in use", "memory in use, GB"]
    assert report.count("<svg") == len(captions)
    root = recorded.url.removesuffix("/api")
    for ui in (root, f"{root}/v2"):  # both clean the Markdown that they show
        shown = page(f"{ui}/artifacts/artifact/{recorded.artifacts['report']['id']}")
        assert recorded.artifacts["report"]["key"] in shown
        assert "segment end" in shown


def recorded_tasks(url: str) -> set[str]:
    """The running stages, as the server has them."""
    running = {"task_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    return {task["name"].split()[0] for task in post(url, "task_runs/filter", running)}


def test_run_survives_a_killed_prefect_server(prefect_server: Server, tmp_path: Path) -> None:
    """The last test of this file: it kills the server of the others."""
    home = tmp_path / "runs" / "digits-cnn"
    extra = [*SLOW, "train.steps=3000", "train.segment_steps=1000", "evaluate.every_steps=1000"]
    command = [sys.executable, "-m", "baton.flows.commands.main", "run", str(slow_digits(tmp_path / "slow"))]
    command += settings("digits", tmp_path / "runs", extra=extra)
    url = prefect_server.url
    # By default Prefect's client retries for a minute.
    environment = environment_with(tmp_path / "prefect", PREFECT_API_URL=url, PREFECT_CLIENT_MAX_RETRIES="1")
    with (tmp_path / "out").open("wb") as out:
        process = forked.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: trains(home, 0) and recorded_tasks(url) == {"train-segment"}, process)
            prefect_server.kill()
            before = commits_of(home)
            code = process.wait(timeout=400)
        finally:
            process.kill()
            process.wait()
    output = (tmp_path / "out").read_text()
    assert code == 0, output[-3000:]
    assert before[-1][0] < 3000
    assert [step for step, _ in commits_of(home)] == [0, 1000, 2000, 3000]
    head = head_of(home)
    assert head is not None
    assert [entry.body.kind for entry in entries_of(home)].count("evaluation") == 3
    assert output.count("Prefect is not responding and does not record what is done") == 1
    assert output.count("the run's artifacts in Prefect are outdated") == 1
    assert "Prefect did not record the result" in output
    assert "Done: digits-cnn is at step 3000 of 3000" in output
    assert (home / "report" / "index.html").is_file()
