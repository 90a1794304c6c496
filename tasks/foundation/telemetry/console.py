"""Events on the console: lines above one progress bar on a terminal, or plain lines elsewhere."""

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.control import Control
from rich.live_render import LiveRender
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from baton.tasks.foundation.telemetry.events import (
    Committed,
    DatasetUsed,
    Evaluated,
    Event,
    Note,
    Phase,
    Preparing,
    Printed,
    Training,
)
from baton.tasks.foundation.telemetry.formatting import (
    GOOD,
    NOTICE,
    checkpoint_name,
    duration_words,
    epoch_words,
    has_colors,
    metric_words,
    number_words,
    size_words,
)
from baton.tasks.foundation.text import counted, folded, shown, shown_lines

_LOGGER = logging.getLogger(__name__)
_REFRESHES_PER_SECOND = 4  # drawing holds the GIL, which the thread that feeds the accelerator needs
_BAR_COLUMNS = 30
_BESIDE_FACTS_COLUMNS = 29  # a short bar and the time left, with their gaps
_WIDE_COLUMNS = 110  # from this width on, elapsed is beside the facts
_ELAPSED_COLUMNS = 7  # those that it takes from the facts
_SHOWN_SECONDS = 0.05
_TRUNCATING_TERMINALS = {"XTERM_VERSION"}  # variables of terminals that truncate lines instead of wrapping them
_STYLES = {"warning": f"bold {NOTICE}", "start": "dim", "commit": GOOD, "evaluation": "cyan", "training": ""}
_PIPE_COLUMNS = 1000  # a pipe has no width; never wrap lines


class _Bar(LiveRender):
    """The bar as last drawn; it can be erased even if the terminal has become narrower.

    A terminal wraps a line that no longer fits. rich erases one line and would leave the upper part.
    """

    def __init__(self, renderable: RenderableType, console: RichConsole) -> None:
        super().__init__(renderable)
        self._console = console

    def position_cursor(self) -> Control:
        self._wrap()
        return super().position_cursor()

    def restore_cursor(self) -> Control:
        self._wrap()
        return super().restore_cursor()

    def _wrap(self) -> None:
        if self._shape is not None and not _TRUNCATING_TERMINALS & os.environ.keys():
            width, height = self._shape
            columns = max(self._console.size.width, 1)
            self._shape = min(width, columns), height * max(math.ceil(width / columns), 1)


class _TimeLeft(TimeRemainingColumn):
    """`02:13 left`; empty while the end is unknown, as for a source that is read for the first time."""

    def render(self, task: Task) -> Text:
        left = super().render(task)
        return Text.assemble(left, (" left", "dim")) if left.plain else left


class _Elapsed(TimeElapsedColumn):
    """`0:02:13 elapsed`; empty on a narrow terminal."""

    def __init__(self, console: RichConsole) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._console = console

    def render(self, task: Task) -> Text:
        wide = self._console.size.width >= _WIDE_COLUMNS
        return Text.assemble(super().render(task), (" elapsed", "dim")) if wide else Text("")


class _Phases:
    """The phases of a start, and their seconds, until the training begins."""

    def __init__(self, clock: Callable[[], float], first: str) -> None:
        self._clock = clock
        self._began = self._since = clock()
        self._seconds: dict[str, float] = {}
        self.now = first
        self.starting = True

    def enter(self, cause: str) -> None:
        """Another phase begins."""
        if self.starting:
            now = self._clock()
            self._seconds[self.now] = self._seconds.get(self.now, 0.0) + now - self._since
            self.now, self._since = cause, now

    def end(self) -> str:
        """The training begins; return the phases in words, or nothing if they took no time."""
        self.enter("training")
        self.starting = False
        parts = [f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items() if seconds >= _SHOWN_SECONDS]
        total = self._since - self._began
        if total < _SHOWN_SECONDS:
            return ""
        return f"started in {total:.1f} s: {', '.join(parts)}"


