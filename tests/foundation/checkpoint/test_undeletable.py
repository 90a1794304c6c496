"""What cannot be deleted is said once, stays on the list, and is tried again; the run goes on."""

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.foundation.checkpoint.retention import KeepLast, clear_away
from tasks.foundation.errors import StoreRefused, StoreUnreachable
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.best_effort_delete import discard
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.memory import MemoryStorage
from tests.support.small_logs import assert_sound, begin, folders, head_of, stage, train


class Held(MemoryStorage):
    """A store that will not delete some folders, as under a hold."""

    def __init__(self) -> None:
        super().__init__(f"held-{uuid.uuid4().hex}")
        self.held: set[str] = set()
        self.tries: list[str] = []
        self.fault: Exception = StoreRefused("403: the object is under active Temporary hold\nhint: release it")

    def delete(self, folder: str) -> None:
        self.tries.append(folder)
        if folder in self.held:
            raise self.fault
        super().delete(folder)


@pytest.fixture
def held() -> Iterator[Held]:
    store = Held()
    yield store
    store.held.clear()
    store.delete("")


def goes_on(log: RunLog, *steps: int) -> None:
    for step in steps:
        train(log, step)
        clear_away(log, [KeepLast(1)], attempt="keeper")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_checkpoint_under_a_hold_stays_retired_while_the_run_goes_on(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    log = begin(held)
    first = head_of(log).retained[0].path
    held.held.add(first)
    tried = []
    for commit in range(1, 25):
        goes_on(log, commit * 10)
        tried += [commit] * held.tries.count(first)
        held.tries.clear()
        assert first in {old.path for old in head_of(log).retired}
    # Two commits after it was retired, and from then on ever more rarely.
    assert tried == [3, 4, 6, 10, 18]
    [told] = warnings_of(caplog)
    assert f"{held.uri}/{first} is no longer needed and cannot be deleted, which is tried again later: 403:" in told
    assert told.endswith("active Temporary hold\nhint: release it")
    assert len(folders(held)) == 4, "the others are deleted in time"
    held.held.clear()
    for commit in range(25, 36):
        goes_on(log, commit * 10)
    assert first not in {old.path for old in head_of(log).retired}
    assert first not in folders(held)
    assert_sound(held)


def test_of_a_link_in_the_place_of_a_checkpoint_only_the_link_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = begin(LocalStorage(tmp_path / "home"))
    path = head_of(log).retained[0].path
    folder, elsewhere = tmp_path / "home" / path, tmp_path / "big disk"
    folder.rename(elsewhere)
    files = sorted(elsewhere.iterdir())
    folder.symlink_to(elsewhere)
    goes_on(log, 10, 20, 30, 40)
    assert not folder.is_symlink()
    assert path not in {old.path for old in head_of(log).retired}
    assert sorted(elsewhere.iterdir()) == files
    assert warnings_of(caplog) == []
    assert_sound(log.home)


def test_garbage_that_cannot_be_deleted_ends_no_run(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    log = begin(held)
    garbage = stage(held, 10, head_of(log).base, "lost")
    held.held.add(garbage.path)
    goes_on(log, 10, 20, 30, 40)
    assert held.tries.count(garbage.path) == 3
    assert len(warnings_of(caplog)) == 1
    held.held.clear()
    goes_on(log, 50, 60, 70, 80)
    assert garbage.path not in folders(held)


def test_who_was_asked_to_go_does_not_take_an_outage_for_a_refusal(held: Held) -> None:
    held.write("a", b"x")
    held.held.add("a")
    held.fault = StoreUnreachable("the store is away")
    with pytest.raises(StoreUnreachable):
        discard(held, "a")
