"""A second process is told that another one trains the run, and only where that is so."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from prefect.client.schemas.objects import State
from prefect.logging import disable_run_logger

from flows import goal, train_run
from flows.admission import run_at_work
from flows.admission.run_at_work import Looking, require_nobody_at_work
from flows.commands.main import main
from flows.goal import Goal
from flows.relay import relay
from flows.without_prefect import PLAIN
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.errors import RunAtWork
from tasks.foundation.process import is_here, process_name
from tests.support.fake_run import FakeRun
from tests.support.lab import Heard
from tests.support.ledger_records import NOON, Clock

HERE = "boot/1/4711/99"


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    (tmp_path / "model.py").write_text("def build_model():\n    pass\n")
    return FakeRun(tmp_path).train(100)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(run_at_work, "_SILENT", set())
    return Clock()


@pytest.fixture
def look(run: FakeRun, clock: Clock) -> Callable[..., list[str]]:
    """Look for others; what was said meanwhile."""

    def look(*, take_over: bool = False, signs: Callable[[], None] = lambda: None, **changes: object) -> list[str]:
        def sleep(seconds: float) -> None:
            clock.passes(seconds)
            signs()

        found = Looking(
            now=clock.now, clock=clock, sleep=sleep, here=lambda name: name == HERE, gone=lambda name: name == "gone"
        )
        heard = Heard()
        file = load_run_file(run.run_file())
        require_nobody_at_work(
            file,
            take_over=take_over,
            telemetry=heard,
            looking=replace(found, **changes),  # type: ignore[arg-type]
        )
        return [event.text for event in heard.events]

    return look


def test_a_process_of_this_machine_is_at_work(run: FakeRun, clock: Clock, look: Callable[..., list[str]]) -> None:
    run.attempt("a" * 32, process=HERE, host="tpu-vm", pid=4711)
    clock.passes(7)
    before = run.files()
    with pytest.raises(RunAtWork) as caught:
        look()
    headline, *hints = str(caught.value).splitlines()
    assert headline == "digits is at work: process 4711 on tpu-vm, step 130, last sign of life 7.0 s ago"
    assert ["--take-over" in hint for hint in hints] == [False, True]
    assert caught.value.exit_code == 3
    assert look(take_over=True) == []
    assert run.files() == before
    assert clock.seconds == 1007.0, "nothing was waited for"


@pytest.mark.parametrize(
    "changes",
    [
        {"process": "gone"},
        {"ended": "sigterm", "process": HERE},
        {"within": "b" * 32, "process": HERE},
        {"alive": (NOON - timedelta(seconds=91)).isoformat(), "process": HERE},
        {"process": process_name()},
    ],
    ids=["dead", "ended", "stage", "silent", "this"],
)
def test_nobody_is_at_work(run: FakeRun, clock: Clock, look: Callable[..., list[str]], changes: dict[str, str]) -> None:
    run.attempt("a" * 32, **changes)
    assert look() == []
    assert clock.seconds == 1000.0, "nothing was waited for"


def test_of_another_machine_the_next_sign_of_life_is_waited_for(run: FakeRun, look: Callable[..., list[str]]) -> None:
    run.attempt("a" * 32, process="elsewhere")

    def sign() -> None:
        run.attempt("a" * 32, process="elsewhere", alive=(NOON + timedelta(seconds=1)).isoformat())

    with pytest.raises(RunAtWork, match="process 1 on host, step 130"):
        look(signs=sign)


@pytest.mark.parametrize(("age", "longest"), [(60, 4.0), (100_000, 47.5)])
def test_a_death_elsewhere_is_waited_for_once(
    run: FakeRun, clock: Clock, look: Callable[..., list[str]], age: float, longest: float
) -> None:
    run.attempt("a" * 32, process="elsewhere", began=(NOON - timedelta(seconds=age)).isoformat())
    (said,) = look()
    assert "another process may be at work: process 1 on host, step 130" in said
    assert 0 < clock.seconds - 1000.0 <= longest
    assert look() == [], "it is known to be silent"


def test_of_who_ends_meanwhile_no_sign_is_waited_for(
    run: FakeRun, clock: Clock, look: Callable[..., list[str]]
) -> None:
    run.attempt("a" * 32, process="elsewhere", began=(NOON - timedelta(days=1)).isoformat())
    look(signs=lambda: run.attempt("a" * 32, process="elsewhere", ended="sigterm"))
    assert clock.seconds - 1000.0 < 1


@pytest.fixture
def rival(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    """A run at work in a process of this machine, this moment."""
    monkeypatch.setattr(run_at_work, "process_name", lambda: "")  # else it were this very process
    now = datetime.now().astimezone()
    run.attempt("a" * 32, process=process_name(), began=now.isoformat(), alive=now.isoformat())
    assert is_here(process_name())
    return run


def test_the_relay_and_the_command_refuse_before_anything_is_begun(
    rival: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    file = load_run_file(rival.run_file())
    before = rival.files()
    with pytest.raises(RunAtWork):
        relay(file, Goal.of(file.spec), PLAIN, telemetry=Heard())
    assert main(["run", str(rival.run_file())]) == 3
    assert "error: digits is at work: process 1 on host" in capsys.readouterr().err
    assert rival.files() == before


def test_a_tick_beside_a_run_at_work_is_no_failure(rival: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_run, "prefect_answers", lambda: True)
    with disable_run_logger():
        ended = train_run.train_run.fn(str(rival.run_file()))
    assert isinstance(ended, State)
    assert (ended.is_completed(), ended.name) == (True, "Stopped")
    assert ended.message is not None
    assert "is at work: process 1 on host" in ended.message


def test_where_nothing_is_left_to_do_nobody_is_looked_for(rival: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goal, "write_report", lambda *_given, **_named: None)
    file = load_run_file(rival.run_file(100))
    rival.evaluate(0.5)
    assert relay(file, Goal.of(file.spec), PLAIN, telemetry=Heard()).exit_reason == "nothing_to_do"
