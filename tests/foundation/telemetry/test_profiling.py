"""A trace that a home asks for: which steps it has, where it lies, and who refuses it."""

import errno
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

from baton.tasks.foundation.errors import BatonError, InvalidInput
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry import profiling
from baton.tasks.foundation.telemetry.profiling import Profiler, ProfileRequest, ask_for_trace
from tests.support.event_recorder import EventRecorder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStorage:
    monkeypatch.setattr(profiling, "_POLL_SECONDS", 0.01)
    (tmp_path / "home").mkdir()
    return LocalStorage(tmp_path / "home")


def asked(home: LocalStorage, until: Callable[[], object], *, at_work: bool = True) -> ProfileRequest | BatonError:
    """Ask the attempt `a` for a trace of three steps; call `until` again and again before an answer comes."""
    answers = list[ProfileRequest | BatonError]()

    def ask() -> None:
        try:
            answers.append(ask_for_trace(home, 3, ["a"], is_at_work=lambda: at_work))
        except BatonError as fault:
            answers.append(fault)

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        until()
        thread.join(0.001)
    [answer] = answers
    return answer


def training(profiler: Profiler, home: LocalStorage, recorder: EventRecorder) -> Callable[[], None]:
    """Inner loops of at most two steps, each after a heartbeat."""
    reached = [100]

    def inner_loop() -> None:
        profiler.look(home, ["a"])
        steps = int(min(2, profiler.steps_left(reached[0], home, recorder)))
        with profiler.inner_loop(steps):
            tf.reduce_sum(tf.ones([8, 8]))
        reached[0] += steps
        profiler.end_if_done(reached[0], home, recorder)

    return inner_loop


def test_trace_has_the_steps_that_are_asked_for(home: LocalStorage) -> None:
    profiler, recorder = Profiler(), EventRecorder()
    answer = asked(home, training(profiler, home, recorder))
    assert isinstance(answer, ProfileRequest)
    assert answer.first_step is not None
    assert answer.last_step == answer.first_step + 3
    [file] = [path for path in home.files("") if path.startswith(f"{answer.trace}/")]
    assert file.startswith("tensorboard/plugins/profile/steps-")
    assert file.endswith(".xplane.pb")
    assert b"train" in home.read(file)
    assert list(home.files("")) == [file]
    [note] = recorder.notes
    assert note == f"traced steps {answer.first_step + 1} to {answer.last_step}: {home.uri}/{answer.trace}"
    assert isinstance(asked(home, training(profiler, home, recorder)), ProfileRequest)  # and another one


def test_trace_ends_with_the_attempt(home: LocalStorage) -> None:
    profiler, recorder = Profiler(), EventRecorder()

    def begin_and_end() -> None:
        profiler.look(home, ["a"])
        if profiler.steps_left(7, home, recorder) == 3:
            with profiler.inner_loop(1):
                pass
            profiler.end_if_done(8, home, recorder)
            profiler.end(home, recorder)

    answer = asked(home, begin_and_end)
    assert isinstance(answer, ProfileRequest)
    assert (answer.first_step, answer.last_step) == (7, 8)


@pytest.mark.parametrize("fault", ["no profiler", "full disk"])
def test_process_that_cannot_trace_says_so_and_goes_on(
    home: LocalStorage, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if fault == "no profiler":
        monkeypatch.delattr(tf.profiler.experimental, "start")
    else:
        monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    answer = asked(home, training(Profiler(), home, EventRecorder()))
    assert isinstance(answer, InvalidInput)
    assert "TensorFlow's profiler (tf.profiler.experimental) cannot trace in the process at work" in str(answer)


def test_only_the_processes_that_were_asked_answer(home: LocalStorage) -> None:
    profiler = Profiler()
    answer = asked(home, lambda: profiler.look(home, ["b"]), at_work=False)
    assert "ended before it had traced a step" in str(answer)
    assert profiler.steps_left(1, home, EventRecorder()) == float("inf")
    assert list(home.files("")) == []


def test_request_that_cannot_be_read_is_none(home: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write("profile.json", b"{")
    profiler = Profiler()
    profiler.look(home, ["a"])

    def read(_home: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(profiling, "_read", read)
    profiler.look(home, ["a"])
    assert profiler.steps_left(1, home, EventRecorder()) == float("inf")


def test_second_request_waits_for_the_first(home: LocalStorage) -> None:
    first = ProfileRequest(id="1", steps=3, attempts=("a",))
    home.write("profile.json", first.to_json())
    with pytest.raises(InvalidInput, match="a trace of 3 steps is asked for already"):
        ask_for_trace(home, 3, ["a"], is_at_work=lambda: True)
    home.write("profile.json", first.model_copy(update={"attempts": ("gone",)}).to_json())
    answer = asked(home, training(Profiler(), home, EventRecorder()))
    assert isinstance(answer, ProfileRequest)
