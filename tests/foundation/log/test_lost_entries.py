"""A log with lost entries, or on a lost disk, is refused before anything is written."""

from pathlib import Path

import pytest

from baton.tasks.foundation.contracts.log_entry import Retire
from baton.tasks.foundation.errors import RunLogError, StorageError
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.small_logs import assert_sound, begin, head_of, origin, train


def ten(store: Storage) -> RunLog:
    log = begin(store)
    for step in range(10, 90, 10):
        train(log, step)
    return log


def files(store: Storage) -> dict[str, bytes]:
    return {path: store.read(path) for path in store.files("")}


@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize("number", [0, 1, 3, 7, 8])
def test_lost_entry_is_named_before_writing(store: Storage, number: int, hint: bool) -> None:
    log = ten(store)
    lost = f"log/{number:08d}.json"
    data = store.read(lost)
    store.delete(lost)
    if not hint:
        store.delete("log/HINT")
    before = files(store)
    for ask in (log.require_whole, lambda: list(log.entries())):
        with pytest.raises(RunLogError, match=rf"{lost} is missing: .* restore it from a backup"):
            ask()
    assert files(store) == before
    store.write(lost, data)
    log.require_whole()
    train(log, 90)
    assert_sound(store)


@pytest.mark.parametrize("kept", [range(1, 10), range(0)], ids=["first lost", "all lost"])
def test_log_without_origin_gets_no_new_one(store: Storage, kept: range) -> None:
    ten(store)
    for path in list(store.files("log")):
        if path not in {f"log/{number:08d}.json" for number in kept}:
            store.delete(path)
    before = files(store)
    with pytest.raises(RunLogError, match="from a backup"):
        RunLog(store).append(lambda head: origin() if head is None else None, attempt="b")
    assert files(store) == before


def test_run_starts_in_empty_home_or_beside_foreign_files(store: Storage) -> None:
    store.write("notes.txt", b"mine")
    store.write("log/notes.txt", b"mine")
    store.write("attempts/a.json", b"{}")
    RunLog(store).require_whole()
    begin(store)
    store.delete("log/notes.txt")
    assert_sound(store)


def test_overtaken_start_is_not_a_lost_log(store: Storage) -> None:
    """The process sees first no run and then checkpoints, because another process starts the run in between."""
    log = RunLog(store)

    def decide(head: object) -> object:
        if head is None:
            begin(store)
            return origin()
        return None

    assert log.append(decide, attempt="slow") is None  # type: ignore[arg-type]
    assert_sound(store)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (9, r"stop all processes of this run and move log/00000009\.json out of .*/log: only this entry is lost"),
        (3, r"\nhint: without a backup, start a run of another name with init\.weights: "),
        (0, r"\nhint: without a backup, start a run of another name with init\.weights: "),
    ],
)
def test_unreadable_entry_has_a_remedy(store: Storage, number: int, remedy: str) -> None:
    ten(store)
    log = RunLog(store)
    path = f"log/{number:08d}.json"
    store.write(path, store.read(path)[:100])
    with pytest.raises(RunLogError, match=rf"{path} is damaged: .*\nhint: restore the file from a backup"):
        log.entry(number)
    with pytest.raises(RunLogError, match=remedy):
        log.entry(number)


def test_moving_the_newest_entry_away_loses_only_it(store: Storage) -> None:
    log = ten(store)
    before = log.entry(8).head
    store.delete("log/00000009.json")
    log = RunLog(store)  # all processes of the run were stopped
    assert log.head() == before
    train(log, 80, attempt="again")
    assert head_of(log).number == 9
    assert_sound(store)


def test_vanished_home_is_not_recreated(tmp_path: Path) -> None:
    root = tmp_path / "disk" / "home"
    store = LocalStorage(tmp_path / "disk").at("home")
    log = begin(store)
    (tmp_path / "disk").rename(tmp_path / "away")
    for ask in (
        log.head,
        log.require_whole,
        lambda: train(log, 10),
        lambda: store.write("attempts/a.json", b"{}"),
        lambda: store.create("log/00000002.json", b"{}"),
        lambda: log.append(lambda head: origin() if head is None else None, attempt="b"),
    ):
        with pytest.raises(StorageError, match=rf"{root} existed before and is gone; check whether it was moved"):
            ask()
        assert not (tmp_path / "disk").exists()
    (tmp_path / "away").rename(tmp_path / "disk")
    train(log, 10)
    assert_sound(store)


def test_log_lost_meanwhile_gets_no_entry(store: Storage) -> None:
    log = ten(store)
    store.delete("log")
    with pytest.raises(
        (RunLogError, StorageError), match=r"the log has disappeared|restore log/ from a backup|is gone"
    ):
        log.append(lambda _: Retire(paths=(), deleted=()), attempt="a")
    assert list(store.files("log")) == []


def test_unmounted_disk_is_noticed_by_a_warm_log(tmp_path: Path) -> None:
    log = begin(LocalStorage(tmp_path / "home"))
    (tmp_path / "home" / "log").rename(tmp_path / "away")
    with pytest.raises(RunLogError, match="the log has disappeared; check that its disk is still mounted"):
        log.require_head()
    (tmp_path / "away").rename(tmp_path / "home" / "log")
    assert head_of(log).number == 1


def test_disk_lost_before_append_gets_no_entry(tmp_path: Path) -> None:
    """An unmounted disk leaves an empty folder, the mount point."""
    root = tmp_path / "home"
    log = begin(LocalStorage(root))

    def unmounted_meanwhile(_head: object) -> Retire:
        root.rename(tmp_path / "away")
        root.mkdir()
        return Retire(paths=(), deleted=())

    with pytest.raises(RunLogError, match=rf"{root}: the log has disappeared; check that its disk is still mounted"):
        log.append(unmounted_meanwhile, attempt="a")
    assert list(root.iterdir()) == []


def test_deleted_home_can_be_recreated(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    home = storage.at("home")
    begin(home)
    storage.delete("home")
    begin(home)
    assert_sound(home)
