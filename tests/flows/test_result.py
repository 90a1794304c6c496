"""The last lines of `baton run`."""

import io
import re
import shlex
import shutil
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from baton.flows import result as results
from baton.flows.admit import result_if_done
from baton.flows.commands.main import main
from baton.flows.commands.run import print_summary
from baton.flows.facts import RunFacts
from baton.flows.opened_run import OpenedRun
from baton.flows.result import Goal, report_end, result_of, result_of_interrupted
from baton.tasks.foundation.contracts.log_entry import MetricRow
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.log.appends import quarantine
from baton.tasks.foundation.telemetry.console import Console
from baton.tasks.foundation.telemetry.events import DatasetUsed, Event, Silent, warnings_as_notes
from tests.support.event_recorder import EventRecorder
from tests.support.fake_run import FakeRun


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def facts_of(run_file: Path) -> RunFacts:
    run = OpenedRun.open(load_run_file(run_file))
    return RunFacts.of(run, run.require_newest())


def summary_of(
    run: FakeRun,
    *,
    exit_reason: str,
    report: str | None = "/home/report/index.html",
    terminal: bool = False,
    events: Iterable[Event] = (),
) -> str:
    stream = Terminal() if terminal else io.StringIO()
    console = Console(stream)
    for event in events:
        console.emit(event)
    print_summary(
        console,
        facts_of(run.run_file(steps=300)),
        exit_reason=exit_reason,
        report_path=report,
        report_command="baton report run.yaml",
        continue_command="baton run run.yaml --set train.steps=600",
    )
    return stream.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path)


def test_summary_of_a_complete_run(run: FakeRun) -> None:
    run.train(100, 300).evaluate(0.9875)
    text = summary_of(run, exit_reason="complete")
    assert "Done: digits is at step 300 of 300." in text
    assert re.search(r"segments +step +loss +accuracy", text)
    assert re.search(r"run +2 +300/300", text)
    assert re.search(r"training +300 +0.3333 +0.5 *$", text, re.MULTILINE)
    assert re.search(r"validation +300 +0.9875 *$", text, re.MULTILINE)
    assert re.search(rf"^checkpoint +{run.address}/{run.tip.path}$", text, re.MULTILINE)
    assert re.search(r"^report +/home/report/index.html$", text, re.MULTILINE)
    assert re.search(r"^continue +baton run run.yaml --set train.steps=600$", text, re.MULTILINE)
    assert "\x1b" not in text


def test_summary_repeats_which_dataset_was_used_again(run: FakeRun) -> None:
    used = DatasetUsed(text="data.py:load: the dataset is used again; it read a.csv; not seen", words="it read a.csv")
    text = summary_of(run.train(300), exit_reason="complete", events=[used])
    assert text.startswith(f"{used.text}\n")
    assert re.search(r"^dataset +it read a.csv$", text, re.MULTILINE)


