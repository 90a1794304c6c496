"""The flow train-run: the names of its flow runs, and the flow that `baton run` runs."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import Flow
from prefect.client.schemas.objects import State

from flows import recorded_relay
from flows import train_run as module
from flows.admit import Admitted, admit
from flows.evaluate_best import evaluate_best
from flows.opened_run import Goal, Run
from flows.prefect_compat.flow_run_beside import FlowRunBeside
from flows.train_beside import train_beside
from flows.train_run import train_run
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
    target = " → 400" if flow is train_run and not name.endswith((".yaml", ".")) else ""
    assert flow.flow_run_name() == f"{name}{target}"
    if name.endswith((".yaml", ".")):
        state = flow.fn(**given)
        assert state.is_failed()
        assert str(state.message).startswith("RunFileError: ")
        assert "\n" not in str(state.message)  # the engine prints it with repr
        assert isinstance(state.data, RunFileError)


def test_flow_run_that_trains_is_named_after_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"run_file": str(FakeRun(tmp_path).run_file()), "overrides": None, "until_step": 150}
    monkeypatch.setattr(module, "flow_run", SimpleNamespace(parameters=given))
    assert callable(train_run.flow_run_name)
    assert train_run.flow_run_name() == "digits → 150"
    given |= {"overrides": ["train.steps=null", "train.epochs=3"], "until_step": None}
    assert train_run.flow_run_name() == "digits → epoch 3"


@pytest.mark.parametrize("remote", [True, False])
def test_command_trains_the_admitted_run_beside_its_flow_run(
    remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow trains what the command has opened and admitted; only one with remote stages waits for Prefect."""
    fake = run_with_code(tmp_path)
    run = Run.open(load_run_file(fake.run_file(), ["stages.evaluate=evaluate/docker"] if remote else []))
    recorder, results, relayed = EventRecorder(), [], []
    admitted = admit(run, Goal.of(run.spec, until_step=150), telemetry=recorder)
    assert isinstance(admitted, Admitted)
    reached = SimpleNamespace(exit_reason="until_step", metrics={}, step=150, target=400, epoch=None, stopped=False)
    server, begun = threading.Event(), threading.Event()

    def relay(given: Admitted, *_: object, **__: object) -> Any:
        relayed.append((given, begun.is_set()))
        server.set()
        return reached

    def engine(body: Callable[[], State[Any]]) -> None:
        begun.set()
        states.append(body())

    states: list[State[Any]] = []
    monkeypatch.setattr(module, "load_run_file", lambda *_: pytest.fail("the run file is read again"))
    monkeypatch.setattr(module, "admit", lambda *_, **__: pytest.fail("the run is admitted again"))
    monkeypatch.setattr(recorded_relay, "relay", relay)
    monkeypatch.setattr(recorded_relay, "runner_for", lambda *_, **__: None)
    if remote:
        server.set()

    def connect() -> None:
        server.wait()

    with FlowRunBeside[Any](connect, engine, notes=recorder, required=remote) as flow_run:
        train_beside(admitted, flow_run, console=recorder, on_result=results.append)
    assert (relayed, results) == ([(admitted, remote)], [reached])
    assert [(state.name, state.message) for state in states] == [("Completed", f"{fake.name} is at step 150 of 400")]
