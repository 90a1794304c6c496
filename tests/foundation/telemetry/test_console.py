"""The console: lines in a pipe, one bar on a terminal, and no exception into training."""

import fcntl
import io
import logging
import os
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator

import pytest
from rich.table import Table

from baton.tasks.foundation.telemetry.console import Console
from baton.tasks.foundation.telemetry.events import Committed, Evaluated, Event, Note, Phase, Preparing, Sink, Training

PATH = "checkpoints/00000500-00000003-0123456789abcdef0123456789abcdef"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


def training(step: int, **metrics: float) -> Training:
    return Training(step=step, target=3000, metrics=metrics, examples_per_second=12345.6)


def emitted(stream: io.StringIO, *events: Event) -> str:
    with Console(stream) as console:
        sink: Sink = console
        for event in events:
            sink.emit(event)
    return stream.getvalue()


def test_pipe_gets_plain_lines() -> None:
    text = emitted(
        io.StringIO(),
        Note(text="4 replicas"),
        training(50, loss=0.25),
        Committed(step=500, path=PATH, size=1_234_567, metrics={"loss": 0.123, "accuracy": 0.98}),
        Evaluated(step=500, metrics={"accuracy": 0.975}, examples=180),
        Evaluated(step=600, metrics={"accuracy": 0.5}, examples=1, on="test"),
        Note(text="[red]disk[/red] is nearly full", warning=True),
    )
    assert text.splitlines() == [
        "4 replicas",
        "step 50/3000  loss 0.25  12,346 examples/s",
        f"step 500  committed  {PATH}  loss 0.123  accuracy 0.98  1.2 MB",
        "step 500  evaluated  accuracy 0.975  (180 validation examples)",
        "step 600  evaluated  accuracy 0.5  (1 test example)",
        "warning: [red]disk[/red] is nearly full",
    ]


def test_pipe_gets_the_time_left() -> None:
    """With what came between the steps, such as evaluations, and not before two steps can be compared."""
    now, stream = [100.0], io.StringIO()
    with Console(stream, clock=lambda: now[0]) as console:
        for seconds, step in ((0.0, 1000), (60.0, 1500), (120.0, 3000)):
            now[0] = 100.0 + seconds
            console.emit(training(step, loss=1 / step))
    lines = [line.partition("examples/s")[2] for line in stream.getvalue().splitlines()]
    assert lines == ["", "  about 3 min 00 s left", ""]


def test_start_is_named_phase_by_phase() -> None:
    now = [100.0]
    stream = io.StringIO()
    with Console(stream, clock=lambda: now[0]) as console:
        for seconds, event in (
            (2.0, Note(text="starting")),
            (3.0, Phase(cause="build")),
            (0.01, Phase(cause="restore")),
            (1.25, Phase(cause="build")),
            (0.5, training(10)),
            (9.0, Phase(cause="commit")),
            (9.0, training(20)),
        ):
            now[0] += seconds
            console.emit(event)
    assert stream.getvalue().splitlines() == [
        "starting",
        "started in 6.8 s: start-up 5.0 s, build 0.5 s, restore 1.2 s",
    ]


