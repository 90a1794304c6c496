"""A training never waits for the process that records it, and one note says what is not recorded.

Here that process is a short script; `tests/end_to_end/test_prefect.py` has the real one.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.flows.process import start_child
from baton.flows.with_prefect.recorder import Recorder
from baton.tasks.foundation.telemetry.events import Begun, Ended, Note, StageBegun, Training, in_stage
from tests.support.event_recorder import EventRecorder
from tests.support.fake_prefect_api import run_with_code

A_LONG_TIME = 60.0
NOT_RECORDED = "this run is not recorded in Prefect: "
NO_RESULT = "Prefect did not record the result: "

# The answers are the words of the script's arguments; `read` reads the lines up to the end of the training.
SCRIPT = """
import json, sys, time
lines = open(sys.argv[1], "a")
for word in sys.argv[2:]:
    if word == "read":
        for line in sys.stdin:
            lines.write(line)
            if json.loads(line).get("event") == "Ended":
                break
        lines.flush()
    elif word.isdigit():
        sys.exit(int(word))
    elif word == "hang":
        time.sleep(1000)
    else:
        print(word, flush=True)
"""
CONNECTED, BEGUN, RECORDED = (json.dumps({"state": word}) for word in ("connected", "begun", "recorded"))


RUN = {"file": "run.yaml", "overrides": ["train.seed=1"], "parameters": {"until_step": 150}}
REACHED = Ended(exit_code=0, result="{}")


@pytest.fixture
def recorder(tmp_path: Path) -> Callable[..., Recorder]:
    """Makes a recorder that has begun, and whose process answers with the given words."""

    def make(
        *words: str, notes: EventRecorder | None = None, last_seconds: float = A_LONG_TIME, on_cancelled: Any = None
    ) -> Recorder:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "lines"), *words]
        made = Recorder(
            RUN, notes=notes or EventRecorder(), on_cancelled=on_cancelled, start=partial(start_child, command),
            last_seconds=last_seconds,
        )  # fmt: skip
        made.emit(Begun())
        return made

    return make


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "lines").read_text().splitlines()]


def end_in(folder: Path) -> dict[str, Any]:
    line = lines_of(folder)[-1]
    assert line["event"] == "Ended"
    return {name: value for name, value in line["values"].items() if value}


def notes_of(recorder: EventRecorder) -> list[str]:
    return [event.text for event in recorder.events if isinstance(event, Note)]


def test_process_is_told_everything_in_order(recorder: Callable[..., Recorder], tmp_path: Path) -> None:
    notes = EventRecorder()
    sink = recorder(CONNECTED, BEGUN, "read", RECORDED, notes=notes)
    sink.emit(StageBegun(number=7, label="train-segment", name="train-segment 1"))
    with in_stage(7):
        sink.emit(Note(text="within"))
    sink.emit(Training(step=7, target=9, metrics={"loss": float("nan")}, examples_per_second=1.0))
    sink.emit(REACHED)  # `close` says it
    sink.close(REACHED)
    first, begins, note, training, end = lines_of(tmp_path)
    assert first == RUN
    assert (begins["event"], begins["values"]["number"]) == ("StageBegun", 7)
    assert (note["event"], note["values"]["text"], note["stage"]) == ("Note", "within", 7)
    assert (training["event"], training["values"]["step"], training["stage"]) == ("Training", 7, None)
    assert end["event"] == "Ended"
    assert notes_of(notes) == []


def test_nothing_is_started_for_a_run_that_is_refused() -> None:
    sink = Recorder(RUN, notes=EventRecorder(), on_cancelled=lambda: None, start=lambda **_: pytest.fail("started"))
    sink.emit(Note(text="looks"))
    sink.close(Ended(exit_code=2))


def test_training_does_not_wait_for_a_process_that_reads_nothing(recorder: Callable[..., Recorder]) -> None:
    notes = EventRecorder()
    sink = recorder(CONNECTED, "hang", notes=notes, last_seconds=0.1)
    for step in range(20_000):
        sink.emit(Training(step=step, target=9, examples_per_second=1.0))
    sink.close(REACHED)
    assert notes_of(notes) == [f"{NOT_RECORDED}no response within 0.1 s"]


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (['{"absent": "no server"}', "0"], f"{NOT_RECORDED}no server"),
        (["7"], f"{NOT_RECORDED}its process ended with code 7"),
        ([CONNECTED, BEGUN, "7"], f"{NO_RESULT}its process ended with code 7"),
        ([CONNECTED, BEGUN, "read", '{"absent": "refused"}'], f"{NO_RESULT}refused"),
        ([CONNECTED, BEGUN, "read", "hang"], f"{NO_RESULT}no response within 2 s"),
        (['{"note": "slow"}', CONNECTED, BEGUN, "read", RECORDED, "9"], "slow"),
    ],
)
def test_what_is_not_recorded_is_one_note(recorder: Callable[..., Recorder], words: list[str], note: str) -> None:
    notes = EventRecorder()
    recorder(*words, notes=notes, last_seconds=2.0).close(REACHED)
    assert notes_of(notes) == [note]


def test_a_process_that_cannot_be_started_is_a_note() -> None:
    notes = EventRecorder()

    def start(**_: object) -> "subprocess.Popen[bytes]":
        raise OSError(12, "Cannot allocate memory")

    sink = Recorder(RUN, notes=notes, on_cancelled=lambda: None, start=start)
    for event in (Begun(), Note(text="trains")):
        sink.emit(event)
    sink.close(REACHED)
    assert notes_of(notes) == [f"{NOT_RECORDED}its process cannot be started (Cannot allocate memory)"]


def test_a_stop_before_the_server_responds_waits_for_nothing(recorder: Callable[..., Recorder]) -> None:
    notes = EventRecorder()
    recorder("hang", notes=notes).close(Ended(exit_code=3, stopped="sigterm"))
    (note,) = notes_of(notes)
    assert note.startswith(f"{NOT_RECORDED}it was stopped before")


def test_cancelled_flow_run_stops_the_training_once(recorder: Callable[..., Recorder], tmp_path: Path) -> None:
    notes, cancelled, stopped = EventRecorder(), '{"cancelled": true}', threading.Semaphore(0)
    words = (CONNECTED, BEGUN, cancelled, cancelled, "read", RECORDED)
    sink = recorder(*words, notes=notes, on_cancelled=stopped.release)
    assert stopped.acquire(timeout=A_LONG_TIME)
    sink.close(Ended(exit_code=3, stopped="sigterm"))
    assert not stopped.acquire(blocking=False)
    assert notes_of(notes) == ["the flow run was cancelled in Prefect"]
    assert end_in(tmp_path) == {"exit_code": 3, "stopped": "cancelled"}


# The real process, with a flow run that refuses by its settings.
_HEARTBEATS = """
import sys
from baton.flows.with_prefect import recorder, run_flows
from prefect.settings import get_current_settings
from baton.tasks.foundation.errors import PrefectUnavailable

