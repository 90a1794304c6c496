"""Executions in processes of their own: what ended one, and that it is killed with its parent's command."""

from pathlib import Path

import pytest

from baton.flows.proof.choose import training_of
from baton.flows.proof.execute import Execution, FreshProcesses
from baton.tasks.foundation.errors import RunFileError
from tests.support.fake_executions import small_run_file


@pytest.fixture
def execution(tmp_path: Path) -> Execution:
    return training_of(small_run_file(tmp_path), (), name="cut", storage=tmp_path, steps=31, segment_steps=7)


def test_error_of_a_real_process_is_reported(execution: Execution) -> None:
    execution.file.write_text("run: x\nno_such_key: 1\n")
    outcome = FreshProcesses().run_to_end(execution)
    assert outcome.returncode == 2, outcome.printed
    fault = outcome.error("the training cut")
    assert (type(fault), fault.exit_code) == (RunFileError, 2)
    assert "no_such_key" in str(fault)
    assert outcome.stateful_operations == ""
