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

from baton.flows.admit import Admitted, admit
from baton.flows.opened_run import Goal, OpenedRun
from baton.flows.process import Terminated, start_child
from baton.flows.with_prefect import artifacts
from baton.flows.with_prefect.recorder import Recorder
from baton.flows.with_prefect.task_runs import RecordedStages
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall
from baton.tasks.foundation.machine.stops import ProcessStop
from baton.tasks.foundation.stage import Place, Stage
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.telemetry.events import Hung, Note, Phase, Training
from tests.support.event_recorder import EventRecorder
from tests.support.fake_prefect_api import DATASET, run_with_code
from tests.support.lab import spec_of
from tests.support.watching import wait_until

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
            if "training" in json.loads(line):
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


@pytest.fixture
def admitted(tmp_path: Path) -> Admitted:
    run = OpenedRun.open(load_run_file(run_with_code(tmp_path).run_file()))
    found = admit(run, Goal.of(run.spec, until_step=150), telemetry=EventRecorder())
    assert isinstance(found, Admitted)
    return found


@pytest.fixture
def recorder(admitted: Admitted, tmp_path: Path) -> Callable[..., Recorder]:
    """Makes a recorder whose process answers with the given words."""

    def make(*words: str, notes: EventRecorder | None = None, last_seconds: float = A_LONG_TIME) -> Recorder:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "lines"), *words]
        return Recorder(
            admitted, {"run_file": "run.yaml"}, ["train.seed=1"], notes=notes or EventRecorder(),
            start=partial(start_child, command), last_seconds=last_seconds,
        )  # fmt: skip

    return make


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "lines").read_text().splitlines()]


def end_in(folder: Path) -> dict[str, Any]:
    return json.loads(lines_of(folder)[-1]["training"])


def notes_of(recorder: EventRecorder) -> list[str]:
    return [event.text for event in recorder.events if isinstance(event, Note)]


class Reached:
    """In place of a result: only its JSON is sent."""

    def model_dump_json(self) -> str:
        return "{}"


REACHED: Any = Reached()


def test_process_is_told_everything_in_order(recorder: Callable[..., Recorder], tmp_path: Path) -> None:
    notes = EventRecorder()
    with recorder(CONNECTED, BEGUN, "read", RECORDED, notes=notes) as sink:

        def work(_call: PrepareDataCall, _place: Place) -> DatasetRef:
            sink.emit(Note(text="within"))
            return DATASET

        stage = Stage(
            name="prepare_data", call=PrepareDataCall, answer=DatasetRef, load=lambda: work, subject=lambda _: "digits"
        )
        place = Place.of(MemoryStorage("tests"), "run", code_folder=Path(), telemetry=EventRecorder())
        assert RecordedStages(sink).run(stage, PrepareDataCall(spec=spec_of("plain")), place) == DATASET
        sink.emit(Phase(cause="train"))
        sink.emit(Training(step=7, target=9, metrics={"loss": float("nan")}, examples_per_second=1.0))
        sink.reached(REACHED)
    first, begins, note, ends, training, end = lines_of(tmp_path)
    assert (first["name"], first["overrides"], first["parameters"]) == (
        "digits → 150",
        ["train.seed=1"],
        {"run_file": "run.yaml"},
    )
    assert begins == {"begins": begins["begins"], "label": "prepare-data", "name": "prepare-data digits"}
    assert (note["event"], note["values"]["text"], note["stage"]) == ("Note", "within", begins["begins"])
    assert ends == {"ends": begins["begins"], "end": {"kind": "Completed", "message": None, "name": None}}
    assert (training["event"], training["values"]["step"], training["stage"]) == ("Training", 7, None)
    assert json.loads(end["training"]) == {"kind": "reached", "text": "{}", "error": None}
    assert notes_of(notes) == []


def test_training_does_not_wait_for_a_process_that_reads_nothing(recorder: Callable[..., Recorder]) -> None:
    notes = EventRecorder()
    with recorder(CONNECTED, "hang", notes=notes, last_seconds=0.1) as sink:
        for step in range(20_000):
            sink.emit(Training(step=step, target=9, examples_per_second=1.0))
        sink.reached(REACHED)
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
    with recorder(*words, notes=notes, last_seconds=2.0) as sink:
        sink.reached(REACHED)
    assert notes_of(notes) == [note]


