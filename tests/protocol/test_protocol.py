"""The model of the protocol is sound, each broken rule is found, and real logs follow it."""

import os
from pathlib import Path

import pytest

from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Retire
from baton.tasks.foundation.log.appends import quarantine, quarantine_older
from tests.protocol.model_checker import accept, check, missing_programs
from tests.support.engine import REQUIRED
from tests.support.fake_run import FakeRun
from tests.support.homes import entries_of

pytestmark = pytest.mark.slow

# Bounds that the suite explores; `python -m tests.protocol` explores larger ones.
SPACES = {
    "commits": {"WRITERS": 2, "CHECKPOINTS": 3, "ENTRIES": 8},
    "rewinds": {"WRITERS": 2, "CHECKPOINTS": 3, "ENTRIES": 7, "REWINDS": 1},
    "damage": {"WRITERS": 2, "CHECKPOINTS": 3, "ENTRIES": 7, "DAMAGES": 1},
    "forks": {"WRITERS": 2, "CHECKPOINTS": 3, "ENTRIES": 7, "FORK": 1},
}
BOUNDS = {"WRITERS": 2, "CHECKPOINTS": 4, "ENTRIES": 9}
# Broken rule -> what must happen besides commits for it to do harm.
MUTATIONS: dict[str, dict[str, int]] = {
    "OVERWRITE": {},
    "NO_BASE_CHECK": {},
    "LOST_ANSWER": {},
    "DELETE_AT_ONCE": {},
    "DELETE_BEFORE_LOG": {},
    "SWEEP_HEAD_FIRST": {},
    "SWEEP_ANY_BASE": {},
    "SHARED_BY_NAME": {},
    "RETIRE_READ": {},
    "REWIND_KEEPS_BASE": {"REWINDS": 1},
    "LINK_UNREAD": {"DAMAGES": 1},
    "QUARANTINE_ANY": {"DAMAGES": 1},
    "RESTORE_UNREAD": {"DAMAGES": 1},
    "FORK_MANIFEST_FIRST": {"FORK": 1},
}


@pytest.fixture(autouse=True)
def _programs() -> None:
    missing = missing_programs()
    if missing and os.environ.get(REQUIRED) == "required":
        pytest.fail(f"{REQUIRED}=required, and {', '.join(missing)} is not installed")
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")


@pytest.mark.parametrize("space", SPACES)
def test_whole_space_is_sound(space: str) -> None:
    found = check(SPACES[space])
    assert found.fault == ""
    assert found.states > 10_000


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_broken_rule_is_found(mutation: str) -> None:
    assert "assertion violated" in check({**BOUNDS, **MUTATIONS[mutation]}, mutation=mutation).fault


@pytest.fixture
def entries(tmp_path: Path) -> list[Entry]:
    """A log with retirements."""
    run = FakeRun(tmp_path)
    for step in (10, 20, 30, 40):
        run.commit(step)
        run.retire(keep_last=1)
    return entries_of(Path(run.address))


def test_quarantine_of_an_older_checkpoint_is_accepted(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(10, 20)
    assert quarantine_older(run.log, run.head.retained[-2], "flipped", attempt="doctor")
    run.train(30)
    run.retire(keep_last=1)
    quarantine(run.log, run.tip, "flipped", attempt="doctor")
    assert accept(entries_of(Path(run.address))).fault == ""


def test_log_that_breaks_a_rule_is_not_accepted(entries: list[Entry]) -> None:
    assert accept(entries).fault == ""
    last = max(number for number, entry in enumerate(entries) if isinstance(entry.body, Commit))
    body = entries[last].body
    assert isinstance(body, Commit)
    stale = body.model_copy(update={"checkpoint": body.checkpoint.model_copy(update={"base": 0})})
    wrong = [*entries[:last], entries[last].model_copy(update={"body": stale}), *entries[last + 1 :]]
    assert "assertion violated" in accept(wrong).fault
    tip = entries[-1].head.tip
    assert tip is not None
    retired = entries[-1].model_copy(update={"body": Retire(paths=(tip.path,), deleted=())})
    assert "assertion violated" in accept([*entries, retired]).fault
