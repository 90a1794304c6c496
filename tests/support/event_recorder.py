"""A sink that keeps the events it receives."""

from baton.tasks.foundation.telemetry.events import Event, Note


class EventRecorder:
    """Keeps every event, in order.

    Attributes:
        events: what was emitted.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    @property
    def notes(self) -> list[str]:
        """The texts of all notes."""
        return [event.text for event in self.events if isinstance(event, Note)]

    @property
    def warnings(self) -> list[str]:
        """The texts of the notes that are warnings."""
        return [event.text for event in self.events if isinstance(event, Note) and event.warning]

    @property
    def text(self) -> str:
        """The notes, one a line."""
        return "\n".join(self.notes)
