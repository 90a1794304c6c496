"""A run that is continued starts without Prefect; `test_train_run.py` has the run beside its flow run."""

import subprocess
import sys
from pathlib import Path

import pytest

from flows.admit import Admitted, admit
from flows.opened_run import Goal, Run
from flows.train_beside import waits_for_flow_run
from tasks.foundation.contracts.run_file import load_run_file
from tests.support.event_recorder import EventRecorder
from tests.support.fake_prefect_api import run_with_code

# What a continued run imports before its first step, besides TensorFlow.
_CODE = """
import sys
import flows.train_beside, flows.relay, flows.prefect_compat.prefect_startup
assert not {"prefect", "tensorflow"} & sys.modules.keys()
"""


def test_start_of_a_continued_run_imports_no_prefect() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("settings", "waits"),
    [([], False), (["run=new"], True), (["stages.evaluate=evaluate/docker"], True)],
    ids=["continued", "new", "remote stage"],
)
def test_new_runs_and_remote_stages_wait_for_the_flow_run(settings: list[str], waits: bool, tmp_path: Path) -> None:
    run = Run.open(load_run_file(run_with_code(tmp_path).run_file(), settings))
    admitted = admit(run, Goal.of(run.spec, until_step=150), telemetry=EventRecorder())
    assert isinstance(admitted, Admitted)
    assert waits_for_flow_run(admitted) is waits
