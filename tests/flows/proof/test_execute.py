"""The result of an execution's process: its report, and the error that ended it."""

from pathlib import Path

import pytest

from baton.flows.bare_process import ProcessReport, process_report, read_process_report
from baton.flows.proof.choose import training_of
from baton.flows.proof.execute import Execution, FinishedProcess, FreshProcesses, error_of
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.telemetry.events import Note, StatefulOperations
from tests.support.fake_executions import small_run_file


@pytest.fixture
def execution(tmp_path: Path) -> Execution:
    return training_of(small_run_file(tmp_path), (), name="cut", storage=tmp_path, steps=31, segment_steps=7)


def test_crash_is_reported_with_the_end_of_its_output(execution: Execution) -> None:
    crash = error_of(execution, FinishedProcess(returncode=1, stderr="Traceback\nZeroDivisionError: 1\n"))
    assert type(crash) is BatonError
    assert "ended with code 1" in str(crash)
    assert "ZeroDivisionError" in str(crash)


def test_report_holds_the_stateful_operations(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with process_report(path) as reporter:
        reporter.emit(Note(text="model.py:build: x draw from TensorFlow's own random state", warning=True))
        reporter.emit(StatefulOperations(reference="model.py:build", operations=("a/RandomUniform", "b/PyFunc")))
    report = read_process_report(path)
    assert (report.error, report.stateful_operations) == (None, "model.py:build: a/RandomUniform, b/PyFunc")


@pytest.mark.parametrize("content", [None, b"", b'{"format": 1, "error": {"err', b'{"format": 2}'])
def test_missing_or_unreadable_report_is_empty(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_bytes(content)
    assert read_process_report(path) == ProcessReport()


def test_error_of_a_real_process_is_reported(execution: Execution, tmp_path: Path) -> None:
    execution.file.write_text("run: x\nno_such_key: 1\n")
    folder = tmp_path / "output"
    folder.mkdir()
    (folder / "cut.report.json").write_bytes(ProcessReport(stateful_operations="of an earlier process").to_json())
    finished = FreshProcesses(folder).run_to_end(execution)
    assert finished.returncode == 2, finished.stderr
    fault = error_of(execution, finished)
    assert (type(fault).__name__, fault.exit_code) == ("RunFileError", 2)
    assert f"error: RunFileError: {fault}" in finished.stderr  # standard error has the same error as text
    assert finished.report.stateful_operations == ""