@pytest.mark.parametrize(
    ("columns", "facts"),
    [
        (200, "1600/12000  epoch 1.5  loss 0.2534  accuracy 0.5  12,346 examples/s  commit 0.0 s ago"),
        (120, "1600/12000  loss 0.2534  accuracy 0.5  12,346 examples/s  commit 0.0 s ago"),
        (100, "1600/12000  loss 0.2534  accuracy 0.5  12,346 examples/s"),
        (80, "1600/12000  loss 0.2534  12,346 examples/s"),
        (70, "1600/12000  loss 0.2534"),
        (40, "1600/12000"),
    ],
)
def test_bar_shows_what_the_terminal_has_room_for(columns: int, facts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    event = Training(
        step=1600, target=12000, metrics={"loss": 0.2534, "accuracy": 0.5, "f1": 0.1}, examples_per_second=12345.6,
        epoch=1.5, segment=3,
    )  # fmt: skip
    text = emitted(Terminal(), Committed(step=0, path=PATH, size=1, metrics={}), event)
    bars = [line for line in re.split(r"[\r\n]", CONTROL.sub("", text)) if "00/12000" in line]
    elapsed = "0:00:00 elapsed " if columns >= 110 else " "
    assert re.fullmatch(rf"segment 3 [━╺╸]+ {facts} {elapsed}--:-- left *", bars[-1]), bars[-1]
    assert max(map(len, bars)) <= columns


def test_bar_shows_the_loss_since_the_newest_row() -> None:
    events = (
        Training(step=7, target=900, examples_per_second=1.0, loss=0.75),
        Training(step=8, target=900, examples_per_second=1.0, loss=0.5, metrics={"loss": 2.0, "accuracy": 0.25}),
    )
    plain = CONTROL.sub("", emitted(Terminal(), *events))
    assert "7/900  loss 0.75" in plain
    assert "8/900  loss 0.5  accuracy 0.25" in plain
    assert "loss 0.5" not in emitted(io.StringIO(), *events), "lines are rows"


def test_bar_says_each_segment_and_keeps_its_speed() -> None:
    with Console(Terminal()) as console:
        known = []
        for segment in (1, 2):
            console.emit(Training(step=segment * 100, target=3000, examples_per_second=1.0, segment=segment))
            assert console._progress is not None
            [task] = console._progress.tasks
            known.append((task.description, task.id))
    assert known == [("segment 1", task.id), ("segment 2", task.id)]


def test_bar_of_a_verb_says_what_it_does() -> None:
    with Console(stream := Terminal(), doing="proving") as console:
        console.emit(Note(text="straight to step 8"))
    plain = CONTROL.sub("", stream.getvalue())
    assert "proving ━" in plain
    assert "start-up" not in plain


@pytest.mark.parametrize("columns", [40, 80])
def test_terminal_breaks_lines_between_words(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    commit = Committed(step=0, path=PATH, size=1_234_567, metrics={"loss": 0.25, "accuracy": 0.5, "top 5": 0.1})
    console = Console(stream := Terminal())  # not started, so without a bar
    console.emit(commit)
    console.emit(Note(text="look here: " + "word " * 20, warning=True))
    text = CONTROL.sub("", stream.getvalue())
    assert max(map(len, text.splitlines())) <= columns
    expected = "step 0 committed 00000500-00000003-01234567 loss 0.25 accuracy 0.5 top 5 0.1 1.2 MB warning: look here:"
    assert text.split() == [*expected.split(), *["word"] * 20]
    assert "  accuracy 0.5" in text
    assert sum(line.startswith("  ") for line in text.splitlines()) >= 2


@pytest.mark.parametrize("variable", ["NO_COLOR", "CLICOLOR"])
def test_console_has_no_colors_unless_wanted(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Committed(step=0, path=PATH, size=1, metrics={})
    assert "\x1b[32m" in emitted(Terminal(), commit)
    monkeypatch.setenv(variable, "1" if variable == "NO_COLOR" else "0")
    assert "\x1b[32m" not in emitted(Terminal(), commit)


def test_commit_between_rows_shows_the_partial_metrics() -> None:
    commits = (
        Committed(step=60, path=PATH, size=1, metrics={"loss": 0.25}),
        Committed(step=68, path=PATH, size=1, metrics={"loss": 0.5}, partial=True),
    )
    first, second = emitted(io.StringIO(), *commits).splitlines()
    assert "partial" not in first
    assert "loss 0.5 (partial)  " in second


def test_pipe_gets_metrics_at_log_steps_only() -> None:
    # Between log steps the trainer repeats the last metrics.
    text = emitted(io.StringIO(), training(10), training(50, loss=2.0), training(70, loss=2.0), training(100, loss=1.0))
    assert [line.split()[1] for line in text.splitlines()] == ["50/3000", "100/3000"]


def test_pipe_gets_few_lines_while_preparing() -> None:
    text = emitted(io.StringIO(), *(Preparing(examples=1000 * n) for n in range(1, 1001)))
    assert 5 < len(text.splitlines()) < 15


def test_terminal_keeps_lines_and_removes_the_bar() -> None:
    text = emitted(
        Terminal(),
        training(1500, loss=0.25),
        Committed(step=2000, path=PATH, size=1_234_567, metrics={"loss": 0.2}),
        Note(text="look here", warning=True),
        training(2500, loss=0.125),
    )
    plain = CONTROL.sub("", text)
    assert re.search(r"training .*2500/3000  loss 0.125  12,346 examples/s  commit \S+ s ago +\S+ left", plain)
    assert "step 2000  committed  00000500-00000003-01234567  loss 0.2  1.2 MB\n" in plain.replace("\r", "")
    assert re.search(r"\x1b\[1;33m[^\n]*look here", text), "a warning is to be noticed"
    assert text.endswith("\x1b[1A\x1b[2K"), "the bar is wiped out at the end"
    assert "\x1b[?25h" in text, "the cursor is shown again"


@pytest.mark.parametrize("validates", [True, False])
def test_time_left_is_hidden_without_a_known_end(validates: bool) -> None:
    """The end of a source is unknown when it is read for the first time."""
    events = [Preparing(examples=150), *([training(1500, loss=0.25)] if validates else [])]
    plain = CONTROL.sub("", emitted(Terminal(), *events))
    assert "150 examples" in plain
    assert (" left" in plain) == validates


RESIZED = """
import sys
from baton.tasks.foundation.telemetry import console as module
from baton.tasks.foundation.telemetry.console import Console
from baton.tasks.foundation.telemetry.events import Note, Training

module._REFRESHES_PER_SECOND = 0.001  # so that the bar is not drawn while the terminal is resized

def train(step):
    console.emit(Training(step=step, target=3000, metrics={"loss": 0.25}, examples_per_second=12345.6))
    console._progress.refresh()
    print("drawn", file=sys.stderr, flush=True)

with Console() as console:
    console.emit(Note(text="a line that stays"))
    for step in (1000, 2000):
        train(step)
        sys.stdin.readline()
    console.emit(Note(text="another line"))
"""


class Screen:
    """A terminal that wraps lines which no longer fit, as most do; only what rich and a bar need."""

    def __init__(self, columns: int) -> None:
        self.columns, self.lines, self.row, self.column = columns, [""], 0, 0

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif re.fullmatch(r"\x1b\[\d*A", part):
                self.row -= int(part[2:-1] or 1)
            elif part[0] != "\x1b":
                if self.column == self.columns:
                    self.write("\r\n")
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + part + line[self.column + 1 :]
                self.column += 1

    def resize(self, columns: int) -> None:
        """Wrap the last line, which has the cursor and is the only one that may not fit."""
        line = self.lines[self.row]
        broken = [line[start : start + columns] for start in range(0, len(line), columns)]
        self.lines[self.row :] = broken
        self.columns, self.row = columns, self.row + len(broken) - 1
        self.column -= columns * (len(broken) - 1)


def received(terminal: int) -> str:
    """What a terminal device has received; the kernel passes a write on in parts, and some time later."""
    data = os.read(terminal, 65536)
    while select.select([terminal], [], [], 0.2)[0]:
        try:
            data += os.read(terminal, 65536)
        except OSError:  # the other side is closed, and everything was read
            break
    return data.decode()


def test_bar_is_erased_after_the_terminal_narrows() -> None:
    """Uses a real terminal device that becomes narrower while the bar is drawn."""
    terminal, side = os.openpty()
    screen = Screen(100)
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "XTERM_VERSION"}}
    command = [sys.executable, "-c", RESIZED]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=side, stderr=subprocess.PIPE, env=environment)
    os.close(side)
    assert child.stdin is not None
    assert child.stderr is not None
    assert child.stderr.readline() == b"drawn\n"
    screen.write(received(terminal))
    assert "1000/3000" in screen.lines[screen.row]
    assert len(screen.lines[screen.row]) > 60
    screen.resize(40)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    child.stdin.write(b"\n")
    child.stdin.flush()
    assert child.stderr.readline() == b"drawn\n"
    screen.write(received(terminal))
    assert "2000/3000" in screen.lines[screen.row]
    assert [line for line in screen.lines if "/3000" in line] == [screen.lines[screen.row]]
    child.communicate(b"\n")
    assert child.returncode == 0
    screen.write(received(terminal))
    os.close(terminal)
    assert [line.strip() for line in screen.lines if line.strip()] == ["a line that stays", "another line"]


