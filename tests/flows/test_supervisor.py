"""One trainer: events, questions, what it prints, how it ended, an interrupt, the terminal, the end of its parent."""

import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from baton.flows import supervisor
from baton.flows.supervisor import Outcome, Trainer
from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import BatonError, InvalidInput, StageLost, StaleWriter
from baton.tasks.foundation.machine.stops import STOP_SIGNALS, Terminated
from baton.tasks.foundation.telemetry.events import (
    Asked,
    DatasetUsed,
    Ended,
    Event,
    EventStream,
    Hung,
    Note,
    Printed,
    Questions,
    StatefulOperations,
    Training,
    Unreachable,
    answered,
    in_stage,
    line_of,
    stage_of_thread,
    tell,
)
from tests.support.checkout import CHECKOUT
from tests.support.fake_prefect_api import CRASHED, DATASET, RUNNING, Api, answers, run_with_code
from tests.support.sigterm_raises import sigterm_raises

STEP = Training(step=1, target=2, metrics={"loss": float("inf")}, examples_per_second=float("nan"))
EVENTS: list[Event] = [
    Note(text="a", warning=True),
    DatasetUsed(text="b", words="c"),
    StatefulOperations(reference="model.py:build", operations=("a/RandomUniform", "b/PyFunc")),
    STEP,
    Hung(message="m", stacks="s"),
    Asked(number=1, request="start", arguments={"tags": ["a"], "environment": {}}),
    Ended(exit_code=5, error=ErrorReport.of(StaleWriter("another process has committed"))),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_is_a_line_of_json(event: Event) -> None:
    with in_stage(7):
        line = line_of(event)
    assert line.endswith(b"\n")
    told = Kept(lambda _: stages.append(stage_of_thread()))
    stages = list[int | None]()
    tell(told, line)
    assert repr(told.events) == repr([event])  # NaN is not equal to itself
    assert (stages, stage_of_thread()) == ([7], None)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "1",
        "{}",
        '{"event": "Later", "stage": null, "values": {}}',
        '{"event": "Note", "stage": null, "values": {"text": {}}}',
    ],
)
def test_line_without_a_known_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        tell(Kept(), line)


def test_no_event_waits_for_a_reader_and_the_last_is_not_lost() -> None:
    reader, writer = os.pipe()
    stream = EventStream(writer)
    began = time.monotonic()
    for _ in range(30_000):  # three times what waits in memory
        stream.emit(STEP)
    assert time.monotonic() - began < 20, "it waited for the reader"
    with os.fdopen(reader, "rb") as lines:
        last = in_a_thread(lambda: [line for line in iter(lines.readline, b"") if b"Ended" in line])
        stream.emit(Ended(exit_code=3, stopped="sigterm"))
        os.close(writer)
        assert last() == [line_of(Ended(exit_code=3, stopped="sigterm"))]


def test_question_is_never_dropped() -> None:
    reader, writer = os.pipe()
    stream = EventStream(writer)
    for _ in range(30_000):
        stream.emit(STEP)
    question = Asked(number=1, request="state", arguments={})
    stream.emit(question)
    with os.fdopen(reader, "rb") as lines:
        assert next(line for line in iter(lines.readline, b"") if b"Asked" in line) == line_of(question)
    os.close(writer)