def test_a_process_that_cannot_be_started_is_a_note(admitted: Admitted) -> None:
    notes = EventRecorder()

    def start(**_: object) -> "subprocess.Popen[bytes]":
        raise OSError(12, "Cannot allocate memory")

    with Recorder(admitted, {}, [], notes=notes, start=start) as sink:
        sink.emit(Note(text="trains"))
        sink.reached(REACHED)
    assert notes_of(notes) == [f"{NOT_RECORDED}its process cannot be started (Cannot allocate memory)"]


@pytest.mark.parametrize("stop", [Terminated, KeyboardInterrupt])
def test_a_stop_before_the_server_responds_waits_for_nothing(
    recorder: Callable[..., Recorder], stop: type[BaseException]
) -> None:
    notes = EventRecorder()
    with pytest.raises(stop), recorder("hang", notes=notes):
        raise stop
    (note,) = notes_of(notes)
    assert note.startswith(f"{NOT_RECORDED}it was stopped before")


@pytest.mark.parametrize(
    ("fault", "kind"), [(Terminated(), "stopped"), (KeyboardInterrupt(), "stopped"), (ValueError("a bug"), "failed")]
)
def test_what_ends_the_training_is_recorded_and_raised(
    recorder: Callable[..., Recorder], tmp_path: Path, fault: BaseException, kind: str
) -> None:
    def train() -> None:
        with recorder(CONNECTED, BEGUN, "read", RECORDED) as sink:
            wait_until(lambda: sink._state == "begun")
            raise fault

    with pytest.raises(type(fault)) as raised:
        train()
    assert raised.value is fault
    assert end_in(tmp_path)["kind"] == kind


def test_cancelled_flow_run_stops_the_training(
    recorder: Callable[..., Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminated(*_: object) -> None:
        raise Terminated

    monkeypatch.setattr(artifacts, "PROCESS_STOP", ProcessStop())  # what ran before in this process
    notes, cancelled = EventRecorder(), '{"cancelled": true}'
    before = signal.signal(signal.SIGTERM, terminated)
    try:
        with (
            pytest.raises(Terminated),
            recorder(CONNECTED, BEGUN, cancelled, cancelled, "read", RECORDED, notes=notes),
        ):
            threading.Event().wait(A_LONG_TIME)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert notes_of(notes) == ["the flow run was cancelled in Prefect"]
    assert end_in(tmp_path)["kind"] == "cancelled"


def test_a_process_that_hangs_is_recorded_as_crashed(recorder: Callable[..., Recorder], tmp_path: Path) -> None:
    with recorder(CONNECTED, BEGUN, "read", RECORDED) as sink:
        wait_until(lambda: sink._state == "begun")
        sink.emit(Hung(message="no step for 600 s", stacks="..."))  # waits for the process
        assert end_in(tmp_path) == {"kind": "crashed", "text": "hung: no step for 600 s", "error": None}


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
    admitted: Admitted, server: str, seconds: int | None
) -> None:
    notes = EventRecorder()
    start = partial(start_child, [sys.executable, "-c", _HEARTBEATS, server])
    with Recorder(admitted, {"run_file": "run.yaml"}, [], notes=notes, start=start) as sink:
        sink.reached(REACHED)
    assert notes_of(notes) == [f"{NOT_RECORDED}heartbeats: {seconds}"]


_SIGNALS = """
import signal
from baton.flows.with_prefect import recorder

def connect():  # starts the server's threads, which inherit the mask of signals
    raise OSError(f"blocked: {sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))}")

recorder.connect = connect
recorder.main()
"""


def test_signals_end_neither_the_recorder_nor_its_server(admitted: Admitted) -> None:
    notes = EventRecorder()
    start = partial(start_child, [sys.executable, "-c", _SIGNALS])
    with Recorder(admitted, {"run_file": "run.yaml"}, [], notes=notes, start=start) as sink:
        sink.reached(REACHED)
    assert notes_of(notes) == [f"{NOT_RECORDED}OSError: blocked: {[signal.SIGINT, signal.SIGTERM]}"]


# What a run imports before its first step, besides TensorFlow.
_CODE = """
import sys
import baton.flows.with_prefect.recorder, baton.flows.relay, baton.flows.with_prefect.server
assert not {"prefect", "tensorflow"} & sys.modules.keys()
"""


def test_start_of_a_run_imports_no_prefect() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
