"""A run keeps what it has restored, and with `checkpoint.verify: background` reads the others again meanwhile."""

import threading
from pathlib import Path

import pytest

from tasks.foundation.contracts.checkpoint import WholeRead
from tasks.foundation.contracts.log_entry import Commit, Evaluation, Quarantine, Retire
from tasks.foundation.state.warm_state import PROCESS_STATE
from tasks.foundation.telemetry.events import Event, Note, Training
from tasks.train_segment.stage import forget_trainer
from tests.support.fake_run import flip_a_byte
from tests.support.homes import commits_in, damaged, entries_of, folders_of, head_of
from tests.support.lab import Lab
from tests.support.watched_relay import LONGEST_SECONDS, HeldSave, InLine, command, home_of, run_of

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.relay.leaves_time", lambda _: False)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("second-look"))


def steps_retained(home: Path) -> list[int]:
    head = head_of(home)
    return [] if head is None else [ref.step for ref in head.retained]


class UntilFound:
    """Holds the training, once it goes on, until damage is found."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._found = threading.Event()

    def emit(self, event: Event) -> None:
        if isinstance(event, Note) and "is damaged" in event.text:
            assert event.warning
            self.notes.append(event.text)
            self._found.set()
        if isinstance(event, Training):
            assert self._found.wait(LONGEST_SECONDS), "no damage was found"


def test_flipped_byte_is_found_and_the_run_goes_on(lab: Lab) -> None:
    straight = run_of("straight", checkpoint__keep_last=9)
    wanted = command(lab, straight)
    spec = run_of("looked-at", checkpoint__keep_last=9, checkpoint__verify="background")
    home = home_of(lab, spec)
    command(lab, spec, until_step=6)
    [old] = [ref for ref in commits_in(entries_of(home)) if ref.step == 3]
    [data] = (home / old.path).glob("*.data-*")
    flip_a_byte(data)
    until = UntilFound()
    held = HeldSave(99)
    held.after.append(until)
    result = command(lab, spec, held=held)
    assert result.state_digest == wanted.state_digest
    [note] = until.notes
    assert f"checkpoint {old.path} is damaged and quarantined: " in note
    entries = entries_of(home)
    [found] = [entry.body for entry in entries if isinstance(entry.body, Quarantine)]
    assert (found.path, found.reason in note) == (old.path, True)
    assert steps_retained(home) == [0, 6, 9, 12]
    assert damaged(home) == set()
    said = {read.path for entry in entries if isinstance(entry.body, Commit) for read in entry.body.read_whole}
    assert {ref.step for ref in commits_in(entries) if ref.path in said} >= {6}, "the restored one"
    assert old.path not in said


class UntilSaid:
    """Holds the training, once it goes on, until an entry other than a commit says what was read."""

    def __init__(self, home: Path) -> None:
        self.said: list[WholeRead] = []
        self._home = home

    def emit(self, event: Event) -> None:
        waiting = threading.Event()
        for _ in range(int(LONGEST_SECONDS / 0.05) if isinstance(event, Training) and not self.said else 0):
            bodies = [entry.body for entry in entries_of(self._home)]
            self.said = [read for body in bodies if isinstance(body, Retire) for read in body.read_whole]
            if self.said:
                return
            waiting.wait(0.05)


def test_where_others_commit_an_entry_of_its_own_says_it(lab: Lab) -> None:
    spec = run_of("committed-elsewhere", checkpoint__keep_last=9, checkpoint__verify="background")
    home = home_of(lab, spec)
    held = HeldSave(99)
    command(lab, run_of("committed-elsewhere", checkpoint__keep_last=9), until_step=3)
    until = UntilSaid(home)
    held.after.append(until)
    command(lab, spec, held=held, runner=InLine(), until_step=6)
    read = {read.path for read in until.said}
    assert {ref.step for ref in commits_in(entries_of(home)) if ref.path in read} == {0, 3}


def test_restored_checkpoint_stays_until_the_next_start(lab: Lab) -> None:
    spec = run_of("restored", checkpoint__keep_last=1)
    home = home_of(lab, spec)
    command(lab, spec, until_step=6)
    assert steps_retained(home) == [6], "nothing was restored"
    command(lab, spec)  # two segments; the second one begins in memory
    assert steps_retained(home) == [6, 12]
    command(lab, run_of("restored", checkpoint__keep_last=1, train__steps=18))
    assert steps_retained(home) == [12, 18]
    head = head_of(home)
    assert head is not None
    assert {ref.path for ref in head.retained} <= folders_of(home)
    assert [read.path for read in head.read_whole] == [head.retained[0].path]


def test_other_processes_say_what_they_have_read(lab: Lab) -> None:
    """Each call of a stage here has a log of its own, as in a process of its own."""
    spec = run_of("elsewhere")
    head = lab.relay(spec, 3, 6, cold=True)
    assert head.tip is not None
    commits = [entry.body for entry in entries_of(home_of(lab, spec)) if isinstance(entry.body, Commit)]
    said = [[read.path for read in body.read_whole] for body in commits]
    assert said == [[], [commits[0].checkpoint.path], [commits[1].checkpoint.path]]
    forget_trainer()
    PROCESS_STATE.forget()
    lab.evaluate(spec, head.tip)
    evaluation = entries_of(home_of(lab, spec))[-1]
    assert isinstance(evaluation.body, Evaluation)
    assert [read.path for read in evaluation.body.read_whole] == [head.tip.path]
    assert [read.path for read in evaluation.head.read_whole] == [commits[1].checkpoint.path, head.tip.path]
