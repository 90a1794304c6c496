"""The events of a run. Stages emit them; sinks show or keep them. Warnings that Baton's modules log become notes.

Events leave a process as lines of JSON, each an object with the event's class, its fields, and the number of the stage
that it belongs to. `EventStream` writes them to a pipe; `tell` reads a line, and tells a sink. Nobody waits for who
reads: what does not fit into the pipe waits in memory, and is dropped when that is too much. For the last event,
`Ended`, there are some seconds. Only a question, `Asked`, is never dropped: who asks waits for the answer, which
`Questions` reads from another pipe.
"""

import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import count
from typing import Any, Final, Literal, Protocol, get_args

from pydantic import BaseModel, TypeAdapter

from baton.tasks.foundation.contracts.data_spec import SetName
from baton.tasks.foundation.contracts.log_entry import Commit
from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import StageLost
from baton.tasks.foundation.masking import masked


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for people; `warning` marks one that they should not miss."""

    text: str
    warning: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", masked(self.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetUsed(Note):
    """A function is not read, for its dataset was prepared before. The end of the command repeats `words` of it."""

    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulOperations:
    """The traced train step keeps state that no checkpoint holds. A warning `Note` reports it to the user.

    Attributes:
        reference: the model's, as `model.py:build_model`.
        operations: names of operations in the graph that draw from TensorFlow's random state or run Python code.
    """

    reference: str
    operations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The process begins another phase: its time counts for `cause`, one of `contracts.attempt.CAUSES`."""

    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The training thread waits for something that `Phase` does not name, until the next `Phase` or `Training`."""

    on: Literal["callbacks", "the save in flight", "a remote stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing:
    """`examples` of the source have been read."""

    examples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training has reached `step`; it ends at `target`."""

    step: int
    target: int
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the newest row
    loss: float | None = None  # mean since that row, of this host's replicas; None if the step returns none
    examples_per_second: float
    input_wait_seconds: float = 0.0  # waiting for batches since the previous event
    epoch: float | None = None  # epochs that are done
    segment: int | None = None  # its number in this command, from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint is in the log; `size` is in bytes, and `metrics` are those of the newest row in it, or partial."""

    step: int
    path: str
    size: int
    metrics: Mapping[str, float]
    partial: bool = False  # the metrics are those since the newest row, and no row

    @classmethod
    def of(cls, body: Commit) -> "Committed":
        """Return the event of an entry."""
        made, row = body.checkpoint, body.shown_row
        return cls(
            step=made.step,
            path=made.path,
            size=made.size,
            metrics={} if row is None else row.metrics,
            partial=row is not None and row is body.partial,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A committed checkpoint was evaluated on the examples of a set."""

    step: int
    metrics: Mapping[str, float]
    examples: int
    on: SetName = "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPace:
    """How often this process commits within a segment, with `checkpoint.every_seconds: auto`, and why.

    Attributes:
        every_seconds: time between two commits.
        cost_seconds: what a commit takes from the training.
        between_losses_seconds: mean time between losses of a process.
    """

    every_seconds: float
    cost_seconds: float
    between_losses_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """This process hangs, and ends in a moment. Sinks that keep or send events do so before `emit` returns.

    Attributes:
        message: what did not end, and for how long.
        stacks: of all threads.
    """

    message: str
    stacks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The run is admitted, and its training begins; no refusal comes before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBegun:
    """A stage begins.

    Attributes:
        number: of the stage within its process; events of the stage have it, see `in_stage`.
        label: the stage's name in Prefect.
        name: what it works on, too, as `train-segment 3`.
    """

    number: int
    label: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnded:
    """A stage has ended.

    Attributes:
        number: see `StageBegun`.
        kind: as it would be called in Prefect.
        message: the class and the message of the error that ended it.
    """

    number: int
    kind: Literal["Completed", "Stopped", "Failed", "Crashed"] = "Completed"
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """A line that the process printed, as code of the user does; who starts the process makes this event."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The process has done its work, and ends; its last event. A killed or crashed process sends none.

    Attributes:
        exit_code: that it will have.
        result: what the command reached, a `RelayResult` as JSON; of a stage for a flow run, a line about its answer;
            empty if nothing was reached.
        entry: the newest entry of the log, an `Entry` as JSON, if there is a result.
        stopped: the exit reason of a signal that ended it; empty if none did.
        error: that ended it.
        crashed: what ended it without its doing; who started it says so.
    """

    exit_code: int
    result: str = ""
    entry: str = ""
    stopped: str = ""
    error: ErrorReport | None = None
    crashed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The process asks the one that started it, which answers with `answered`; readers do not receive it.

    Attributes:
        number: of the question within its process; the answer has it.
        request: what is asked for.
        arguments: of the request, as JSON has them.
    """

    number: int
    request: str
    arguments: Mapping[str, object]


Event = (
    Note
    | DatasetUsed
    | StatefulOperations
    | Phase
    | Waiting
    | Preparing
    | Training
    | Committed
    | Evaluated
    | CommitPace
    | Hung
    | Begun
    | StageBegun
    | StageEnded
    | Printed
    | Ended
    | Asked
)


class Sink(Protocol):
    """Receives events. `emit` must be cheap and must not raise, because training waits for it."""

    def emit(self, event: Event) -> None:
        """Receive one event."""


class Silent:
    """A sink that drops every event."""

    def emit(self, event: Event) -> None:
        """Drop the event."""


@dataclass(frozen=True, slots=True)
class WithoutPhases:
    """A sink for work beside the training: passes on all events but those that say what the training does."""

    sink: Sink

    def emit(self, event: Event) -> None:
        """Pass the event on, unless it is a `Phase` or `Waiting`."""
        if not isinstance(event, Phase | Waiting):
            self.sink.emit(event)


@dataclass(frozen=True, slots=True)
class Several:
    """A sink that passes every event to several sinks, in order."""

    sinks: tuple[Sink, ...]

    def emit(self, event: Event) -> None:
        """Pass the event to each sink."""
        for sink in self.sinks:
            sink.emit(event)


_KINDS: Final[dict[str, type[Any]]] = {kind.__name__: kind for kind in get_args(Event)}
_MOST_LINES: Final = 10_000  # that wait for a reader
_LAST_SECONDS: Final = 5.0  # for the last event
_STAGE: ContextVar[int | None] = ContextVar("stage", default=None)


@contextmanager
def in_stage(number: int | None) -> Iterator[None]:
    """Within the block, the events of this thread are those of a stage."""
    token = _STAGE.set(number)
    try:
        yield
    finally:
        _STAGE.reset(token)


def stage_of_thread() -> int | None:
    """The number of the stage that events of this thread belong to; None outside a stage."""
    return _STAGE.get()


def line_of(event: Event) -> bytes:
    """An event of this thread as a line of JSON."""
    values = {each.name: getattr(event, each.name) for each in fields(event)}
    line = {"event": type(event).__name__, "stage": _STAGE.get(), "values": values}
    return json.dumps(line, default=_plain).encode() + b"\n"


def tell(sink: Sink, line: bytes | str) -> None:
    """Tell a sink the event in a line, within the event's stage.

    Raises:
        ValueError: no event of this version is in it.
    """
    match json.loads(line):
        case {"event": str(kind), "stage": int() | None as stage, "values": dict(values)} if kind in _KINDS:
            with in_stage(stage):
                sink.emit(_adapter(kind).validate_python(values))
        case _:
            raise ValueError(f"{line[:100]!r} has no known event")


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(_KINDS[kind])


def _plain(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else dict(value)  # type: ignore[call-overload]


class EventStream:
    """A `Sink` that writes events to a pipe, in a thread."""

    def __init__(self, descriptor: int) -> None:
        """Take the pipe by its writing end."""
        self._pipe = descriptor
        # A signal may interrupt any line of this thread: its lock is none of Python's, which could stay locked then.
        self._lines: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="baton-events", daemon=True).start()

    def emit(self, event: Event) -> None:
        """Send an event; the last ones of a process before this returns, if the reader takes them in time."""
        if isinstance(event, Asked | Ended | Hung) or self._lines.qsize() < _MOST_LINES:
            self._lines.put(line_of(event))
        if isinstance(event, Ended | Hung):
            sent = threading.Event()
            self._lines.put(sent)
            sent.wait(_LAST_SECONDS)

    def _write(self) -> None:
        with suppress(OSError):  # nobody reads
            while True:
                item = self._lines.get()
                if isinstance(item, threading.Event):
                    item.set()
                    continue
                left = memoryview(item)
                while left:
                    left = left[os.write(self._pipe, left) :]
        while True:  # nobody waits for a reader that is gone
            item = self._lines.get()
            if isinstance(item, threading.Event):
                item.set()


# Gets the name of a request and its arguments, and returns a value, all as JSON has them.
Ask = Callable[[str, Mapping[str, object]], object]


class Unreachable(Exception):
    """Who knows the answer cannot be reached now; another try may help."""


def answered(asked: Asked, answer: Ask) -> bytes:
    """The answer to a question as a line of JSON: a value, an error, or why the answer is not to be had now."""
    try:
        said = {"value": answer(asked.request, asked.arguments)}
    except Unreachable as fault:
        said = {"unreachable": str(fault)}
    except Exception as fault:  # noqa: BLE001 - who asked raises it
        said = {"error": ErrorReport.of(fault).model_dump(mode="json")}
    return json.dumps({"number": asked.number, **said}).encode() + b"\n"


class Questions:
    """Asks the process that started this one: a question is an event, and its answer a line of a pipe."""

    def __init__(self, descriptor: int, events: Sink) -> None:
        """Take the pipe of the answers by its reading end."""
        self._events = events
        self._numbers = count()
        self._waiting: dict[int, queue.SimpleQueue[dict[str, object] | None]] = {}
        self._is_over = False
        threading.Thread(target=self._read, args=(descriptor,), name="baton-answers", daemon=True).start()

    def __call__(self, request: str, arguments: Mapping[str, object]) -> object:
        """Ask, and wait for the answer; in the main thread, a signal's handler may raise meanwhile.

        Raises:
            BatonError: the answer is an error.
            Unreachable: there is no answer now.
            StageLost: the other process has ended.
        """
        number, answers = next(self._numbers), queue.SimpleQueue[dict[str, object] | None]()
        self._waiting[number] = answers
        self._events.emit(Asked(number=number, request=request, arguments=arguments))
        if self._is_over:  # perhaps before it was known who waits
            answers.put(None)
        match answers.get():
            case None:
                raise StageLost(
                    f"the process that started this one has ended, and does not answer any more ({request}); committed "
                    "checkpoints are kept. Run the same command again"
                )
            case {"unreachable": why}:
                raise Unreachable(why)
            case {"error": report}:
                raise ErrorReport.model_validate(report).to_error()
            case answer:
                return answer["value"]

    def _read(self, descriptor: int) -> None:
        with suppress(OSError, ValueError), open(descriptor, "rb") as lines:  # the last one may be torn
            for line in lines:
                answer = json.loads(line)
                self._waiting.pop(answer["number"]).put(answer)
        self._is_over = True
        for answers in list(self._waiting.values()):
            answers.put(None)


_BATON = logging.getLogger("baton")


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
