"""Log records of Baton's modules, such as waits for the store, as notes among the other events."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.foundation.telemetry.events import Note, Sink

_BATON = logging.getLogger("tasks")


class _Notes(logging.Handler):
    def __init__(self, sink: Sink) -> None:
        super().__init__(logging.WARNING)
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._sink.emit(Note(text=record.getMessage(), warning=True))
        except Exception:  # noqa: BLE001 - as logging handlers do: a record that cannot be handled ends nothing
            self.handleError(record)


@contextmanager
def warnings_as_notes(sink: Sink) -> Iterator[None]:
    """Within the block, warnings and errors that Baton's modules log go to `sink` only, from any thread.

    Blocks may be nested; the innermost gets the records.
    """
    before = _BATON.handlers[:], _BATON.propagate
    _BATON.handlers[:], _BATON.propagate = [_Notes(sink)], False
    try:
        yield
    finally:
        _BATON.handlers[:], _BATON.propagate = before
