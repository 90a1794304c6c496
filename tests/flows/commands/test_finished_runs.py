"""A run that its callbacks ended before its target: every verb shows it, and no work is left."""

import io
import json
import re
from html import escape
from pathlib import Path

import pytest

from baton.flows.admit import result_if_done
from baton.flows.commands.main import main
from baton.flows.commands.run import print_summary
from baton.flows.facts import RunFacts
from baton.flows.opened_run import OpenedRun
from baton.flows.result import Goal
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.log.appends import finish
from baton.tasks.foundation.telemetry.console import Console
from baton.tasks.foundation.telemetry.events import Silent
from tests.support.fake_run import FakeRun

REASON = "EarlyStopping set model.stop_training in on_epoch_end of epoch 1 <b>"


def facts_of(run_file: Path) -> RunFacts:
    run = OpenedRun.open(load_run_file(run_file))
    return RunFacts.of(run, run.require_newest())


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path).train(100, 200)
    finish(run.log, run.tip, base=run.head.base, reason=REASON, attempt="a" * 32)
    (tmp_path / "model.py").write_text("def build_model():\n    pass\n")
    return run


def test_a_finished_run_is_done_after_its_last_evaluation(run: FakeRun) -> None:
    opened = OpenedRun.open(load_run_file(run.run_file()))
    goal = Goal.of(opened.spec)
    assert not goal.reached(run.head, opened.spec)
    run.evaluate(0.5)
    assert goal.reached(run.head, opened.spec)
    assert goal.reason(run.head, opened.spec) == "finished_early"
    assert Goal.of(opened.spec, until_step=200).reason(run.head, opened.spec) == "until_step"
    done = result_if_done(opened, goal, run.head, telemetry=Silent())
    assert done is not None
    assert (done.exit_reason, done.step, done.stopped) == ("nothing_to_do", 200, False)
    # Whether the callbacks have changed is known only after they are loaded.
    assert result_if_done(opened, goal, run.head, accept=("train.callbacks",), telemetry=Silent()) is None
    assert result_if_done(opened, goal, run.head, accept=("train.seed",), telemetry=Silent()) is not None


def test_status_log_and_report_show_the_early_end(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", run.address]) == 0
    assert f"early, at step 200: {REASON}" in capsys.readouterr().out
    assert main(["status", run.address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"] == {"step": 200, "reason": REASON}
    assert main(["log", run.address]) == 0
    assert re.search(rf"finish +200  ended early: {re.escape(REASON)}$", capsys.readouterr().out, re.MULTILINE)
    assert main(["report", run.address]) == 0
    page = run.path("report/index.html").read_text()
    assert f"ended early, at step 200: {escape(REASON)}" in page


@pytest.mark.parametrize(("exit_reason", "word"), [("nothing_to_do", "Nothing to do"), ("finished_early", "Done")])
def test_the_summary_says_how_to_continue(run: FakeRun, exit_reason: str, word: str) -> None:
    stream = io.StringIO()
    print_summary(
        Console(stream),
        facts_of(run.run_file()),
        exit_reason=exit_reason,
        report_path=None,
        report_command="baton report run.yaml",
        continue_command="baton run run.yaml",
    )
    text = stream.getvalue()
    assert f"{word}: digits ended early, at step 200 of 400." in text
    assert "EarlyStopping set model.stop_training" in text
    assert "baton run run.yaml --set train.callbacks=null --accept callbacks" in text


@pytest.mark.parametrize(("index", "writes"), [(0, True), (1, False)])
def test_only_the_chief_writes_if_nothing_is_left_to_do(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch, index: int, writes: bool
) -> None:
    place = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(place))
    run.evaluate(0.9)
    opened = OpenedRun.open(load_run_file(run.run_file(steps=200), ["accelerator.kind=multi_worker"]))
    before = run.files()
    done = result_if_done(opened, Goal.of(opened.spec), run.head, telemetry=Silent())
    assert done is not None
    assert done.exit_reason == "nothing_to_do"
    assert (run.files() != before) == writes