def test_many_metrics_are_rows_with_their_names(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    run.commit(300, [MetricRow(step=300, metrics={f"metric_{number}": number for number in range(25)})])
    text = re.sub(r"\x1b\[\d*m", "", summary_of(run, exit_reason="complete", terminal=True))
    assert re.search(r"^ +run +training *$", text, re.MULTILINE)
    for number in range(25):
        assert re.search(rf"^metric_{number} +{number} *$", text, re.MULTILINE)


def test_summary_has_short_ids_on_a_terminal(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    text = re.sub(r"\x1b\[\d*m", "", summary_of(run.train(100), exit_reason="complete", terminal=True))
    assert re.search(rf"^home +{run.address}\ncheckpoint +00000100-\d{{8}}-\w{{8}}$", text, re.MULTILINE)


def test_summary_of_a_stopped_run(run: FakeRun) -> None:
    text = summary_of(run.train(100), exit_reason="max_segments", report=None)
    assert "Stopped (max segments): digits is at step 100 of 300." in text
    assert re.search(r"^report +not up to date: baton report run.yaml$", text, re.MULTILINE)
    assert "validation" not in text


@pytest.mark.parametrize("report", ["/home/report/index.html", None])
def test_summary_has_the_report_or_its_command(report: str | None, run: FakeRun) -> None:
    text = summary_of(run.train(100), exit_reason="preempted", report=report)
    assert ("/home/report/index.html" in text) == (report is not None)
    assert ("not up to date: baton report run.yaml" in text) == (report is None)


def test_a_stop_ends_with_the_report(run: FakeRun) -> None:
    """The last that a command does, when all is committed; a warning if it cannot be written."""
    run.train(100)
    opened, recorder = OpenedRun.open(load_run_file(run.run_file(steps=300))), EventRecorder()
    run.attempt("a", ended="Terminated")
    assert report_end(opened, recorder) == f"{run.address}/report/index.html"
    assert "stopped by SIGTERM" in run.path("report/index.html").read_text()
    shutil.rmtree(run.path("report"))
    run.path("report").write_text("in the way of the folder")
    assert report_end(opened, recorder) is None
    [note] = recorder.notes
    assert note.startswith("the report could not be written; baton report ")


@pytest.mark.parametrize(
    ("reason", "written"), [("sigint", True), ("cancelled", True), ("sigterm", False), ("maintenance", False)]
)
def test_a_stop_writes_the_report_if_the_machine_stays(reason: str, written: bool, run: FakeRun) -> None:
    began = run.head
    run.train(100)
    opened = OpenedRun.open(load_run_file(run.run_file(steps=300)))
    done = result_of_interrupted(opened, Goal.of(opened.spec), reason, since=began, telemetry=Silent())
    assert done is not None
    assert (done.exit_reason, done.step, done.stopped) == (reason, 100, True)
    assert run.path("report/index.html").is_file() == written == (done.report is not None)


@pytest.mark.parametrize("why", ["in the way", "KeyError"])
def test_a_report_that_fails_is_a_warning(run: FakeRun, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """All work is committed: whether a command is stopped, ends, or finds nothing to do, its result is the same."""
    began = run.head
    run.train(100).evaluate(0.5)
    if why == "in the way":
        run.path("report").write_text("in the way of the folder")
    else:
        monkeypatch.setattr(results, "write_report", lambda *_given, **_named: {}["KeyError"])
    opened = OpenedRun.open(load_run_file(run.run_file(steps=100)))
    goal, recorder = Goal.of(opened.spec), EventRecorder()
    for done in (
        result_of_interrupted(opened, goal, "sigint", since=began, telemetry=recorder),
        result_of(opened, segments=1, exit_reason="complete", telemetry=recorder),
        result_if_done(opened, goal, run.head, telemetry=recorder),
    ):
        assert done is not None
        assert (done.stopped, done.step, done.report) == (False, 100, None)
    assert len(recorder.notes) == 3
    for note in recorder.notes:
        assert note.startswith("all work is committed, but the report could not be written; baton report ")
        assert ("a file is in place of a folder" if why == "in the way" else "KeyError: 'KeyError'") in note
        assert f"baton report {opened.home.uri} tries again" in note


def test_a_damaged_old_entry_costs_the_metrics_only(run: FakeRun) -> None:
    """The totals of the lineage that a damaged tip leaves are in its entries, of which one is damaged too."""
    run.train(100, 200)
    entry = run.path("log/00000002.json")
    entry.write_bytes(entry.read_bytes().replace(b"e", b"f", 1))
    opened = OpenedRun.open(load_run_file(run.run_file(steps=100)))
    quarantine(opened.log, run.tip, "damaged", attempt="a" * 32)
    recorder = EventRecorder()
    with warnings_as_notes(recorder):
        done = result_of(opened, segments=1, exit_reason="complete", telemetry=recorder)
    assert (done.step, done.metrics) == (100, {})
    assert [note.partition(",")[0] for note in recorder.notes] == [
        "the history of the run could not be read",
        "the TensorBoard files could not be written",
        "all work is committed",
    ]
    assert all("00000002.json is damaged" in note for note in recorder.notes)


def test_summary_if_nothing_is_left_to_do(run: FakeRun) -> None:
    text = summary_of(run.train(300), exit_reason="nothing_to_do")
    assert "Nothing to do: digits is at step 300 of 300." in text
    assert "Done" not in text


def test_summary_of_an_untrained_run(run: FakeRun) -> None:
    text = summary_of(run, exit_reason="until_step")
    assert "Stopped (until step): digits is at step 0 of 300." in text
    assert f"{run.address}/checkpoints/00000000-" in text


@pytest.mark.parametrize(("steps", "where"), [(300, "step 300 of 300"), (100, "step 300, beyond the target of 100")])
def test_the_printed_command_continues_the_run(
    steps: int, where: str, run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """It also continues a run that `--set train.steps=300` trained beyond the target in its file."""
    run.train(100, 300).evaluate(0.5)
    (run.folder / "model.py").write_text("def build_model(): ...\n")
    file = str(run.run_file(steps=steps))
    assert main(["run", file, "--set", f"train.steps={steps}"]) == 0
    text = capsys.readouterr().out
    assert f"Nothing to do: digits is at {where}." in text
    words = shlex.split(text.partition("continue ")[2].splitlines()[0])
    assert words[1:3] == ["run", file]
    overrides = [word for flag, word in pairwise(words) if flag == "--set"]
    again = OpenedRun.open(load_run_file(Path(file), overrides))
    assert result_if_done(again, Goal.of(again.spec), again.log.head(), telemetry=Silent()) is None
    assert main(["status", file]) == 0
    assert re.search(rf"^step +{where.removeprefix('step ')}$", capsys.readouterr().out, re.MULTILINE)