def signal_main_thread(number: signal.Signals) -> None:
    """Interrupt what the main thread waits for, which a signal for the process need not do."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


class Pipe:
    """Questions whose answers a test gives; `on` gets the pipe and each question."""

    def __init__(self, on: Callable[["Pipe", Event], object]) -> None:
        reader, self.end = os.pipe()
        self.ask = Questions(reader, Kept(lambda event: on(self, event)))

    def answer(self, line: bytes) -> None:
        os.write(self.end, line)

    def close(self) -> None:
        os.close(self.end)


@pytest.mark.parametrize("torn", [b"", b'{"number": 0, "val'])
def test_question_to_a_process_that_ends_is_a_lost_stage(torn: bytes) -> None:
    def on(pipe: Pipe, event: Event) -> None:
        if isinstance(event, Asked) and event.number == 0:
            pipe.answer(torn)
            pipe.close()

    pipe = Pipe(on)
    for request in ("state", "cancel"):
        with pytest.raises(StageLost, match=rf"has ended, and does not answer any more \({request}\); .*Run the same"):
            pipe.ask(request, {})


def test_signal_interrupts_who_waits_for_an_answer() -> None:
    def on(pipe: Pipe, event: Event) -> None:
        assert isinstance(event, Asked)
        if event.number == 0:
            threading.Timer(0.1, signal_main_thread, (signal.SIGTERM,)).start()
            return
        for number in (0, 1):  # the first one comes late
            pipe.answer(answered(Asked(number=number, request=f"{number}", arguments={}), lambda request, _: request))

    pipe = Pipe(on)
    with sigterm_raises(Terminated), pytest.raises(Terminated):
        pipe.ask("state", {})
    assert pipe.ask("state", {}) == "1"
    pipe.close()


def test_events_without_a_reader_are_dropped() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = EventStream(writer)
    stream.emit(STEP)
    stream.emit(Ended(exit_code=0))
    os.close(writer)


def in_a_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Do some work in a thread; returns what waits for its result."""
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    return pool.submit(work).result


