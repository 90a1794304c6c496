"""A damaged tip is taken out of use, and nothing can be committed on top of it."""

from collections.abc import Callable

import pytest

from baton.tasks.foundation.checkpoint.retention import quarantine_damaged_tips
from baton.tasks.foundation.checkpoint.verify import verify_checkpoint
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Quarantine
from baton.tasks.foundation.errors import DamagedCheckpoint, NothingToRestore, StaleWriter, StorageError
from baton.tasks.foundation.log.appends import commit, quarantine
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.telemetry.events import Note, Silent
from tests.support.counting_storage import Counting
from tests.support.event_recorder import EventRecorder
from tests.support.small_logs import assert_sound, begin, committing, folders, head_of, stage, train


def tip_of(log: RunLog) -> CheckpointRef:
    tip = head_of(log).tip
    assert tip is not None
    return tip


def flip(store: Storage, path: str) -> None:
    data = bytearray(store.read(path))
    data[len(data) // 2] ^= 1
    store.write(path, bytes(data))


DAMAGE: dict[str, tuple[Callable[[Storage, str], None], str]] = {
    "byte flipped": (lambda store, path: flip(store, f"{path}/ckpt.data"), "ckpt.data has"),
    "cut short": (lambda store, path: store.write(f"{path}/ckpt.data", b"st"), "ckpt.data has 2 bytes"),
    "file gone": (lambda store, path: store.delete(f"{path}/ckpt.data"), "ckpt.data is missing"),
    "manifest flipped": (lambda store, path: flip(store, f"{path}/manifest.json"), "manifest.json has sha256"),
    "manifest gone": (lambda store, path: store.delete(f"{path}/manifest.json"), "manifest.json is missing"),
    "all gone": (lambda store, path: store.delete(path), "manifest.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_tip_is_quarantined(store: Storage, damage: str) -> None:
    log = begin(store)
    train(log, 10)
    train(log, 20)
    before, damaged = head_of(log), tip_of(log)
    do, words = DAMAGE[damage]
    do(store, damaged.path)
    with pytest.raises(DamagedCheckpoint, match=words):
        verify_checkpoint(store, damaged)
    recorder = EventRecorder()
    head = quarantine_damaged_tips(log, attempt="b", telemetry=recorder)
    assert head is not None
    assert head.tip is not None
    assert head.tip.step == 10
    assert head.base == before.number + 1
    assert [gone.step for gone in head.quarantined] == [20]
    [note] = recorder.events
    assert isinstance(note, Note)
    assert note.warning
    assert damaged.path in note.text
    assert words in note.text
    assert isinstance(assert_quarantined(log).body, Quarantine)
    assert quarantine_damaged_tips(log, attempt="b", telemetry=Silent()) == head


def assert_quarantined(log: RunLog):  # type: ignore[no-untyped-def] # noqa: ANN201 - an entry
    return log.entry(head_of(log).number)


def test_several_damaged_tips_are_quarantined(store: Storage) -> None:
    log = begin(store)
    for step in (10, 20, 30):
        train(log, step)
    for kept in head_of(log).retained[2:]:
        flip(store, f"{kept.path}/ckpt.data")
    head = quarantine_damaged_tips(log, attempt="b", telemetry=Silent())
    assert head is not None
    assert head.tip is not None
    assert head.tip.step == 10
    assert_sound(store)


def test_only_damaged_checkpoints_are_refused_beyond_step_0(store: Storage) -> None:
    log = begin(store)
    flip(store, f"{tip_of(log).path}/ckpt.data")
    head = quarantine_damaged_tips(log, attempt="b", telemetry=Silent())
    assert head is not None
    assert head.tip is None  # step 0 can be made again
    train(log, 0, attempt="b")
    train(log, 10, attempt="b")
    before = {path: store.read(path) for path in store.files("")}
    for kept in head_of(log).retained:
        store.delete(kept.path)
    with pytest.raises(NothingToRestore, match="Restore their files from a backup") as caught:
        quarantine_damaged_tips(log, attempt="c", telemetry=Silent())
    assert caught.value.exit_code == 4
    assert "checkpoints/00000010" in str(caught.value)
    for path, data in before.items():
        store.write(path, data)  # restored from a backup, as the message says
    head = quarantine_damaged_tips(log, attempt="c", telemetry=Silent())
    assert head is not None
    assert head.tip is not None
    assert head.tip.step == 10


@pytest.mark.parametrize("verb", ["read", "stat"])
def test_errors_of_the_store_quarantine_nothing(store: Storage, verb: str) -> None:
    log = begin(store)
    train(log, 10)
    before = head_of(log)
    refusing = Counting(store)
    refusing.fails = lambda _, called: (
        (StorageError("permission denied"), False) if called == verb and refusing.calls["exists"] else None
    )
    with pytest.raises(StorageError, match="permission denied"):
        quarantine_damaged_tips(RunLog(refusing), attempt="b", telemetry=Silent())
    assert head_of(log) == before


def test_an_old_tip_is_not_quarantined(store: Storage) -> None:
    log = begin(store)
    train(log, 10)
    old = tip_of(log)
    train(log, 20)
    before = head_of(log)
    quarantine(log, old, "damaged", attempt="b")
    assert head_of(log) == before


def test_a_writer_on_a_quarantined_base_cannot_commit(store: Storage) -> None:
    log = begin(store)
    train(log, 10)
    zombie = stage(store, 20, head_of(log).base, "zombie")
    quarantine(log, tip_of(log), "damaged", attempt="b")
    with pytest.raises(StaleWriter, match="quarantine, attempt b"):
        commit(log, committing(zombie))
    # A writer from before the commit cannot either, although the tip is again the one it started from.
    older = stage(store, 10, 1, "older")
    assert tip_of(log).step == 0
    with pytest.raises(StaleWriter):
        commit(log, committing(older))
    train(log, 10, attempt="b")
    assert_sound(store)
    assert {zombie.path, older.path} <= folders(store)
