"""`baton run` of several hosts: one flow run records the run."""

import io
import json
from typing import NoReturn

import pytest

from baton.flows import relay
from baton.flows.admit import Admitted
from baton.flows.commands import run as command
from baton.flows.opened_run import Goal, OpenedRun
from baton.flows.result import RelayResult, result_of
from baton.flows.with_prefect import recorder
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.telemetry.console import Console
from tests.support.fake_run import FakeRun


class AsksForPrefect(Exception):
    pass


@pytest.fixture
def admitted(tmp_path_factory: pytest.TempPathFactory) -> Admitted:
    run = FakeRun(tmp_path_factory.mktemp("run")).train(200)
    opened = OpenedRun.open(load_run_file(run.run_file(), ["accelerator.kind=multi_worker"]))
    goal = Goal.of(opened.spec)
    return Admitted(
        run=opened, goal=goal, accept=(), try_again=False, take_over=False, head=run.head, notes=()
    )  # fmt: skip


@pytest.mark.parametrize(("index", "is_recorded"), [(0, True), (1, False), (2, False)])
def test_only_the_chief_has_a_flow_run(
    admitted: Admitted, monkeypatch: pytest.MonkeyPatch, index: int, is_recorded: bool
) -> None:
    place = {"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(place))
    monkeypatch.setattr(command, "import_stages", lambda _: None)

    def starts(*_: object, **__: object) -> NoReturn:
        raise AsksForPrefect

    def trains(admitted: Admitted, runner: object, **options: object) -> RelayResult:
        assert (getattr(runner, "remote", None), options["whole_process"]) == (frozenset(), True)
        return result_of(admitted.run, segments=1, exit_reason="max_segments", telemetry=console, report=False)

    monkeypatch.setattr(recorder.Recorder, "__init__", starts)
    monkeypatch.setattr(relay, "relay", trains)
    console = Console(io.StringIO())
    if is_recorded:
        with pytest.raises(AsksForPrefect):
            command._train(admitted, {}, [], console)
    else:
        result = command._train(admitted, {}, [], console)
        assert result is not None
        assert result.step == 200