class Console:
    """A `Sink` for people. Use it as a context manager: on exit the bar disappears and the lines stay."""

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic, *, doing: str = "start-up"
    ) -> None:
        """Prepare the console; nothing is written before the first event.

        Args:
            stream: where to write; None for stdout. Use stderr if stdout is for JSON.
            clock: seconds; tests replace it.
            doing: what the bar says before the first phase.
        """
        self._clock = clock
        self._phases = _Phases(clock, doing)
        self._committed_at: float | None = None
        self._first: tuple[int, float] | None = None  # step and time of the first line of training
        self._stream = sys.stdout if stream is None else stream
        self._terminal = self._stream.isatty()
        self._rich = RichConsole(
            file=self._stream,
            # Names of metrics and layers may look like rich's markup or emoji: f1[macro], [/x], :tm:
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=True,
            width=None if self._terminal else _PIPE_COLUMNS,
            no_color=not has_colors(self._stream),
        )
        self._lock = threading.RLock()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._metrics: Mapping[str, float] = {}
        self._last_metrics: Mapping[str, float] = {}
        self._last_examples = 0
        self._broken = False
        self.datasets: list[str] = []  # those that were used again, in words

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Prepare the bar, on a terminal. The first event with progress shows it."""
        with self._lock:
            if not self._terminal or self._progress is not None:
                return
            self._progress = Progress(
                TextColumn("{task.description}", style="bold", markup=False),
                BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=_BAR_COLUMNS)),
                TextColumn("{task.fields[facts]}", markup=False),
                _Elapsed(self._rich),
                _TimeLeft(compact=True, table_column=Column(no_wrap=True)),
                console=self._rich,
                expand=False,
                transient=True,
                refresh_per_second=_REFRESHES_PER_SECOND,
                # Other output to the terminal goes above the bar; other streams are not touched.
                redirect_stdout=self._stream is sys.stdout,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._progress.live._live_render = _Bar("", self._rich)
            self._guarded(self._progress.start)

    def stop(self) -> None:
        """Remove the bar. Later events still print lines."""
        with self._lock:
            if self._progress is not None:
                self._guarded(self._progress.stop)
                self._progress, self._task = None, None

    def emit(self, event: Event) -> None:
        """Show one event. It is cheap, thread-safe, and never raises, because training waits for it."""
        with self._lock:
            if isinstance(event, DatasetUsed):
                self.datasets.append(event.words)
            self._guarded(lambda: self._show(event))

    def show(self, what: RenderableType) -> None:
        """Print anything that rich can render above the bar; text is printed literally, without markup."""
        with self._lock:
            self._guarded(
                lambda: self._rich.print("\n".join(self._folded(shown(what))) if isinstance(what, str) else what)
            )

    @property
    def is_terminal(self) -> bool:
        """Whether people read it on a terminal, where ids are short."""
        return self._terminal

    @property
    def columns(self) -> int:
        """The width of a line."""
        return self._rich.width

    def _guarded(self, action: Callable[[], object]) -> None:
        if self._broken:
            return
        try:
            action()
        # rich raises SystemExit for a closed pipe. Neither that nor a lost terminal may end a training run.
        except (Exception, SystemExit) as fault:  # noqa: BLE001
            self._broken = True
            _LOGGER.warning("console output stops here, because writing failed: %r", fault)

    def _show(self, event: Event) -> None:
        match event:
            case Note(warning=True):
                self.line(f"warning: {event.text}", of="warning")
            case Note() | Printed():
                self.line(event.text)
            case Phase():
                self._phases.enter(event.cause)
            case Preparing():
                self._preparing(event)
            case Training():
                self._training(event)
            case Committed():
                self._committed_at = self._clock()
                path = checkpoint_name(event.path) if self._terminal else event.path
                metrics = metric_words(event.metrics, partial=event.partial)
                words = (f"step {event.step}", "committed", path, metrics, size_words(event.size))
                self.line("  ".join(filter(None, words)), of="commit")
            case Evaluated():
                examples = counted(event.examples, f"{event.on} example")
                metrics = metric_words(event.metrics)
                self.line(f"step {event.step}  evaluated  {metrics}  ({examples})", of="evaluation")
        if self._phases.starting and not isinstance(event, Preparing):
            self._bar(self._phases.now, None, None, "")

    def _preparing(self, event: Preparing) -> None:
        if self._progress is not None:
            self._bar("preparing", None, None, counted(event.examples, "example", thousands=","))
        elif event.examples >= 2 * self._last_examples:
            self._last_examples = event.examples
            self.line(f"preparing  {counted(event.examples, 'example')}")

    def _training(self, event: Training) -> None:
        if self._phases.starting and (words := self._phases.end()):
            self.line(words, of="start")
        self._metrics = event.metrics or self._metrics
        rate = f"{event.examples_per_second:,.0f} examples/s"
        epoch = "" if event.epoch is None else f"{epoch_words(event.epoch)}  "
        if self._progress is not None:
            label = "training" if event.segment is None else f"segment {event.segment}"
            facts = self._facts(event, rate, epoch.rstrip(), beside=len(label) + _BESIDE_FACTS_COLUMNS)
            self._bar("training", event.step, event.target, facts, label=label)
        elif event.metrics != self._last_metrics and event.metrics:  # metrics change at log steps only
            self._last_metrics = event.metrics
            now, left = self._clock(), ""
            step, began = self._first = self._first or (event.step, now)
            if step < event.step < event.target:  # with evaluations and commits as since the first line
                seconds = (event.target - event.step) * (now - began) / (event.step - step)
                left = f"  about {duration_words(seconds)} left"
            metrics = metric_words(event.metrics)
            self.line(f"step {event.step}/{event.target}  {epoch}{metrics}  {rate}{left}", of="training")

    def _facts(self, event: Training, rate: str, epoch: str, *, beside: int) -> str:
        """As much of what is known as the terminal has room for; `beside` columns are for the rest of the bar."""
        # Where rows are far apart, as at the ends of long epochs, that of the newest would be old.
        loss = self._value("loss") if event.loss is None else f"loss {number_words(event.loss)}"
        first = self._value(next((name for name in self._metrics if name != "loss"), ""))
        age = "" if self._committed_at is None else f"commit {duration_words(self._clock() - self._committed_at)} ago"
        facts = [f"{event.step}/{event.target}", epoch, loss, first, rate, age]
        room = self._rich.width - beside - (_ELAPSED_COLUMNS if self._rich.width >= _WIDE_COLUMNS else 0)
        for least in (epoch, age, first, rate, loss):
            if len("  ".join(filter(None, facts))) <= room:
                break
            facts = ["" if fact == least else fact for fact in facts]
        return "  ".join(filter(None, facts))

    def _value(self, name: str) -> str:
        return f"{name} {number_words(self._metrics[name])}" if name in self._metrics else ""

    def _bar(
        self, doing: str, completed: int | None, total: int | None, facts: str, *, label: str | None = None
    ) -> None:
        """Show the bar of what is being done, labelled with that unless there is another label."""
        progress = self._progress
        if progress is None:
            return
        label = doing if label is None else label
        if self._task is not None and progress.tasks[0].fields["doing"] != doing:
            progress.remove_task(self._task)
            self._task = None
        if self._task is None:
            # It begins at the run's step, because steps of earlier processes must not count for the speed.
            self._task = progress.add_task(label, total=total, completed=completed or 0, facts=facts, doing=doing)
        else:
            progress.update(self._task, description=label, total=total, completed=completed, facts=facts)

    def _folded(self, line: str) -> list[str]:
        """A line as lines that fit: with `soft_wrap`, rich would leave it to the terminal, which breaks words."""
        return folded(line, self._rich.width if self._terminal else None, indent=2)

    def line(self, text: str, *, of: str = "") -> None:
        """Print a line; `of` says of what it is, one of `_STYLES`, or something else."""
        text = shown_lines(text)
        if self._terminal:
            lines = (part for line in text.split("\n") for part in self._folded(line))
            self._rich.print(Text("\n".join(lines), _STYLES.get(of, "")))
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()
