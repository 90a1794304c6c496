"""What `baton run` says at its end."""

import io
import re
from pathlib import Path

import pytest
from fake_run import FakeRun

from flows.commands.closing import NOTHING_TO_DO, print_closing
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.runlog.history import history_of
from tasks.foundation.telemetry.console import Console


def closing(run: FakeRun, *, exit_reason: str, report: str | None = "/home/report/index.html") -> str:
    stream = io.StringIO()
    print_closing(
        Console(stream),
        home=run.home,
        history=history_of(run.log.entries()),
        spec=load_run_file(run.run_file(steps=300)).spec,
        exit_reason=exit_reason,
        report_path=report,
        continue_command="baton run run.yaml --set train.steps=600",
    )
    return stream.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path)


def test_done(run: FakeRun) -> None:
    run.train(100, 300).evaluate(0.9875)
    text = closing(run, exit_reason="complete")
    assert "Done: digits is at step 300 of 300." in text
    assert re.search(r"segments +step +loss +accuracy", text)
    assert re.search(r"run +2 +300/300", text)
    assert re.search(r"training +300 +0.3333 +0.5 *$", text, re.MULTILINE)
    assert re.search(r"validation +300 +0.9875 *$", text, re.MULTILINE)
    assert re.search(rf"^checkpoint +{run.address}/{run.tip.path}$", text, re.MULTILINE)
    assert re.search(r"^report +/home/report/index.html$", text, re.MULTILINE)
    assert re.search(r"^continue +baton run run.yaml --set train.steps=600$", text, re.MULTILINE)
    assert "\x1b" not in text


def test_stopped_on_the_way(run: FakeRun) -> None:
    text = closing(run.train(100), exit_reason="max_segments", report=None)
    assert "Stopped (max segments): digits is at step 100 of 300." in text
    assert "report" not in text
    assert "validation" not in text


def test_nothing_to_do(run: FakeRun) -> None:
    text = closing(run.train(300), exit_reason=NOTHING_TO_DO)
    assert "Nothing to do: digits is at step 300 of 300." in text
    assert "Done" not in text


def test_untrained(run: FakeRun) -> None:
    text = closing(run, exit_reason="until_step")
    assert "Stopped (until step): digits is at step 0 of 300." in text
    assert f"{run.address}/checkpoints/00000000-" in text