class Kept:
    """A reader that keeps all events."""

    def __init__(self, on: Callable[[Event], object] = lambda _: None) -> None:
        self.events: list[Event] = []
        self.on = on

    def emit(self, event: Event) -> None:
        self.events.append(event)
        self.on(event)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a small program the trainer; `stream` is where it sends its events."""

    def write(code: str) -> None:
        lines = textwrap.dedent(code)
        (tmp_path / "small_trainer.py").write_text(
            "import os, signal, sys, time\n"
            "from baton.tasks.foundation.telemetry.events import *\n"
            "stream = EventStream(int(sys.argv[-1]))\n"
            "time.sleep(float(os.environ.get('SLEEP', 0)))\n"
            "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # under nohup, it is ignored
            "signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))\n" + lines
        )
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{CHECKOUT}")
        monkeypatch.setattr(supervisor, "_MODULE", "small_trainer")

    return write


def test_readers_get_events_and_what_is_printed(program: Callable[[str], None]) -> None:
    program(
        """
        stream.emit(Note(text="one"))
        print(sys.argv[1:-1], flush=True)
        os.write(2, b"no end of line")
        stream.emit(StatefulOperations(reference="model.py:build", operations=("a",)))
        stream.emit(Ended(exit_code=3, result="{}"))
        sys.exit(3)
        """
    )

    def fail(_: Event) -> None:
        raise BrokenPipeError

    broken, kept = Kept(fail), Kept()
    outcome = Trainer(["run.yaml"], [broken, kept], output=subprocess.PIPE).wait()
    assert len(broken.events) == 1, "one that fails is left out"
    assert [each for each in kept.events if not isinstance(each, Printed)] == [
        Note(text="one"),
        StatefulOperations(reference="model.py:build", operations=("a",)),
        Ended(exit_code=3, result="{}"),
    ]
    printed = [each.text for each in kept.events if isinstance(each, Printed)]
    assert printed == ["['run.yaml', '--events']", "no end of line"] == list(outcome.printed)
    assert (outcome.returncode, outcome.ended) == (3, Ended(exit_code=3, result="{}"))
    assert outcome.stateful_operations == "model.py:build: a"


def test_readers_have_the_context_of_the_start(program: Callable[[str], None]) -> None:
    program("stream.emit(Ended(exit_code=0))")
    variable, found = ContextVar("variable", default=""), list[str]()
    token = variable.set("of a flow run")
    trainer = Trainer([], [Kept(lambda _: found.append(variable.get()))])
    variable.reset(token)
    trainer.wait()
    assert found == ["of a flow run"]


NUMBER: ContextVar[int] = ContextVar("number")


def test_trainer_gets_the_answers_to_what_it_asks(program: Callable[[str], None]) -> None:
    program(
        """
        ask = Questions(int(sys.argv[-3]), stream)
        for request in ("value", "nothing", "refused", "away", "broken", "value"):
            try:
                said = ask(request, {"n": 20})
            except Exception as fault:
                said = [type(fault).__name__, str(fault)]
            stream.emit(Note(text=repr(said)))
        stream.emit(Ended(exit_code=0))
        """
    )

    def answer(request: str, arguments: Mapping[str, object]) -> object:
        match request:
            case "value":
                return {"sum": NUMBER.get() + int(str(arguments["n"])), "text": "x" * 100_000}
            case "refused":
                raise InvalidInput("no such deployment")
            case "away":
                raise Unreachable("does not respond")
            case "broken":
                raise ZeroDivisionError("by zero")
        return None

    token = NUMBER.set(3)
    kept = Kept()
    trainer = Trainer([], [kept], answer=answer)
    NUMBER.reset(token)
    assert trainer.wait().ended == Ended(exit_code=0)
    value = repr({"sum": 23, "text": "x" * 100_000})
    assert [each.text for each in kept.events if isinstance(each, Note)] == [
        value,
        "None",
        "['InvalidInput', 'no such deployment']",
        "['Unreachable', 'does not respond']",
        "['BatonError', 'ZeroDivisionError: by zero']",
        value,
    ]
    assert not any(isinstance(each, Asked) for each in kept.events)


def test_slow_answer_delays_no_event(program: Callable[[str], None]) -> None:
    program(
        """
        import threading
        ask = Questions(int(sys.argv[-3]), stream)
        asking = threading.Thread(target=lambda: stream.emit(Note(text=str(ask("slow", {})))))
        asking.start()
        while asking.is_alive():
            stream.emit(STEP)
            time.sleep(0.01)
        stream.emit(Ended(exit_code=0))
        """.replace("STEP", "Training(step=1, target=2, examples_per_second=1)")
    )
    asked, told = threading.Event(), threading.Event()

    def on(event: Event) -> None:
        if isinstance(event, Training) and asked.is_set():
            told.set()

    def answer(*_: object) -> bool:
        asked.set()
        return told.wait(10)

    kept = Kept(on)
    Trainer([], [kept], answer=answer).wait()
    assert [each for each in kept.events if isinstance(each, Note)] == [Note(text="True")]


def test_trainer_runs_stages_as_deployments(tmp_path: Path) -> None:
    run = run_with_code(tmp_path)
    dataset = DATASET.model_copy(update={"content_digest": run.head.identity["data.content_digest"]})

    def commits_and_dies(api: Api, *_: object) -> list[Any]:
        api.run.commit(150)
        return [RUNNING, CRASHED]

    api = Api(run, answers(dataset), answers(run.head), commits_and_dies)
    names = ("prepare_data", "init_or_restore", "train_segment", "checkpoint_to_gcs", "evaluate")
    settings = [word for name in names for word in ("--set", f"stages.{name}={name.replace('_', '-')}/docker")]
    outcome = Trainer([str(run.run_file()), *settings, "--until-step", "150"], [], answer=api).wait()
    assert (outcome.ended and outcome.ended.error, outcome.returncode) == (None, 0)
    assert [each["deployment"] for each in api.started] == [
        "prepare-data/docker", "init-or-restore/docker", "train-segment/docker",
    ]  # fmt: skip
    (attempt,) = {each["call"]["attempt"] for each in api.started}
    assert [each["key"] for each in api.started] == [f"{attempt}/{number}" for number in range(3)]


def test_trainer_refuses_deployments_if_nobody_answers(tmp_path: Path) -> None:
    words = [str(run_with_code(tmp_path).run_file()), "--set", "stages.evaluate=evaluate/docker"]
    ended = Trainer(words, []).wait().ended
    assert ended is not None
    assert (ended.exit_code, ended.error and ended.error.error) == (2, "InvalidInput")


def test_child_that_holds_the_pipes_delays_no_end(program: Callable[[str], None]) -> None:
    program(
        """
        stream.emit(Ended(exit_code=0))
        if os.fork() == 0:
            time.sleep(600)
        print("last", flush=True)
        os._exit(0)
        """
    )
    trainer = Trainer([], [], output=subprocess.PIPE, own_session=True)
    try:
        outcome = trainer.wait()
    finally:
        os.killpg(trainer.process.pid, signal.SIGKILL)
    assert (outcome.ended, outcome.printed) == (Ended(exit_code=0), ("last",))


def test_output_without_pause_delays_no_event(program: Callable[[str], None]) -> None:
    program(
        """
        import threading
        threading.Timer(0.5, lambda: stream.emit(Note(text="in between"))).start()
        while True:
            print("on and on", flush=True)
        """
    )

    def on(event: Event) -> None:
        if isinstance(event, Note):
            trainer.kill()
        else:
            time.sleep(0.001)  # slower than it prints

    trainer = Trainer([], [Kept(on)], output=subprocess.PIPE)
    assert trainer.wait().returncode == -signal.SIGKILL


def test_signal_for_a_trainer_that_has_just_ended_takes_its_end_from_nobody(
    program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    program("sys.exit(3)")
    trainer, wait = Trainer([], []), os.waitid

    def signalled(*arguments: Any) -> Any:
        wait(os.P_PID, trainer.process.pid, os.WEXITED | os.WNOWAIT)
        trainer.send(signal.SIGTERM)  # as a handler does between the end and Python's return from the call
        trainer.kill()
        return wait(*arguments)

    monkeypatch.setattr(os, "waitid", signalled)
    assert trainer.wait().returncode == 3


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0", "the process of it ended with code 1; the end of its output:\nTraceback"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed from outside; check whether the machine ran out of memory"),
        ("os.kill(os.getpid(), signal.SIGABRT)", "the process of it was ended by SIGABRT with code -6"),
        ("stream.emit(Ended(exit_code=3, stopped='sigterm')); sys.exit(3)", "was stopped (sigterm)"),
    ],
)
def test_what_ended_a_trainer_is_said(program: Callable[[str], None], code: str, words: str) -> None:
    program(code)
    fault = Trainer([], [], output=subprocess.PIPE).wait().error("it")
    assert type(fault) is BatonError
    assert words in str(fault)


def test_its_own_error_is_raised_anew() -> None:
    ended = Ended(exit_code=5, error=ErrorReport.of(StaleWriter("another process has committed")))
    fault = Outcome(returncode=5, ended=ended).error("it")
    assert (type(fault), str(fault)) == (StaleWriter, "another process has committed")


def test_interrupt_is_passed_on(program: Callable[[str], None]) -> None:
    program(
        """
        try:
            stream.emit(Note(text="trains"))
            while True:
                time.sleep(0.05)  # a signal that comes just before a sleep does not interrupt it
        except KeyboardInterrupt:
            stream.emit(Ended(exit_code=3, stopped="sigint"))
            sys.exit(3)
        """
    )
    kept = Kept(lambda event: os.kill(os.getpid(), signal.SIGINT) if isinstance(event, Note) else None)
    trainer = Trainer([], [kept])
    handler = signal.getsignal(signal.SIGINT)
    assert trainer.wait(signal.SIGINT).ended == Ended(exit_code=3, stopped="sigint")
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_signal_during_the_start_waits_until_it_can_be_handled(
    program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    program("")
    monkeypatch.setenv("SLEEP", "1")
    trainer = Trainer([], [])
    trainer.send(number)
    assert trainer.wait().returncode == -number  # as it has no handlers


STARTS = """
import sys
from baton.flows import supervisor
supervisor._MODULE = "small_trainer"
trainer = supervisor.Trainer([], [])
outcome = trainer.wait()
print("outcome", outcome.returncode, outcome.ended and outcome.ended.stopped, flush=True)
print(input("mine? "), flush=True)
"""


def read_until(terminal: int, words: bytes) -> bytes:
    found = b""
    while words not in found:
        found += os.read(terminal, 4096)
    return found


def test_trainer_has_the_terminal_and_gives_it_back(program: Callable[[str], None]) -> None:
    program(
        """
        name = input("name? ")
        try:
            print("got", name, flush=True)
            while True:
                time.sleep(0.05)  # a signal that comes just before a sleep does not interrupt it
        except KeyboardInterrupt:
            print("once", flush=True)
            stream.emit(Ended(exit_code=3, stopped="sigint"))
            sys.exit(3)
        """
    )
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", STARTS])  # noqa: S606
    try:
        read_until(terminal, b"name? ")
        os.write(terminal, b"me\n")
        read_until(terminal, b"got me")
        os.write(terminal, b"\x03")
        shown = read_until(terminal, b"mine? ")
        assert (shown.count(b"once"), shown.count(b"outcome 3 sigint")) == (1, 1)
        os.write(terminal, b"yes\n")
        read_until(terminal, b"yes\r\nyes")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


@pytest.mark.parametrize("in_background", [False, True], ids=["fg", "bg"])
def test_ctrl_z_stops_both_and_both_go_on(program: Callable[[str], None], in_background: bool) -> None:
    program(
        """
        print("begun", flush=True)
        for number in range(10_000):
            time.sleep(0.05)
            if os.path.exists(os.environ["GO"]):
                print("went on", flush=True)
                sys.exit(0)
        """
    )
    go = Path(os.environ["PYTHONPATH"].partition(os.pathsep)[0]) / "go"
    child, terminal = pty.fork()
    if child == 0:
        # A shell: what stops must be in another session's group than its own, or the kernel stops nothing.
        os.environ["GO"] = str(go)
        job = os.fork()
        if job == 0:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            os.tcsetpgrp(0, os.getpgrp())
            signal.signal(signal.SIGTTOU, signal.SIG_DFL)
            os.execv(sys.executable, [sys.executable, "-c", STARTS])  # noqa: S606
        _, status = os.waitpid(job, os.WUNTRACED)
        os.write(1, b"stopped " + str(os.WSTOPSIG(status)).encode() + b"\n")
        go.touch()
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(0, os.getpgrp() if in_background else job)
        os.killpg(job, signal.SIGCONT)
        os.waitpid(job, os.WUNTRACED)  # in the background, it stops when it reads
        os.write(1, f"the shell has the terminal: {os.tcgetpgrp(0) == os.getpgrp()}\n".encode())
        os._exit(0)
    try:
        read_until(terminal, b"begun")
        os.write(terminal, b"\x1a")
        shown = read_until(terminal, b"the shell has the terminal: True" if in_background else b"mine? ")
        assert shown.index(b"stopped 20") < shown.index(b"went on") < shown.index(b"outcome 0")
        if not in_background:
            os.write(terminal, b"yes\n")
            read_until(terminal, b"yes\r\nyes")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def said_after_the_kill(code: str, said: Path) -> str:
    """Start a process that starts the trainer, kill it once the trainer prints, and return what this writes then."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=os.environ | {"SAID": str(said)}
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        parent.kill()
    until = time.monotonic() + 60
    while not (said.exists() and said.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    return said.read_text()


def test_trainer_of_a_killed_parent_gets_a_sigterm(program: Callable[[str], None], tmp_path: Path) -> None:
    program(
        """
        from pathlib import Path
        signal.signal(signal.SIGTERM, lambda *_: (Path(os.environ["SAID"]).write_text("committed"), os._exit(3)))
        print(os.getpid(), flush=True)
        while True:
            time.sleep(0.05)
        """
    )
    assert said_after_the_kill(STARTS, tmp_path / "said") == "committed"


def test_trainer_of_a_killed_parent_waits_for_no_answer(program: Callable[[str], None], tmp_path: Path) -> None:
    program(
        """
        from pathlib import Path
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ask = Questions(int(sys.argv[-3]), stream)
        print(ask("first", {}), flush=True)
        try:
            ask("second", {})
        except Exception as fault:
            Path(os.environ["SAID"]).write_text(f"{type(fault).__name__}: {fault}")
        """
    )
    answering = "answer=lambda request, _: request == 'first' or __import__('time').sleep(600)"
    said = said_after_the_kill(STARTS.replace("Trainer([], [])", f"Trainer([], [], {answering})"), tmp_path / "said")
    assert said.startswith("StageLost: the process that started this one has ended")
