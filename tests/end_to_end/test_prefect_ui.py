"""What Prefect's UI shows of a run, and a run whose Prefect server is killed."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.homes import entries_of, head_of
from tests.support.prefect_server import Server, baton, ended_task_runs, environment_with, graph, post, serving
from tests.support.shipped_runs import run_file, settings
from tests.support.watching import commits_of, trains, wait_until

pytestmark = pytest.mark.slow

# Without background traffic.
CHROMIUM = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--virtual-time-budget=15000", "--dump-dom",
)  # fmt: skip

CHARTS = ["loss", "accuracy", "learning rate", "throughput of each segment"]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run of 60 steps in two flow runs, as the server has it."""

    url: str
    home: Path
    flow_runs: list[dict[str, Any]]
    artifacts: dict[str, dict[str, Any]]  # of the second flow run, by key


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedRun]:
    """Train a run in two flow runs on a new server, and read what the server has recorded."""
    folder = tmp_path_factory.mktemp("prefect-ui")
    with serving(Server(folder, PREFECT_UI_ENABLED="true")) as url:
        environment = environment_with(folder / "prefect", PREFECT_API_URL=url)
        extra = ["train.segment_steps=30", "evaluate.every_steps=30"]
        words = ["run", str(run_file("digits")), *settings("digits", folder / "runs", extra=extra)]
        first = baton(environment, *words, "--max-segments", "1")
        assert first.returncode == 3, first.stderr
        second = baton(environment, *words)
        assert second.returncode == 0, second.stderr
        flow_runs = post(url, "flow_runs/filter", {"sort": "START_TIME_ASC"})
        newest = {"flow_runs": {"id": {"any_": [flow_runs[-1]["id"]]}}}
        artifacts = post(url, "artifacts/filter", newest)
        assert len({artifact["key"] for artifact in artifacts}) == len(artifacts)
        assert all(re.match("digits-cnn-[0-9a-f]{6}-", artifact["key"]) for artifact in artifacts)
        yield RecordedRun(
            url=url,
            home=folder / "runs" / "digits-cnn",
            flow_runs=flow_runs,
            artifacts={artifact["key"].rpartition("-")[2]: artifact for artifact in artifacts},
        )


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
    assert kinds == {"progress": "progress", "commits": "table", "curves": "markdown", "report": "markdown"}
    assert recorded.artifacts["progress"]["data"] == 100
    assert recorded.artifacts["progress"]["description"].startswith("step 60 of 60, epoch ")
    rows = json.loads(recorded.artifacts["commits"]["data"])
    # Includes the commits of the first flow run.
    assert [(row["step"], row["ended by"].replace(" ", "_")) for row in reversed(rows)] == commits_of(recorded.home)
    assert [bool(row["validation"]) for row in rows] == [True, True, False]
    pictures = re.findall(r"!\[(.*?)\]\(data:image/svg\+xml;base64,(.*?)\)", recorded.artifacts["curves"]["data"])
    assert [name.partition(",")[0] for name, _ in pictures] == CHARTS
    assert all(base64.b64decode(data).startswith(b'<svg xmlns="http://www.w3.org/2000/svg"') for _, data in pictures)
    report = recorded.artifacts["report"]["data"]
    assert f"`{recorded.home}/report/index.html`" in report
    assert "| step | training | validation |\n| --- | --- | --- |\n| 60 | loss " in report
    assert [name for name, _ in re.findall(r"!\[(.*?)\]\((.*?)\)", report)] == [name for name, _ in pictures]
    assert report.count("| segment end |") == 2


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
    flow_run = page(f"{root}/runs/flow-run/{recorded.flow_runs[-1]['id']}")
    assert "digits-cnn" in flow_run
    assert "run:digits-cnn" in flow_run
    assert "Completed" in flow_run
    for ui in (root, f"{root}/v2"):  # both clean the Markdown that they show
        curves = page(f"{ui}/artifacts/artifact/{recorded.artifacts['curves']['id']}")
        assert recorded.artifacts["curves"]["key"] in curves
        assert curves.count('src="data:picture"') == len(CHARTS)
    keys = page(f"{root}/artifacts")
    assert all(artifact["key"] in keys for artifact in recorded.artifacts.values())


def recorded_tasks(url: str) -> set[str]:
    """The running stages, as the server has them."""
    running = {"task_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    return {task["name"].split()[0] for task in post(url, "task_runs/filter", running)}


def test_run_survives_a_killed_prefect_server(tmp_path: Path) -> None:
    home = tmp_path / "runs" / "digits-cnn"
    extra = ["train.steps=6000", "train.segment_steps=2000", "evaluate.every_steps=2000"]
    command = [sys.executable, "-m", "flows.commands.main", "run", str(run_file("digits"))]
    command += settings("digits", tmp_path / "runs", extra=extra)
    server = Server(tmp_path)
    with serving(server) as url:
        # By default Prefect's client retries for a minute.
        environment = environment_with(tmp_path / "prefect", PREFECT_API_URL=url, PREFECT_CLIENT_MAX_RETRIES="1")
        with (tmp_path / "out").open("wb") as out:
            process = forked.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
            try:
                wait_until(lambda: trains(home, 0) and recorded_tasks(url) == {"train-segment"}, process)
                server.kill()
                before = commits_of(home)
                code = process.wait(timeout=400)
            finally:
                process.kill()
                process.wait()
    output = (tmp_path / "out").read_text()
    assert code == 0, output[-3000:]
    assert before[-1][0] < 6000
    assert [step for step, _ in commits_of(home)] == [0, 2000, 4000, 6000]
    head = head_of(home)
    assert head is not None
    assert [entry.body.kind for entry in entries_of(home)].count("evaluation") == 3
    assert output.count("Prefect is not responding and does not record what is done") == 1
    assert output.count("the run's artifacts in Prefect are outdated") == 1
    assert "Prefect did not record the result" in output
    assert "Done: digits-cnn is at step 6000 of 6000" in output
    assert (home / "report" / "index.html").is_file()
