"""The flow train-run: the names of its flow runs, and the flow that `baton run` runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import Flow
from prefect.logging import disable_run_logger

from flows import train_run as module
from flows.admission.admit import Admitted, admit
from flows.evaluate_best import evaluate_best
from flows.goal import Goal
from flows.run import Run
from flows.train_run import train_run, train_run_of_command
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.errors import RunFileError
from tests.support.event_recorder import EventRecorder
from tests.support.fake_prefect_api import run_with_code
from tests.support.fake_run import FakeRun


@pytest.mark.parametrize("flow", [train_run, evaluate_best])
@pytest.mark.parametrize(
    ("file", "overrides", "name"),
    [
        ("run.yaml", None, "digits"),
        ("run.yaml", ["run=other"], "other"),
        ("run.yaml", ["train.stepz=3"], "run.yaml"),
        ("not-there.yaml", [], "not-there.yaml"),
        ("", [], "."),
    ],
)
def test_flow_run_is_named_after_the_run_or_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flow: Flow[..., Any], *, file: str, overrides: Any, name: str
) -> None:
    FakeRun(tmp_path).run_file()
    given = {"run_file": str(tmp_path / file) if file else "", "overrides": overrides}
    monkeypatch.setattr(module, "flow_run", SimpleNamespace(parameters=given))
    assert callable(flow.flow_run_name)
    assert flow.flow_run_name() == name
    if name.endswith((".yaml", ".")):
        with pytest.raises(RunFileError):
            flow.fn(**given)


def test_flow_of_the_command_takes_the_same_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect's UI shows the parameters; the flow trains the run that the command has opened and admitted."""
    run = Run.open(load_run_file(run_with_code(tmp_path).run_file()))
    recorder, results = EventRecorder(), []
    admitted = admit(run, Goal.of(run.spec, until_step=150), telemetry=recorder)
    assert isinstance(admitted, Admitted)
    reached = SimpleNamespace(exit_reason="until_step", metrics={}, step=150, stopped=False)
    relayed = []

    def relay(given: Admitted, *_: object, **__: object) -> Any:
        relayed.append(given)
        return reached

    monkeypatch.setattr(module, "load_run_file", lambda *_: pytest.fail("the run file is read again"))
    monkeypatch.setattr(module, "admit", lambda *_, **__: pytest.fail("the run is admitted again"))
    monkeypatch.setattr(module, "relay", relay)
    monkeypatch.setattr(module, "prefect_responds", lambda: True)
    flow = train_run_of_command(admitted, console=recorder, on_result=results.append)
    assert (flow.name, flow.flow_run_name) == (train_run.name, "digits")
    assert flow.parameters == train_run.parameters
    with disable_run_logger():
        state = flow.fn(str(run.file), [], until_step=150)
    assert (relayed, results) == ([admitted], [reached])
    assert (state.name, state.message) == ("Completed", "digits is at step 150 of 400")
