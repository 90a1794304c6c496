"""A stage is done once, and its result stays, whatever Prefect makes of it."""

from typing import Any

import pytest
from prefect import Task

from flows.prefect_compat.prefect_offline import Prefect, PrefectReported
from tasks.foundation.errors import StaleWriter
from tasks.foundation.telemetry.events import Event, Note

REFUSED = ConnectionError("refused")


class Heard:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def emit(self, event: Event) -> None:
        assert isinstance(event, Note)
        assert event.warning
        self.notes.append(event.text)


class Work:
    """A stage that counts how often it is done."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.done = 0

        def work(value: int, *, telemetry: Heard) -> int:  # noqa: ARG001 - every stage has it
            self.done += 1
            if fault is not None:
                raise fault
            return value + 1

        self.task: Task[..., Any] = Task(work, name="work")


def engine(monkeypatch: pytest.MonkeyPatch, *, before: Exception | None = None, after: Exception | None = None) -> None:
    """Prefect's engine, which fails for reasons of its own before the stage has begun, or when it is over."""

    def call(task: Task[..., Any], *arguments: Any, **settings: Any) -> Any:
        if before is not None:
            raise before
        try:
            return task.fn(*arguments, **settings)
        finally:
            if after is not None:
                raise after

    monkeypatch.setattr(Task, "__call__", call)


@pytest.mark.parametrize("when", ["before", "after"])
def test_where_prefect_fails_the_stage_is_done_once_and_it_is_said(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work, heard = Work(), Heard()
    engine(monkeypatch, **{when: REFUSED})
    assert PrefectReported(work.task, Prefect(lambda: True))(1, telemetry=heard) == 2
    assert work.done == 1
    assert heard.notes == ["Prefect could not be told of work (ConnectionError: refused); the run goes on"]


@pytest.mark.parametrize("after", [None, REFUSED])
def test_what_the_stage_raises_is_raised(after: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    work, heard = Work(StaleWriter("another")), Heard()
    engine(monkeypatch, after=after)
    with pytest.raises(StaleWriter, match="another"):
        PrefectReported(work.task, Prefect(lambda: True))(1, telemetry=heard)
    assert work.done == 1


def test_a_server_that_does_not_answer_is_not_waited_for_and_its_absence_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, heard = Work(), Heard()
    engine(monkeypatch, before=AssertionError("asked"))
    there = iter([False, False, True, False])
    stage = PrefectReported(work.task, Prefect(lambda: next(there)))
    assert [stage(1, telemetry=heard) for _ in range(2)] == [2, 2]
    away = "Prefect does not answer and is not told of what is done; the run goes on"
    assert heard.notes == [away]
    engine(monkeypatch)
    assert stage(1, telemetry=heard) == 2
    assert stage(1, telemetry=heard) == 2
    assert heard.notes == [away, away]