def refuse(*_arguments, **_words):
    raise PrefectUnavailable(f"heartbeats: {get_current_settings().flows.heartbeat_frequency}")

recorder.connect, run_flows.run_as_train_run = lambda: sys.argv[1] == "embedded", refuse
recorder.main()
"""


@pytest.mark.parametrize(("server", "seconds"), [("embedded", None), ("configured", 180)])
def test_only_a_server_that_outlives_the_command_gets_heartbeats(
    tmp_path: Path, server: str, seconds: int | None
) -> None:
    notes = EventRecorder()
    start = partial(start_child, [sys.executable, "-c", _HEARTBEATS, server])
    file = str(run_with_code(tmp_path).run_file())
    sink = Recorder(RUN | {"file": file}, notes=notes, on_cancelled=lambda: None, start=start)
    sink.emit(Begun())
    sink.close(REACHED)
    assert notes_of(notes) == [f"{NOT_RECORDED}heartbeats: {seconds}"]


_SIGNALS = """
import signal
from baton.flows.with_prefect import recorder

def connect():  # starts the server's threads, which inherit the mask of signals
    raise OSError(f"blocked: {sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))}")

recorder.connect = connect
recorder.main()
"""


def test_signals_end_neither_the_recorder_nor_its_server() -> None:
    notes = EventRecorder()
    start = partial(start_child, [sys.executable, "-c", _SIGNALS])
    sink = Recorder(RUN, notes=notes, on_cancelled=lambda: None, start=start)
    sink.emit(Begun())
    sink.close(REACHED)
    assert notes_of(notes) == [f"{NOT_RECORDED}OSError: blocked: {[signal.SIGINT, signal.SIGTERM]}"]


# What a run imports before its first step, besides TensorFlow.
_CODE = """
import sys
import baton.flows.commands.run, baton.flows.with_prefect.recorder, baton.flows.train, baton.flows.relay
assert not {"prefect", "tensorflow"} & sys.modules.keys()
"""


def test_start_of_a_run_imports_no_prefect() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
