"""Old records of attempts in packs: none is lost, doubled or changed, whoever packs them and dies."""

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.tasks.foundation.contracts.attempt import attempt_path
from baton.tasks.foundation.log import attempts
from baton.tasks.foundation.log.attempts import AttemptReader, Attempts, pack, pack_beside, packable, read_attempts
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.counting_storage import Counting
from tests.support.crashing_store import CrashingStore, Died
from tests.support.far_storage import FarStorage
from tests.support.ledger_records import record_of

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_LEAST_RECORDS", 3)


def write(home: LocalStorage, number: int, *, days: float, **changed: Any) -> str:
    """Write the record of an attempt that was alive so many days ago."""
    alive = (NOW - timedelta(days=days)).isoformat()
    name = f"{number:032x}"
    record = record_of(name, **{"began": alive, "alive": alive, "ended": "complete", **changed})
    home.write(attempt_path(name), record.to_json())
    return attempt_path(name)


def pack_all(home: Any) -> list[str]:
    found = read_attempts(home)
    paths = packable(found.records, found.files, now=NOW)
    if paths:
        pack(home, paths)
    return paths


def same(found: Attempts, before: Attempts) -> None:
    assert found.records == before.records
    assert found.unreadable == before.unreadable


@settings(derandomize=True, max_examples=30)
@given(ages=st.lists(st.lists(st.floats(0, 4), max_size=6), min_size=1, max_size=4))
def test_packed_records_are_read_as_before(tmp_path_factory: pytest.TempPathFactory, ages: list[list[float]]) -> None:
    home, number = LocalStorage(tmp_path_factory.mktemp("packs")), 0
    for round_ages in ages:
        for age in round_ages:
            write(home, number := number + 1, days=age, ended=random.Random(number).choice([None, "complete"]))
        before = read_attempts(home)
        paths = pack_all(home)
        same(read_attempts(home), before)
        assert not set(paths) & set(read_attempts(home).files)
        assert len(paths) == 0 or len(paths) >= 3
        assert {attempt_path(each.attempt) for each in before.records if _alive(each) + timedelta(days=1) > NOW} <= set(
            read_attempts(home).files
        )


def _alive(record: Any) -> datetime:
    return datetime.fromisoformat(record.alive)


def test_packs_are_read_once(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    for number in range(40):
        write(home, number, days=2)
    pack_all(home)
    write(home, 40, days=0)
    counted = Counting(home)
    reader = AttemptReader(counted)
    assert len(reader.read().records) == 41
    assert counted.calls == {"files": 1, "read": 2}
    assert len(reader.read().records) == 41
    assert counted.calls["read"] == 2


def test_process_that_wakes_up_writes_its_own_record(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    for number in range(3):
        write(home, number, days=2, ended=None, step=5)
    pack_all(home)
    write(home, 1, days=0, ended=None, step=9)
    assert [record.step for record in read_attempts(home).records] == [5, 5, 9]
    assert read_attempts(home).files == (attempt_path(f"{1:032x}"),)


def test_death_at_any_call_loses_no_record(tmp_path: Path) -> None:
    dies_at, died = 0, True
    while died:
        home = LocalStorage(tmp_path / str(dies_at))
        for number in range(4):
            write(home, number, days=2)
        before = read_attempts(home)
        store: Any = CrashingStore(home, random.Random(dies_at), dies_at=dies_at, pauses_at=-1)
        try:
            pack_all(store)
            died = False
        except Died:
            same(read_attempts(home), before)
        pack_all(home)
        same(read_attempts(home), before)
        dies_at += 1
    assert dies_at > 9


def test_rivals_pack_the_same_records(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    paths = [write(home, number, days=2) for number in range(5)]
    before = read_attempts(home)
    pack(home, paths[:4])
    pack(home, paths)  # some are gone: it gives up
    same(read_attempts(home), before)
    for path, record in zip(paths[:4], before.records, strict=False):
        home.write(path, record.to_json())
    pack(home, paths[:4])  # the rival has written the same pack, and deleted nothing yet
    assert read_attempts(home).files == (paths[4],)
    pack(home, paths[4:])
    same(read_attempts(home), before)
    assert read_attempts(home).files == ()


def test_keys_of_a_newer_version_stay(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    paths = [write(home, number, days=2) for number in range(3)]
    newer = {**json.loads(home.read(paths[0])), "colour": "blue"}
    home.write(paths[0], json.dumps(newer).encode())
    pack_all(home)
    (packed,) = (tmp_path / "attempts" / "closed").iterdir()
    assert json.loads(packed.read_bytes())["records"][0] == json.dumps(newer)


def test_a_pack_has_no_more_records_than_its_readers_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = LocalStorage(tmp_path)
    for number in range(6):
        write(home, number, days=3, traceback='"' * 5000)
    before = read_attempts(home)
    monkeypatch.setattr(attempts, "most_bytes", lambda _: 2 * 3 * 12_000)
    assert len(pack_all(home)) == 6
    same(read_attempts(home), before)
    assert len(read_attempts(home).files) == 3


def test_damaged_pack_is_counted_as_unreadable(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    for number in range(3):
        write(home, number, days=2)
    pack_all(home)
    (packed,) = (tmp_path / "attempts" / "closed").iterdir()
    packed.write_bytes(packed.read_bytes().replace(b"complete", b"complexe", 1))
    assert (read_attempts(home).records, read_attempts(home).unreadable) == ((), 1)


def test_record_of_a_later_version_is_counted_as_unreadable(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    paths = [write(home, number, days=2) for number in range(3)]
    home.write(paths[1], json.dumps({**json.loads(home.read(paths[1])), "format": 2}).encode())
    before = read_attempts(home)
    assert (len(before.records), before.unreadable) == (2, 1)
    pack(home, paths)  # as that version does
    same(read_attempts(home), before)


def test_reader_sees_records_that_are_packed_meanwhile(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    paths = [write(home, number, days=2) for number in range(3)]
    before = read_attempts(home)
    far: Any = FarStorage(home)

    def rival(method: str, _path: str) -> None:
        if method == "read":
            far.before = lambda *_: None
            pack(home, paths)

    far.before = rival
    same(read_attempts(far), before)


def test_records_that_a_death_left_are_packed_once(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    paths = [write(home, number, days=2) for number in range(5)]
    left = home.read(paths[4])
    pack(home, paths)
    home.write(paths[4], left)
    pack(home, paths[4:])
    assert len(list((tmp_path / "attempts" / "closed").iterdir())) == 1
    assert read_attempts(home).files == ()


def test_few_records_are_left_alone(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    for number in range(2):
        write(home, number, days=2)
    found = read_attempts(home)
    pack_beside(home, found.records, found.files, now=NOW)
    assert read_attempts(home) == found