def test_bar_begins_at_the_step_of_the_run() -> None:
    # Steps of an earlier process must not count as speed.
    with Console(Terminal()) as console:
        console.emit(training(2900, loss=1.0))
        assert console._progress is not None
        [task] = console._progress.tasks
        assert (task.completed, task.total, task.speed) == (2900, 3000, None)
        console.emit(Preparing(examples=5))
        console.emit(training(2950, loss=1.0))
        [task] = console._progress.tasks
        assert task.description == "training"


def test_start_is_idempotent_and_lines_work_after_stop() -> None:
    stream = Terminal()
    console = Console(stream)
    console.start()
    console.start()
    console.stop()
    console.stop()
    console.emit(Note(text="after"))
    console.emit(training(10, loss=1.0))
    console.show("closing")
    assert "after" in stream.getvalue()
    assert "step 10/3000" in stream.getvalue()
    assert "closing" in stream.getvalue()


class Broken(io.StringIO):
    def __init__(self, fault: BaseException, *, terminal: bool) -> None:
        super().__init__()
        self.fault, self.terminal, self.writes = fault, terminal, 0

    def isatty(self) -> bool:
        return self.terminal

    def write(self, _: str) -> int:
        self.writes += 1
        raise self.fault


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("fault", [OSError(5, "Input/output error"), ValueError("closed file"), SystemExit(1)])
def test_lost_terminal_does_not_end_training(
    fault: BaseException, terminal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Broken(fault, terminal=terminal)
    console = Console(stream)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            console.emit(training(step, loss=float(step)))
            console.emit(Note(text="x"))
    assert stream.writes == 1
    assert len(caplog.records) == 1
    assert "console output stops here" in caplog.text


def test_interrupt_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        Console(Broken(KeyboardInterrupt(), terminal=False)).emit(Note(text="x"))


def test_lines_of_threads_are_not_mixed() -> None:
    class Slow(io.StringIO):
        busy = overlaps = 0

        def write(self, text: str) -> int:
            self.overlaps += self.busy
            self.busy = 1
            time.sleep(0.0002)  # so that other threads run
            self.busy = 0
            return super().write(text)

    stream = Slow()
    console = Console(stream)

    def lines(name: str) -> Iterator[Note]:
        return (Note(text=f"{name}{number:03d}" * 5) for number in range(100))

    threads = [
        threading.Thread(target=lambda name=name: [console.emit(note) for note in lines(name)]) for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stream.overlaps == 0
    written = stream.getvalue().splitlines()
    assert sorted(written) == sorted(note.text for name in "abcd" for note in lines(name))


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_names_like_markup_are_shown_literally(stream: type[io.StringIO]) -> None:
    """As markup, [/x] would be an error in rich, and nothing more would be shown."""
    file = stream()
    console = Console(file)
    name = "f1[macro] [/x] [bold]b[/bold] :tm:"
    console.emit(Note(text=f"note {name} \x1b]0;owned\x07"))
    console.show(f"text {name}")
    table = Table(box=None)
    table.add_column(name)
    table.add_row(f"{name}.")
    console.show(table)
    with console:
        console.emit(Training(step=1, target=2, examples_per_second=1.0, metrics={name: 1.0}))
    console.emit(Note(text="the end"))
    text = file.getvalue()
    for line in (f"note {name} ", f"text {name}", f"{name}.", "the end"):
        assert line in text
    assert "\x1b]0;" not in text
