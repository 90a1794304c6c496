"""If Prefect fails, a stage still runs exactly once, and its answer or its error is kept."""

from pathlib import Path
from typing import Any

import pytest
from prefect import Task

from flows.prefect_compat.prefect_offline import PrefectStatus, PrefectTasks
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.stage_calls import PrepareDataCall
from tasks.foundation.errors import StaleWriter
from tasks.foundation.stage import Place, Stage
from tasks.foundation.storage.memory import MemoryStorage
from tasks.foundation.telemetry.events import Event, Note
from tests.support.fake_prefect_api import DATASET
from tests.support.lab import spec_of

REFUSED = ConnectionError("refused")
CALL = PrepareDataCall(spec=spec_of("plain"))


class WarningRecorder:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def emit(self, event: Event) -> None:
        assert isinstance(event, Note)
        assert event.warning
        self.texts.append(event.text)


class CountingStage:
    """A stage that counts its runs."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.runs = 0
        self.fault = fault
        self.warnings = WarningRecorder()
        self.stage = Stage(
            name="prepare_data",
            call=PrepareDataCall,
            answer=DatasetRef,
            load=lambda: self.work,
            subject=lambda call: call.spec.run,
        )

    def work(self, _call: PrepareDataCall, _place: Place) -> DatasetRef:
        self.runs += 1
        if self.fault is not None:
            raise self.fault
        return DATASET

    def run(self, status: PrefectStatus) -> DatasetRef:
        place = Place.of(MemoryStorage("tests"), "run", code_folder=Path(), telemetry=self.warnings)
        return PrefectTasks(status).run(self.stage, CALL, place)


def replace_engine(
    monkeypatch: pytest.MonkeyPatch, *, before: Exception | None = None, after: Exception | None = None
) -> None:
    """Replace Prefect's engine with one that raises `before` or `after` the stage."""

    def call(task: Task[..., Any]) -> Any:
        if before is not None:
            raise before
        try:
            return task.fn()
        finally:
            if after is not None:
                raise after

    monkeypatch.setattr(Task, "__call__", call)


@pytest.mark.parametrize("when", ["before", "after"])
def test_stage_runs_once_when_prefect_fails(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = CountingStage()
    replace_engine(monkeypatch, **{when: REFUSED})
    assert work.run(PrefectStatus(lambda: True)) == DATASET
    assert work.runs == 1
    assert work.warnings.texts == [
        "Prefect could not record prepare-data (ConnectionError: refused); the run continues"
    ]


@pytest.mark.parametrize("after", [None, REFUSED])
def test_error_of_the_stage_is_raised(after: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    work = CountingStage(StaleWriter("another"))
    replace_engine(monkeypatch, after=after)
    with pytest.raises(StaleWriter, match="another"):
        work.run(PrefectStatus(lambda: True))
    assert work.runs == 1


def test_unresponsive_prefect_is_skipped_and_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    work = CountingStage()
    replace_engine(monkeypatch, before=AssertionError("called"))
    answers = iter([False, False, True, False])
    status = PrefectStatus(lambda: next(answers))
    assert [work.run(status) for _ in range(2)] == [DATASET, DATASET]
    absent = "Prefect is not responding and does not record what is done; the run continues"
    assert work.warnings.texts == [absent]
    replace_engine(monkeypatch)
    assert work.run(status) == DATASET
    assert work.run(status) == DATASET
    assert work.warnings.texts == [absent, absent]
