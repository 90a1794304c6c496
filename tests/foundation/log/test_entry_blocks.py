"""A history that is read in blocks is that of the entries, whatever has become of the blocks."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.tasks.foundation.errors import RunLogError, StorageError
from baton.tasks.foundation.log import files
from baton.tasks.foundation.log import log as run_log
from baton.tasks.foundation.log.files import block_path, false_blocks
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.counting_storage import Counting
from tests.support.crashing_store import CrashingStore, Died
from tests.support.random_logs import anything, append
from tests.support.small_logs import begin, head_of

SIZE = 8


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_ENTRIES", SIZE)
    monkeypatch.setattr(run_log, "BLOCK_ENTRIES", SIZE)


def fill(home: Storage, entries: int, seed: int) -> Storage:
    log, chance = begin(home), random.Random(seed)
    while head_of(log).number < entries - 1:
        append(log, anything(head_of(log), chance))
    return home


def texts(entries: Iterator[Any]) -> list[str]:
    """NaN metrics are not equal to themselves."""
    return [entry.model_dump_json() for entry in entries]


def damage(home: LocalStorage, first: int, how: str, chance: random.Random) -> None:
    path = home.root / block_path(first)
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[: chance.randrange(len(data))])
    elif how == "flipped":
        at = chance.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
    elif how == "another block":
        path.write_bytes((home.root / block_path(SIZE if first == 0 else 0)).read_bytes())


@settings(derandomize=True, max_examples=25)
@given(
    entries=st.integers(2 * SIZE, 3 * SIZE + 2),
    seed=st.integers(0, 1000),
    damages=st.lists(st.sampled_from(["none", "missing", "cut", "flipped", "another block"]), min_size=2, max_size=2),
)
def test_blocks_give_what_entries_give(
    tmp_path_factory: pytest.TempPathFactory, entries: int, seed: int, damages: list[str]
) -> None:
    home = LocalStorage(tmp_path_factory.mktemp("blocks") / "home")
    fill(home, entries, seed)
    expected = texts(RunLog(home).entries())
    assert texts(RunLog(home).entries(blocks="read")) == expected
    assert not list((home.root / "log").glob("blocks/*"))
    assert texts(RunLog(home).entries(blocks="written")) == expected
    assert len(list((home.root / "log/blocks").iterdir())) == entries // SIZE
    assert not list(false_blocks(home, entries))
    for number, how in enumerate(damages):
        damage(home, number * SIZE, how, random.Random(seed))
    assert texts(RunLog(home).entries(blocks="read")) == expected
    assert texts(RunLog(home).entries(blocks="written")) == expected
    assert texts(RunLog(home).entries()) == expected


def test_each_entry_is_read_once(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path / "home")
    fill(home, 5 * SIZE + 3, 1)
    list(RunLog(home).entries(blocks="written"))
    counted = Counting(home)
    list(RunLog(counted).entries(blocks="read"))
    # A block and its newest entry each; the others; HINT, the entry with the identity, pages.
    assert counted.calls["read"] <= 2 * 5 + 3 + 4
    fill(home, 6 * SIZE + 3, 2)
    list(RunLog(home).entries(blocks="written"))
    counted = Counting(home)
    list(RunLog(counted).entries(blocks="read"))
    assert counted.calls["read"] <= 2 * 6 + 3 + 4


def test_block_of_another_log_is_passed_over(tmp_path: Path) -> None:
    home, other = (LocalStorage(tmp_path / name) for name in ("home", "other"))
    for number, each in enumerate((home, other)):
        fill(each, 2 * SIZE, number)
        list(RunLog(each).entries(blocks="written"))
    shutil.copytree(other.root / "log/blocks", home.root / "log/blocks", dirs_exist_ok=True)
    assert texts(RunLog(home).entries(blocks="read")) == texts(RunLog(home).entries())
    assert list(false_blocks(home, 2 * SIZE)) == [block_path(0), block_path(SIZE)]


def test_lie_with_the_right_newest_entry_is_found(tmp_path: Path) -> None:
    """A block is only read for reports, and verification compares every byte."""
    home = LocalStorage(tmp_path / "home")
    fill(home, SIZE, 1)
    entries = files.read_entries(home, range(SIZE))
    entries[3] = entries[3].replace(b'"attempt":"a"', b'"attempt":"b"')
    files.write_block(home, 0, entries)
    assert list(false_blocks(home, SIZE)) == [block_path(0)]
    assert [entry.attempt for entry in RunLog(home).entries()][3] == "a"


def test_entry_that_cannot_be_read_is_named_with_and_without_blocks(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path / "home")
    fill(home, SIZE + 2, 1)
    (home.root / "log/00000003.json").write_bytes(b"{}")
    for blocks in ("ignored", "read", "written"):
        with pytest.raises(RunLogError, match=r"00000003\.json"):
            list(RunLog(home).entries(blocks=blocks))
    assert not (home.root / "log/blocks").exists()


def test_home_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path / "home")
    fill(home, 2 * SIZE, 1)
    refusing = Counting(home)
    refusing.fails = lambda _, verb: (StorageError("read-only"), False) if verb == "write" else None
    assert texts(RunLog(refusing).entries(blocks="written")) == texts(RunLog(home).entries())


def test_damaged_block_is_written_again(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path / "home")
    fill(home, SIZE + 1, 1)
    list(RunLog(home).entries(blocks="written"))
    good = (home.root / block_path(0)).read_bytes()
    damage(home, 0, "flipped", random.Random(1))
    list(RunLog(home).entries(blocks="read"))
    assert (home.root / block_path(0)).read_bytes() != good
    list(RunLog(home).entries(blocks="written"))
    assert (home.root / block_path(0)).read_bytes() == good


def test_blocks_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path / "home")
    fill(home, SIZE + 1, 1)
    expected = texts(RunLog(home).entries())
    (home.root / "log/blocks").write_bytes(b"not a folder")
    for blocks in ("read", "written"):
        assert texts(RunLog(home).entries(blocks=blocks)) == expected


def test_lost_entry_in_a_block_is_no_false_block(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path / "home")
    fill(home, SIZE + 2, 1)
    list(RunLog(home).entries(blocks="written"))
    (home.root / "log/00000003.json").unlink()
    assert not list(false_blocks(home, SIZE + 2))


def test_death_at_any_call_leaves_no_false_block(tmp_path: Path) -> None:
    dies_at = 0
    while True:
        home = LocalStorage(tmp_path / str(dies_at))
        fill(home, 2 * SIZE, 1)
        store: Any = CrashingStore(home, random.Random(dies_at), dies_at=dies_at, pauses_at=-1)
        try:
            assert len(list(RunLog(store).entries(blocks="written"))) == 2 * SIZE
            break
        except Died:
            assert not list(false_blocks(home, 2 * SIZE))
        rival = texts(RunLog(home).entries(blocks="written"))
        assert rival == texts(RunLog(home).entries())
        dies_at += 5
    assert dies_at > 3 * SIZE
