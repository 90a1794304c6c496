"""What a run says while it runs. Stages emit these values; sinks show or keep them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for people; `warning` marks what they should not overlook."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """From now on, until the next one, this process's time goes to `cause`: one of `contracts.attempt.CAUSES`."""

    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing:
    """So many examples of the source have been read."""

    examples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training has reached `step` on its way to `target`."""

    step: int
    target: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    examples_per_second: float
    input_wait_seconds: float = 0.0  # of the time since the event before, for want of a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint is in the log."""

    step: int
    path: str
    size: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A committed checkpoint has met the validation examples."""

    step: int
    metrics: Mapping[str, float]
    examples: int


Event = Note | Phase | Preparing | Training | Committed | Evaluated


class Sink(Protocol):
    """Where events go. Emitting must be cheap and must not raise: training waits for it."""

    def emit(self, event: Event) -> None:
        """Take one event."""


class Silent:
    """Nobody listens."""

    def emit(self, event: Event) -> None:
        """Drop it."""


@dataclass(frozen=True, slots=True)
class Several:
    """Every event goes to every sink."""

    sinks: tuple[Sink, ...]

    def emit(self, event: Event) -> None:
        """Pass it on, in order."""
        for sink in self.sinks:
            sink.emit(event)
