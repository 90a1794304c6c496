"""What a run looks like in Prefect's UI, and what becomes of it when Prefect goes away under it."""

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

from tests.support.homes import entries_of, head_of
from tests.support.prefect_server import Server, ask, baton, environment_with, serving
from tests.support.shipped_runs import run_file, settings
from tests.support.watching import commits_of, trains, wait_until

pytestmark = pytest.mark.slow

# As a person runs it who does not want to leave traces, or talk to anybody.
CHROMIUM = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--virtual-time-budget=15000", "--dump-dom",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A run of 60 steps in two flow runs, as a server knows it."""

    url: str
    home: Path
    flow_runs: list[dict[str, Any]]
    artifacts: dict[str, dict[str, Any]]  # of the second flow run, by key


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("prefect-ui")
    with serving(Server(folder, PREFECT_UI_ENABLED="true")) as url:
        environment = environment_with(folder / "prefect", PREFECT_API_URL=url)
        extra = ["train.segment_steps=30", "evaluate.every_steps=30"]
        words = ["run", str(run_file("digits")), *settings("digits", folder / "runs", extra=extra)]
        first = baton(environment, *words, "--max-segments", "1")
        assert first.returncode == 3, first.stderr
        second = baton(environment, *words)
        assert second.returncode == 0, second.stderr
        flow_runs = ask(url, "flow_runs/filter", {"sort": "START_TIME_ASC"})
        newest = {"flow_runs": {"id": {"any_": [flow_runs[-1]["id"]]}}}
        artifacts = ask(url, "artifacts/filter", newest)
        assert len({artifact["key"] for artifact in artifacts}) == len(artifacts)
        yield Seen(
            url=url,
            home=folder / "runs" / "digits-cnn",
            flow_runs=flow_runs,
            artifacts={artifact["key"].removeprefix("digits-cnn-"): artifact for artifact in artifacts},
        )


def test_names_tags_and_states_tell_the_story(seen: Seen) -> None:
    first, second = seen.flow_runs
    assert {run["name"] for run in seen.flow_runs} == {"digits-cnn"}
    assert all(set(run["tags"]) == {"baton", "run:digits-cnn"} for run in seen.flow_runs)
    assert (first["state_type"], first["state_name"]) == ("COMPLETED", "Stopped")
    said = r"max segments: digits-cnn is at step 30 of 60, validation loss \S+, accuracy \S+, with work left to do"
    assert re.fullmatch(said, first["state"]["message"])
    assert (second["state_type"], second["state_name"]) == ("COMPLETED", "Completed")
    said = r"digits-cnn is at step 60 of 60, validation loss \S+, accuracy \S+"
    assert re.fullmatch(said, second["state"]["message"])
    tasks = ask(seen.url, "task_runs/filter", {"flow_runs": {"id": {"any_": [second["id"]]}}, "sort": "END_TIME_DESC"})
    assert [task["name"] for task in reversed(tasks)] == [
        "prepare-data digits",
        "init-or-restore digits-cnn",
        "train-segment to step 60",
        "checkpoint-to-gcs step 60",
        "evaluate step 60",
    ]
    assert all({"baton", "run:digits-cnn"} <= set(task["tags"]) for task in tasks)
    assert {task["state_type"] for task in tasks} == {"COMPLETED"}


def test_the_artifacts_show_the_run_as_its_log_has_it(seen: Seen) -> None:
    kinds = {part: artifact["type"] for part, artifact in seen.artifacts.items()}
    assert kinds == {"progress": "progress", "commits": "table", "curves": "markdown", "report": "markdown"}
    assert seen.artifacts["progress"]["data"] == 100
    assert seen.artifacts["progress"]["description"].startswith("step 60 of 60, loss ")
    rows = json.loads(seen.artifacts["commits"]["data"])
    # The first flow run's too.
    assert [(row["step"], row["ended by"].replace(" ", "_")) for row in reversed(rows)] == commits_of(seen.home)
    assert [bool(row["validation"]) for row in rows] == [True, True, False]
    pictures = re.findall(r"!\[(.*?)\]\(data:image/png;base64,(.*?)\)", seen.artifacts["curves"]["data"])
    assert [name for name, _ in pictures] == ["loss", "accuracy", "examples per second, by segment"]
    assert all(base64.b64decode(data).startswith(b"\x89PNG") for _, data in pictures)
    assert f"`{seen.home}/report/index.html`" in seen.artifacts["report"]["data"]


def test_the_pages_have_their_content_in_a_browser(seen: Seen, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        why = "no Chromium here (Debian: apt-get install --no-install-recommends chromium)"
        if os.environ.get("BATON_TEST_CONTAINERS") == "required":
            pytest.fail(why)
        pytest.skip(why)

    def page(address: str) -> str:
        """What a browser makes of it, scripts and all."""
        profile = tmp_path / "profile"
        shutil.rmtree(profile, ignore_errors=True)
        command = [browser, *CHROMIUM, f"--user-data-dir={profile}", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Uncaught" not in done.stderr, done.stderr[-2000:]
        return re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "data:picture", done.stdout)

    report = page((seen.home / "report" / "index.html").as_uri())
    assert "<h1>digits-cnn</h1>" in report
    assert report.count('src="data:picture"') == 4
    root = seen.url.removesuffix("/api")
    flow_run = page(f"{root}/runs/flow-run/{seen.flow_runs[-1]['id']}")
    assert "digits-cnn" in flow_run
    assert "run:digits-cnn" in flow_run
    assert "Completed" in flow_run
    curves = page(f"{root}/artifacts/artifact/{seen.artifacts['curves']['id']}")
    assert "digits-cnn-curves" in curves
    assert curves.count('src="data:picture"') == 3
    keys = page(f"{root}/artifacts")
    assert all(f"digits-cnn-{part}" in keys for part in seen.artifacts)


def test_a_server_that_is_killed_takes_nothing_with_it(tmp_path: Path) -> None:
    home = tmp_path / "runs" / "digits-cnn"
    extra = ["train.steps=1500", "train.segment_steps=500", "evaluate.every_steps=500"]
    command = [sys.executable, "-m", "flows.commands.main", "run", str(run_file("digits"))]
    command += settings("digits", tmp_path / "runs", extra=extra)
    server = Server(tmp_path)
    with serving(server) as url:
        # As many tries as a test can wait for; left alone, Prefect's client tries for a minute.
        environment = environment_with(tmp_path / "prefect", PREFECT_API_URL=url, PREFECT_CLIENT_MAX_RETRIES="1")
        with (tmp_path / "out").open("wb") as out:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
            try:
                wait_until(lambda: trains(home, 0), process)
                server.kill()
                before = commits_of(home)
                code = process.wait(timeout=400)
            finally:
                process.kill()
                process.wait()
    said = (tmp_path / "out").read_text()
    assert code == 0, said[-3000:]
    assert before[-1][0] < 1500
    assert [step for step, _ in commits_of(home)] == [0, 500, 1000, 1500]
    head = head_of(home)
    assert head is not None
    assert [entry.body.kind for entry in entries_of(home)].count("evaluation") == 3
    assert said.count("Prefect does not answer and is not told of what is done") == 1
    assert said.count("what Prefect shows of the run is behind") == 1
    assert "Prefect was not told" in said
    assert "Done: digits-cnn is at step 1500 of 1500." in said
    assert (home / "report" / "index.html").is_file()
