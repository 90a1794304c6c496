"""Damage is found by two reads, taken out of use, and what was built on it cannot come back."""

from collections.abc import Callable

import pytest

from tasks.foundation.checkpoint.verify import check, damage
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Quarantine
from tasks.foundation.errors import DamagedCheckpoint, FileMissing, NothingToRestore, StaleWriter, StorageError
from tasks.foundation.runlog.commits import commit, quarantine, sound_tip
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Event, Note, Silent
from tests.support.counting_storage import Counting
from tests.support.small_logs import assert_sound, begin, committing, folders, head_of, stage, train


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def tip_of(log: RunLog) -> CheckpointRef:
    tip = head_of(log).tip
    assert tip is not None
    return tip


def flip(store: Storage, path: str) -> None:
    data = bytearray(store.read(path))
    data[len(data) // 2] ^= 1
    store.write(path, bytes(data))


HARM: dict[str, tuple[Callable[[Storage, str], None], str]] = {
    "byte flipped": (lambda store, path: flip(store, f"{path}/ckpt.data"), "ckpt.data has"),
    "cut short": (lambda store, path: store.write(f"{path}/ckpt.data", b"st"), "ckpt.data has 2 bytes"),
    "file gone": (lambda store, path: store.delete(f"{path}/ckpt.data"), "ckpt.data is missing"),
    "manifest flipped": (lambda store, path: flip(store, f"{path}/manifest.json"), "manifest.json has sha256"),
    "manifest gone": (lambda store, path: store.delete(f"{path}/manifest.json"), "manifest.json is missing"),
    "all gone": (lambda store, path: store.delete(path), "manifest.json is missing"),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_tip_is_quarantined_and_the_one_before_is_the_tip(store: Storage, harm: str) -> None:
    log = begin(store)
    train(log, 10)
    train(log, 20)
    before, damaged = head_of(log), tip_of(log)
    do, words = HARM[harm]
    do(store, damaged.path)
    with pytest.raises(DamagedCheckpoint, match=words):
        check(store, damaged)
    heard = Heard()
    head = sound_tip(log, attempt="b", telemetry=heard)
    assert head is not None
    assert head.tip is not None
    assert head.tip.step == 10
    assert head.base == before.number + 1
    assert [gone.step for gone in head.quarantined] == [20]
    [note] = heard.events
    assert isinstance(note, Note)
    assert note.warning
    assert damaged.path in note.text
    assert words in note.text
    assert isinstance(assert_quarantined(log).body, Quarantine)
    assert sound_tip(log, attempt="b", telemetry=Silent()) == head


def assert_quarantined(log: RunLog):  # type: ignore[no-untyped-def] # noqa: ANN201 - an entry
    return log.entry(head_of(log).number)


def test_several_damaged_ones_are_passed_over(store: Storage) -> None:
    log = begin(store)
    for step in (10, 20, 30):
        train(log, step)
    for kept in head_of(log).retained[2:]:
        flip(store, f"{kept.path}/ckpt.data")
    head = sound_tip(log, attempt="b", telemetry=Silent())
    assert head is not None
    assert head.tip is not None
    assert head.tip.step == 10
    assert_sound(store)


def test_nothing_to_restore_is_said_and_a_damaged_start_is_begun_anew(store: Storage) -> None:
    log = begin(store)
    flip(store, f"{tip_of(log).path}/ckpt.data")
    head = sound_tip(log, attempt="b", telemetry=Silent())
    assert head is not None
    assert head.tip is None  # step 0 can be made again
    train(log, 0, attempt="b")
    train(log, 10, attempt="b")
    before = {path: store.read(path) for path in store.files("")}
    for kept in head_of(log).retained:
        store.delete(kept.path)
    with pytest.raises(NothingToRestore, match="Restore their files from a backup") as told:
        sound_tip(log, attempt="c", telemetry=Silent())
    assert told.value.exit_code == 4
    assert not told.value.retryable
    assert "checkpoints/00000010" in str(told.value)
    for path, data in before.items():
        store.write(path, data)  # the backup that was asked for
    head = sound_tip(log, attempt="c", telemetry=Silent())
    assert head is not None
    assert head.tip is not None
    assert head.tip.step == 10


@pytest.mark.parametrize("first", [b"", None], ids=["other bytes", "not there"])
def test_one_bad_read_is_no_verdict(store: Storage, first: bytes | None) -> None:
    log = begin(store)
    flaky = Counting(store)
    answers = iter([first])

    class Once:
        def __getattr__(self, verb: str) -> object:
            return getattr(flaky, verb)

        def read(self, path: str) -> bytes:
            bad = next(answers, "none") if path.endswith("manifest.json") else "none"
            if bad is None:
                raise FileMissing(path)
            return flaky.read(path) if isinstance(bad, str) else bad

    assert damage(Once(), tip_of(log)) is None  # type: ignore[arg-type]
    assert next(answers, "used up") == "used up"


@pytest.mark.parametrize("verb", ["read", "stat"])
def test_a_store_that_refuses_quarantines_nothing(store: Storage, verb: str) -> None:
    log = begin(store)
    train(log, 10)
    before = head_of(log)
    refusing = Counting(store)
    refusing.fails = lambda _, called: (
        (StorageError("permission denied"), False) if called == verb and refusing.calls["exists"] else None
    )
    with pytest.raises(StorageError, match="permission denied"):
        sound_tip(RunLog(refusing), attempt="b", telemetry=Silent())
    assert head_of(log) == before


def test_a_quarantine_of_what_is_the_tip_no_longer_does_nothing(store: Storage) -> None:
    log = begin(store)
    train(log, 10)
    old = tip_of(log)
    train(log, 20)
    before = head_of(log)
    quarantine(log, old, "damaged", attempt="b")
    assert head_of(log) == before


def test_a_zombie_that_trained_on_the_damaged_one_cannot_commit(store: Storage) -> None:
    log = begin(store)
    train(log, 10)
    zombie = stage(store, 20, head_of(log).base, "zombie")
    quarantine(log, tip_of(log), "damaged", attempt="b")
    with pytest.raises(StaleWriter, match="quarantine, attempt b"):
        commit(log, committing(zombie))
    # Nor one from before the commit, though the tip is the one it started from again.
    elder = stage(store, 10, 1, "elder")
    assert tip_of(log).step == 0
    with pytest.raises(StaleWriter):
        commit(log, committing(elder))
    train(log, 10, attempt="b")
    assert_sound(store)
    assert {zombie.path, elder.path} <= folders(store)
