"""How the training ended is the last state of its flow run; its log has what a person reads."""

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from baton.flows.result import RelayResult
from baton.flows.with_prefect.record import CANCELLED, PrefectRunLogger, failed
from baton.flows.with_prefect.record import state_of as state_in_prefect
from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import ModelError, NonFinite
from baton.tasks.foundation.telemetry.events import Committed, Ended, Evaluated, Event, Note, Training, line_of, tell
from tests.support.lab import spec_of

SPEC = spec_of("plain")
RESULT = RelayResult(
    run="plain", home="/runs/plain", step=150, checkpoint="c", state_digest="d", segments=1, target=400, report=None,
    metrics={"loss": math.nan, "validation_accuracy": 0.5}, exit_reason="until_step",
)  # fmt: skip


def failed_with(fault: Exception) -> Ended:
    return Ended(exit_code=1, error=ErrorReport.of(fault))


def state_of(ended: Ended) -> tuple[str, str, str]:
    """The type, name and message of the state, after a way through JSON."""
    told: list[Event] = []
    tell(SimpleNamespace(emit=told.append), line_of(ended))
    assert isinstance(told[0], Ended)
    # Not `disable_run_logger`: `state` may be the first to import all of Prefect, which sets its loggers up again.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefect.get_run_logger", lambda: logging.getLogger("tests.flow_run"))
        state: Any = state_in_prefect(told[0], SPEC)
    return state.type.value, state.name, state.message


@pytest.mark.parametrize(
    ("ended", "kind", "name", "message"),
    [
        (failed_with(ValueError("a bug")), "FAILED", "Failed", "Flow run encountered an exception: ValueError: a bug"),
        (failed_with(ModelError("wrong\nhint: correct it")), "FAILED", "Failed", "ModelError: wrong; hint: correct it"),
        (failed_with(NonFinite("NaN", step=7)), "FAILED", "BlewUp", "NonFinite: NaN"),
        (Ended(exit_code=3, stopped=CANCELLED), "CANCELLED", "Cancelled", "cancelled; what was trained is committed"),
        (Ended(exit_code=3, stopped="sigterm"), "COMPLETED", "Stopped", "sigterm: stopped by a signal"),
        (Ended(exit_code=3, stopped="sigint"), "COMPLETED", "Stopped", "sigint: stopped by a signal"),
        (Ended(exit_code=1, crashed="killed"), "CRASHED", "Crashed", "killed"),
    ],
)
def test_error_or_stop_is_the_last_state(ended: Ended, kind: str, name: str, message: str) -> None:
    found = state_of(ended)
    assert found[:2] == (kind, name)
    assert found[2].startswith(message)
    assert "\n" not in found[2]


@pytest.mark.parametrize(
    ("reason", "kind", "name", "message"),
    [
        ("complete", "COMPLETED", "Completed", "plain is at step 150 of 400, validation accuracy 0.5"),
        ("max_segments", "COMPLETED", "Stopped", "max segments: plain is at step 150 of 400"),
        ("preempted", "CRASHED", "Crashed", "preempted: this machine is about to go"),
    ],
)
def test_last_state_says_where_the_run_stands(reason: Any, kind: str, name: str, message: str) -> None:
    found = state_of(Ended(exit_code=0, result=RESULT.model_copy(update={"exit_reason": reason}).model_dump_json()))
    assert found[:2] == (kind, name)
    assert found[2].startswith(message)


def test_error_of_a_failed_flow_run_is_its_result() -> None:
    fault = ModelError("wrong")
    assert failed(fault).data is fault


def test_notes_commits_and_evaluations_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    of_flow, of_stage = logging.getLogger("tests.flow_run"), list[logging.Logger]()
    monkeypatch.setattr("prefect.get_run_logger", lambda: of_flow)
    sink = PrefectRunLogger(lambda: of_stage[0] if of_stage else None)
    sink.emit(Note(text="first 100 %"))
    sink.emit(Training(step=1, target=3, examples_per_second=1.0))
    of_stage.append(logging.getLogger("tests.task_run"))
    sink.emit(Note(text="second", warning=True))
    sink.emit(Committed(step=3, path="checkpoints/x", size=1, metrics={"loss": 0.5}))
    sink.emit(Evaluated(step=3, metrics={"loss": 0.25}, examples=1))
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("tests.flow_run", "INFO", "first 100 %"),
        ("tests.task_run", "WARNING", "second"),
        ("tests.task_run", "INFO", "step 3 committed as checkpoints/x loss 0.5"),
        ("tests.task_run", "INFO", "step 3 evaluated on 1 validation example: loss 0.25"),
    ]
