"""The sink that writes to a flow run's log, which may begin after the work."""

import logging

import pytest

from flows.prefect_ui.run_logger import Log, PrefectRunLogger
from tasks.foundation.telemetry.events import Committed, Note


def test_what_comes_before_the_flow_run_is_logged_in_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    begun: list[Log] = []
    sink = PrefectRunLogger(flow_logger=lambda: begun[0] if begun else None)
    sink.emit(Note(text="first 100 %"))
    sink.emit(Note(text="second", warning=True))
    assert caplog.messages == []
    begun.append(logging.getLogger("tests.run_logger"))
    sink.emit(Committed(step=3, path="checkpoints/x", size=1, metrics={"loss": 0.5}))
    sink.flush()
    assert caplog.messages == ["first 100 %", "second", "step 3 committed as checkpoints/x loss 0.5"]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
