"""A process that hangs ends itself with exit code 3, whatever else hangs; one that was only stopped does not."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.tasks.foundation.contracts.attempt import AttemptRecord
from baton.tasks.foundation.contracts.run_spec import StopSpec
from baton.tasks.foundation.log.attempts import read_attempts
from baton.tasks.foundation.machine.hang import HangWatch, stacks_of_all_threads
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Hung, Phase, Training
from tests.support import forked, hanging_process
from tests.support.clock import FakeClock
from tests.support.event_recorder import EventRecorder
from tests.support.ledger_records import ledger_of

LONGEST_SECONDS = 120


BLOCKS = "blocks"
SILENT = "blocks with a store and a log that never answer"
LANDS = "blocks while a save lands"
HANGS = "blocks while a save hangs"


@dataclass(frozen=True)
class Hanging:
    """A process that hangs, and its home."""

    process: subprocess.Popen[str]
    home: Path


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Hanging]]:
    """One process for each way to hang. They start together, because they mostly wait."""
    started = {}
    for how in (SILENT, LANDS, HANGS, BLOCKS):  # the last one must be stopped while it trains
        home = tmp_path_factory.mktemp("home")
        command = [sys.executable, hanging_process.__file__, str(home), how]
        process = forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started[how] = Hanging(process, home)
    yield started
    for each in started.values():
        each.process.kill()
        each.process.communicate()


def record_in(home: Path) -> AttemptRecord:
    (record,) = read_attempts(LocalStorage(home)).records
    return record


@pytest.mark.slow
def test_stopped_process_goes_on_and_a_blocked_one_leaves(hanging: dict[str, Hanging]) -> None:
    process, home = hanging[BLOCKS].process, hanging[BLOCKS].home
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(3 * hanging_process.HANG_SECONDS)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 3
    assert out.splitlines()[-1] == "40"
    record = record_in(home)
    assert (record.ended, record.doing, record.step) == ("hung", "train", 40)
    assert record.message is not None
    assert record.message.startswith("no inner loop has ended for ")
    assert record.traceback is not None
    assert "in _block" in record.traceback
    assert record.traceback in err


@pytest.mark.slow
def test_store_and_log_that_hang_too_do_not_hold_the_process(hanging: dict[str, Hanging]) -> None:
    process, home = hanging[SILENT].process, hanging[SILENT].home
    _, err = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 3
    assert "no inner loop has ended for " in err
    assert record_in(home).ended is None  # it could not be written


@pytest.mark.slow
def test_save_in_flight_lands_before_a_hung_process_leaves(hanging: dict[str, Hanging]) -> None:
    process, home = hanging[LANDS].process, hanging[LANDS].home
    process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 3
    record = record_in(home)
    assert (record.ended, record.committed_step) == ("hung", 40)


@pytest.mark.slow
def test_save_that_hangs_is_not_waited_for_again(hanging: dict[str, Hanging]) -> None:
    process, home = hanging[HANGS].process, hanging[HANGS].home
    _, err = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 3
    assert "commit has not ended for " in err
    assert record_in(home).committed_step == 0


_NAMES = ("baton-work", "MainThread", "pool-1")


def test_stacks_name_the_threads_and_show_the_work_first() -> None:
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, name=name, daemon=True) for name in ("baton-work", "pool-1")]
    for thread in threads:
        thread.start()
    stacks = stacks_of_all_threads().split("\n\n")
    done.set()
    heads = [stack.partition("\n")[0] for stack in stacks]
    of_ours = {name: [f" {name} (most recent call first):" in head for head in heads] for name in _NAMES}
    assert all(any(found) for found in of_ours.values()), heads
    # Tests before this one may have left threads of the same names.
    last_telling = max(index for name in _NAMES[:2] for index, found in enumerate(of_ours[name]) if found)
    assert last_telling < of_ours["pool-1"].index(True)
    assert any("in wait" in stack for stack, found in zip(stacks, of_ours["baton-work"], strict=True) if found)


@pytest.mark.parametrize(("hang_seconds", "whole_process"), [(None, True), (0.1, False)])
def test_watch_that_is_off_ends_nothing(hang_seconds: float | None, whole_process: bool) -> None:
    sink, left = EventRecorder(), list[int]()
    spec = StopSpec(hang_seconds=hang_seconds)
    ledger = ledger_of(FakeClock())
    before = threading.active_count()
    with HangWatch(spec, ledger=ledger, telemetry=sink, whole_process=whole_process, leave=left.append) as watch:
        watch.emit(Phase(cause="train"))
        assert threading.active_count() == before
    assert not left


def test_hang_is_told_to_the_sinks_in_their_context() -> None:
    sink, left, ended = EventRecorder(), list[int](), threading.Event()

    def leave(code: int) -> None:
        left.append(code)
        ended.set()

    with HangWatch(StopSpec(hang_seconds=0.1), ledger=ledger_of(FakeClock()), telemetry=sink, leave=leave) as watch:
        watch.emit(Phase(cause="train"))
        watch.emit(Training(step=7, target=9, examples_per_second=1.0))
        assert ended.wait(LONGEST_SECONDS)
    assert left == [3]
    (hung,) = [event for event in sink.events if isinstance(event, Hung)]
    assert "after step 7" in hung.message
    assert Path(__file__).name in hung.stacks
