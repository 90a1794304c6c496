"""Log records of Baton's modules become notes."""

import logging
import threading

import pytest

from baton.tasks.foundation.telemetry.events import Event, Note, warnings_as_notes

LOGGER = logging.getLogger("baton.tasks.foundation.somewhere")


class PrefectReported:
    def __init__(self, *, broken: bool = False) -> None:
        self.events: list[Event] = []
        self._broken = broken

    def emit(self, event: Event) -> None:
        if self._broken:
            raise RuntimeError("no terminal")
        self.events.append(event)


def test_warnings_of_any_thread_become_notes_once(capfd: pytest.CaptureFixture[str]) -> None:
    outer, inner = PrefectReported(), PrefectReported()
    with warnings_as_notes(outer):
        LOGGER.warning("waiting %d s", 3)
        with warnings_as_notes(inner):
            thread = threading.Thread(target=lambda: LOGGER.warning("from a thread"))
            thread.start()
            thread.join()
            LOGGER.info("nothing of weight")
        LOGGER.warning("again")
    assert outer.events == [Note(text="waiting 3 s", warning=True), Note(text="again", warning=True)]
    assert inner.events == [Note(text="from a thread", warning=True)]
    assert capfd.readouterr().err == ""


def test_handlers_are_restored_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    with warnings_as_notes(PrefectReported()):
        pass
    LOGGER.warning("as before")
    assert caplog.messages == ["as before"]


def test_failing_sink_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with warnings_as_notes(PrefectReported(broken=True)):
        LOGGER.warning("lost")
