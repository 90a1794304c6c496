"""A checkpoint that cannot be deleted is reported once and stays retired; later deletions retry."""

import logging
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from baton.tasks.foundation.checkpoint.retention import KeepLast, apply_retention
from baton.tasks.foundation.errors import StoreRefused, StoreUnreachable
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import discard
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.small_logs import assert_sound, begin, folders, head_of, stage, train


class StoreWithHolds(MemoryStorage):
    """A store that refuses to delete some folders, like objects under a hold."""

    def __init__(self) -> None:
        super().__init__(f"held-{uuid.uuid4().hex}")
        self.held: set[str] = set()
        self.tries: list[str] = []
        self.fault: Exception = StoreRefused("403: the object is under active Temporary hold\nhint: release it")

    def delete(self, folder: str, *, files: Sequence[str] | None = None) -> None:
        self.tries.append(folder)
        if folder in self.held:
            raise self.fault
        super().delete(folder, files=files)


@pytest.fixture
def held() -> Iterator[StoreWithHolds]:
    store = StoreWithHolds()
    yield store
    store.held.clear()
    store.delete("")


def train_on(log: RunLog, *steps: int) -> None:
    for step in steps:
        train(log, step)
        apply_retention(log, [KeepLast(1)], attempt="keeper")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_checkpoint_under_an_object_hold_stays_retired(
    held: StoreWithHolds, caplog: pytest.LogCaptureFixture
) -> None:
    log = begin(held)
    first = head_of(log).retained[0].path
    held.held.add(first)
    tried = []
    for commit in range(1, 25):
        train_on(log, commit * 10)
        tried += [commit] * held.tries.count(first)
        held.tries.clear()
        assert first in {old.path for old in head_of(log).retired}
    # Two commits after it was retired, and then at growing intervals.
    assert tried == [3, 4, 6, 10, 18]
    [warning] = warnings_of(caplog)
    assert f"{held.uri}/{first}: cannot delete, will retry later: 403:" in warning
    assert warning.endswith("active Temporary hold\nhint: release it")
    assert len(folders(held)) == 4, "the others are deleted in time"
    held.held.clear()
    for commit in range(25, 36):
        train_on(log, commit * 10)
    assert first not in {old.path for old in head_of(log).retired}
    assert first not in folders(held)
    assert_sound(held)


def test_only_the_link_to_a_checkpoint_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = begin(LocalStorage(tmp_path / "home"))
    path = head_of(log).retained[0].path
    folder, target = tmp_path / "home" / path, tmp_path / "big disk"
    folder.rename(target)
    files = sorted(target.iterdir())
    folder.symlink_to(target)
    train_on(log, 10, 20, 30, 40)
    assert not folder.is_symlink()
    assert path not in {old.path for old in head_of(log).retired}
    assert sorted(target.iterdir()) == files
    assert warnings_of(caplog) == []
    assert_sound(log.home)


def test_undeletable_garbage_does_not_stop_the_run(held: StoreWithHolds, caplog: pytest.LogCaptureFixture) -> None:
    log = begin(held)
    garbage = stage(held, 10, head_of(log).base, "lost")
    held.held.add(garbage.path)
    train_on(log, 10, 20, 30, 40)
    assert held.tries.count(garbage.path) == 3
    assert len(warnings_of(caplog)) == 1
    held.held.clear()
    train_on(log, 50, 60, 70, 80)
    assert garbage.path not in folders(held)


def test_an_outage_while_stopping_is_not_a_refusal(held: StoreWithHolds) -> None:
    held.write("a", b"x")
    held.held.add("a")
    held.fault = StoreUnreachable("the store is away")
    with pytest.raises(StoreUnreachable):
        discard(held, "a")
