"""`baton run`: of several hosts one flow run records the run; what the trainer's end is for the command."""

import json
from typing import Any, NoReturn

import pytest

from baton.flows.commands import run as command
from baton.flows.commands.main import main
from baton.flows.supervisor import Outcome
from baton.flows.with_prefect import recorder
from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import StaleWriter
from baton.tasks.foundation.telemetry.events import Begun, Ended
from tests.support.fake_run import FakeRun


class AsksForPrefect(Exception):
    pass


def trainer_that_ends(monkeypatch: pytest.MonkeyPatch, **outcome: Any) -> None:
    class Trainer:
        def __init__(self, _words: Any, readers: Any) -> None:
            for reader in readers:
                reader.emit(Begun())

        def wait(self, *_: Any) -> Outcome:
            return Outcome(**outcome)

    monkeypatch.setattr(command, "Trainer", Trainer)


@pytest.mark.parametrize(("index", "is_recorded"), [(0, True), (1, False), (2, False)])
def test_only_the_chief_has_a_flow_run(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, index: int, is_recorded: bool
) -> None:
    run = FakeRun(tmp_path_factory.mktemp("run")).train(200)
    place = {"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(place))

    def starts(*_: object, **__: object) -> NoReturn:
        raise AsksForPrefect

    monkeypatch.setattr(recorder.Recorder, "__init__", starts)
    trainer_that_ends(monkeypatch, returncode=3, ended=Ended(exit_code=3, stopped="sigint"))
    words = ["run", str(run.run_file()), "--set", "accelerator.kind=multi_worker"]
    assert main(words) == (1 if is_recorded else 3)


ENDS = {
    "stopped before it began": (Ended(exit_code=3, stopped="sigint"), 3, "the same command starts it"),
    "an error": (Ended(exit_code=5, error=ErrorReport.of(StaleWriter("moved on"))), StaleWriter.exit_code, "moved on"),
    "a bug": (
        Ended(exit_code=1, error=ErrorReport.of(ValueError("no"))),
        1,
        "ValueError: no\nhint: this is unexpected",
    ),
    "a kill": (None, 1, "killed from outside; check whether the machine ran out of memory"),
    "a hang": (None, 3, ""),
}


@pytest.mark.parametrize("how", ENDS)
def test_end_of_the_trainer_is_that_of_the_command(
    how: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, code, words = ENDS[how]
    returncode = code if ended is not None else {1: -9}.get(code, code)
    trainer_that_ends(monkeypatch, returncode=returncode, ended=ended)
    monkeypatch.setattr(recorder.Recorder, "_begin", lambda _: None)
    assert main(["run", str(FakeRun(tmp_path).run_file()), "--json"]) == code
    printed = capsys.readouterr()
    assert words in printed.err
    if how.startswith("stopped"):
        assert json.loads(printed.out) == {"schema_version": 1, "exit_reason": "stopped"}
