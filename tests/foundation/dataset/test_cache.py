"""Shards that lie elsewhere: fetched ahead, within a bound, compared, and gone when the process is."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.foundation.dataset import shard_verification, shared_cache
from tasks.foundation.dataset.cache import Piece, ShardCache
from tasks.foundation.dataset.shard_verification import VerifiedShards
from tasks.foundation.errors import InvalidInput, StorageError
from tasks.foundation.storage.memory import MemoryStorage
from tests.support.far_storage import (
    PATIENCE,
    FailOnce,
    FarStorage,
    Gate,
    bytes_below,
    content,
    contents,
    put_shards,
    read,
    wait_for_threads,
)

pytestmark = pytest.mark.usefixtures("temporary")


def test_what_is_open_has_the_right_bytes_and_goes_when_it_ends(far: FarStorage, temporary: Path) -> None:
    records = put_shards(far, [5, 6, 7])
    with VerifiedShards(far) as shards:
        assert read(shards.open(records)) == [content(0, 5), content(1, 6), content(2, 7)]
    assert bytes_below(temporary) == 18
    shared_cache.close_shared_cache()
    assert list(temporary.iterdir()) == []


def test_a_small_dataset_is_fetched_once_in_a_process(far: FarStorage) -> None:
    records = put_shards(far, [5, 6, 7, 8])
    for _segment in range(3):
        with VerifiedShards(far) as training, VerifiedShards(far) as validation:
            for _epoch in range(2):
                for begin in (0, 2):
                    training.open(records[begin : begin + 2], then=[records])
                    validation.open(records[:1])
    wait_for_threads()
    assert sorted(far.of("download")) == ["s0", "s1", "s2", "s3"]


class Case(NamedTuple):
    sizes: list[int]
    bound: int
    transfers: int
    plans_ahead: int
    pipelines: list[list[list[int]]]  # of each: the shards of its plans
    turns: list[int]


PLANS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True), min_size=1, max_size=8)
CASES = st.builds(
    Case,
    sizes=st.lists(st.integers(0, 40), min_size=10, max_size=10),
    bound=st.integers(40, 200),
    transfers=st.integers(1, 4),
    plans_ahead=st.integers(0, 3),
    pipelines=st.lists(PLANS, min_size=1, max_size=3),
    turns=st.lists(st.integers(0, 2), max_size=20),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(case=CASES)
def test_no_more_than_the_bound_is_here_but_what_is_pinned(
    tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    """Several pipelines take turns; each may hold the last two plans, and those that it reads ahead."""
    folder = tmp_path_factory.mktemp("cache")
    cache = ShardCache(folder, case.bound)
    far = FarStorage(MemoryStorage("cache-test/property"), transfers=case.transfers)
    records = put_shards(far, case.sizes)
    pipelines = [
        [plan for plan in ([records[index] for index in plan] for plan in plans) if size_of(plan) <= case.bound]
        for plans in case.pipelines
    ]
    at = [-1] * len(pipelines)
    allowed = [case.bound]
    seen: list[tuple[int, int]] = []
    far.before = far.after = lambda *_: seen.append((bytes_below(folder), allowed[0]))

    def limit(before: int) -> int:
        """The bound, or what the pipelines hold: the plan asked for last, so many before it, and those to come."""
        held = {
            record
            for plans, now in zip(pipelines, at, strict=True)
            for plan in plans[max(now - before, 0) : now + 1 + case.plans_ahead * (now >= 0)]
            for record in plan
        }
        return max(case.bound, size_of(list(held)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_verification, "shared_cache", lambda: cache)
        opened = [VerifiedShards(far, plans_ahead=case.plans_ahead) for _ in pipelines]
        reading = [one.read_ahead([(plan, None) for plan in mine]) for one, mine in zip(opened, pipelines, strict=True)]
        for turn in [*case.turns, *range(len(pipelines))]:
            if turn < len(pipelines) and at[turn] + 1 < len(pipelines[turn]):
                at[turn] += 1
                allowed[0] = limit(before=2)
                paths, asked, _ = next(reading[turn])
                assert read(paths) == contents(asked)
                assert bytes_below(folder) <= limit(before=1)
        for one in opened:
            one.__exit__()
    wait_for_threads()
    assert bytes_below(folder) <= case.bound
    assert all(found <= most for found, most in seen)
    cache.close()


def size_of(records: Sequence[ShardRecord]) -> int:
    return sum(record.size for record in records)


def test_of_a_dataset_larger_than_the_bound_the_windows_in_use_are_here(far: FarStorage, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 30)
    records = put_shards(far, [10] * 12)
    most = []
    far.before = lambda *_: most.append(bytes_below(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_verification, "shared_cache", lambda: cache)
        with VerifiedShards(far) as shards:
            for paths, asked, _ in shards.read_ahead([([record], None) for record in records] * 2):
                assert read(paths) == contents(asked)
    assert max(most) <= 30
    # A dataset that does not fit is fetched again each time.
    assert sorted(far.of("download")) == sorted(record.path for record in records * 2)


def test_with_room_for_two_windows_nothing_is_read_ahead(far: FarStorage, temporary: Path, cache_bytes: Any) -> None:
    cache_bytes(25)
    records = put_shards(far, [10] * 4)
    with VerifiedShards(far) as shards:
        for number, (paths, _, _) in enumerate(shards.read_ahead([([record], None) for record in records])):
            wait_for_threads()
            assert read(paths) == [content(number, 10)]
            assert bytes_below(temporary) == 20
            # The first has nothing before it, so there is room for a second beside it.
            assert far.of("download") == [f"s{index}" for index in range(max(number + 1, 2))]


def test_the_least_recently_used_goes_first(far: FarStorage, cache_bytes: Any) -> None:
    cache_bytes(30)
    a, b, c, d = put_shards(far, [10] * 4)
    for record in (a, b, c, a, d, a, c, b):
        with VerifiedShards(far) as shards:
            shards.open([record])
    assert far.of("download") == ["s0", "s1", "s2", "s3", "s1"]


def test_a_window_that_cannot_fit_is_told(far: FarStorage, cache_bytes: Any) -> None:
    cache_bytes(2 << 20)
    records = put_shards(far, [1 << 20] * 3)
    with VerifiedShards(far) as shards:
        with pytest.raises(StorageError) as told:
            shards.open(records)
        for part in ("data.window_shards", "3.0 MiB", "2.0 MiB", "smaller", "TMPDIR", "BATON_CACHE_BYTES"):
            assert part in str(told.value)
        assert far.of("download") == []
        assert len(shards.open(records[:2])) == 2


@pytest.mark.parametrize("said", ["", "0", "-1", "8G", "1.5", "²"])
def test_a_bound_that_is_no_number_is_refused(far: FarStorage, temporary: Path, cache_bytes: Any, said: str) -> None:
    cache_bytes(said)
    with pytest.raises(InvalidInput, match="BATON_CACHE_BYTES"), VerifiedShards(far) as shards:
        shards.open(put_shards(far, [1]))
    assert list(temporary.iterdir()) == []


def test_the_bound_is_half_of_what_is_free_and_not_more_than_eight_gib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATON_CACHE_BYTES", raising=False)
    usage = shared_cache.shutil.disk_usage(tmp_path)
    for free, bound in ((100, 50), (1 << 40, 8 << 30)):
        monkeypatch.setattr(shared_cache.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert shared_cache.bound_bytes(tmp_path) == bound


def test_no_temporary_folder_is_told(far: FarStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    shared_cache.close_shared_cache()

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    with pytest.raises(StorageError, match=r"No usable temporary directory.*TMPDIR"), VerifiedShards(far) as shards:
        shards.open(put_shards(far, [1]))


def test_the_next_window_is_fetched_while_this_one_is_in_use(far: FarStorage) -> None:
    records = put_shards(far, [10] * 6)
    fetched = threading.Event()
    far.after = lambda method, path: fetched.set() if (method, path) == ("download", "s3") else None
    with VerifiedShards(far) as shards:
        windows = shards.read_ahead([(records[begin : begin + 2], None) for begin in (0, 2, 4)])
        next(windows)
        assert fetched.wait(PATIENCE)
        wait_for_threads()
        # No further than one window.
        assert sorted(far.of("download")) == ["s0", "s1", "s2", "s3"]
        before = len(far.calls)
        next(windows)
        wait_for_threads()
        assert sorted(path for name, path in far.calls[before:] if name == "download") == ["s4", "s5"]


def test_shards_come_side_by_side_but_not_more_than_the_store_bears(far: FarStorage) -> None:
    records = put_shards(far, [10] * 9)
    together = threading.Barrier(3)
    now, most, lock = 0, 0, threading.Lock()

    def before(method: str, _path: str) -> None:
        nonlocal now, most
        if method == "download":
            with lock:
                now += 1
                most = max(most, now)
            together.wait(PATIENCE)  # breaks unless three are here at once

    def after(method: str, _path: str) -> None:
        nonlocal now
        with lock:
            now -= method == "download"

    far.transfers, far.before, far.after = 3, before, after
    with VerifiedShards(far) as shards:
        assert len(shards.open(records)) == 9
    assert most == 3


def test_what_is_needed_comes_before_what_is_read_ahead(far: FarStorage) -> None:
    records = put_shards(far, [10] * 5)
    far.transfers = 1
    far.before = gate = Gate("s1")
    with VerifiedShards(far, plans_ahead=3) as first, VerifiedShards(far) as second:
        first.open(records[:1], then=[[record] for record in records[1:4]])
        assert gate.reached.wait(PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            needed = pool.submit(second.open, records[4:])
            while not any(entry.piece.address.endswith("s4") for entry in shared_cache.shared_cache()._waiting):
                pass
            gate.open.set()
            needed.result(PATIENCE)
        wait_for_threads()
    assert far.of("download") == ["s0", "s1", "s4", "s2", "s3"]


def test_what_goes_wrong_ahead_is_said_when_it_is_asked_for_and_once(far: FarStorage) -> None:
    records = put_shards(far, [10] * 3)
    far.before = FailOnce("s1", StorageError("the store is away"))
    with VerifiedShards(far) as shards:
        windows = shards.read_ahead([([record], None) for record in records])
        assert read(next(windows)[0]) == [content(0, 10)]
        wait_for_threads()
        with pytest.raises(StorageError, match="the store is away") as told:
            next(windows)
        assert type(told.value) is StorageError
    with VerifiedShards(far) as shards:
        assert read(shards.open(records[1:2])) == [content(1, 10)]


def test_what_is_never_asked_for_says_nothing(far: FarStorage, temporary: Path) -> None:
    records = put_shards(far, [10] * 2)
    far.before = FailOnce("s1", StorageError("the store is away"))
    with VerifiedShards(far) as shards:
        shards.open(records[:1], then=[records[1:]])
        wait_for_threads()
        shards.open(records[:1])
    assert bytes_below(temporary) == 10


def test_what_still_waits_is_given_up_at_the_end(far: FarStorage, temporary: Path) -> None:
    records = put_shards(far, [10] * 5)
    far.transfers = 1
    far.before = gate = Gate("s1")
    with VerifiedShards(far) as shards:
        shards.open(records[:1], then=[records[1:]])
        assert gate.reached.wait(PATIENCE)
    gate.open.set()
    wait_for_threads()
    assert far.of("download") == ["s0", "s1"]
    assert bytes_below(temporary) == 20


def test_many_threads_with_little_room(far: FarStorage, temporary: Path, cache_bytes: Any) -> None:
    cache_bytes(60)
    records = put_shards(far, [10] * 8)

    def pipeline(start: int) -> None:
        plans = [([records[(start + step * 3) % 8], records[(start + step * 5 + 1) % 8]], None) for step in range(40)]
        with VerifiedShards(far) as shards:
            for paths, asked, _ in shards.read_ahead(plans):
                assert read(paths) == contents(asked)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(pipeline, range(4)))
    wait_for_threads()
    assert bytes_below(temporary) <= 60


class Fetch:
    """Ten bytes that wait until they may come."""

    def __init__(self, name: str) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.piece = Piece(address=name, begin=0, size=10, crc32c="", fetch=self, transfers=4)

    def __call__(self, target: Path) -> None:
        self.reached.set()
        assert self.open.wait(PATIENCE)
        target.write_bytes(bytes(10))


def test_what_nobody_waits_for_any_more_goes_once_it_is_here(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 10)
    fetches = [Fetch("a"), Fetch("b")]
    holds = [cache.hold([fetch.piece]) for fetch in fetches]
    for fetch in fetches:
        assert fetch.reached.wait(PATIENCE)
    for hold in holds:
        hold.release()
    for fetch in fetches:
        fetch.open.set()
    wait_for_threads()
    assert bytes_below(tmp_path) == 10


def test_what_is_needed_waits_for_the_room_of_what_is_still_coming(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 10)
    given_up, needed = Fetch("a"), Fetch("b")
    needed.open.set()
    hold = cache.hold([given_up.piece])
    assert given_up.reached.wait(PATIENCE)
    hold.release()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(cache.hold, [needed.piece])
        while not (needed.reached.is_set() or cache._changed._waiters):  # type: ignore[attr-defined]
            pass
        began_at_once = needed.reached.is_set()
        given_up.open.set()
        assert len(held.result(PATIENCE).files()) == 1
    assert not began_at_once
    assert bytes_below(tmp_path) == 10


def test_a_closed_cache_lets_nobody_wait(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 20)
    fetches = [Fetch("a"), Fetch("b")]
    pieces = [fetch.piece for fetch in fetches]
    hold = cache.hold(pieces)
    assert fetches[0].reached.wait(PATIENCE)
    cache.close()
    with pytest.raises(StorageError, match="closed"):
        hold.files()
    with pytest.raises(StorageError, match="closed"):
        cache.hold(pieces)
    hold.release()
    for fetch in fetches:
        fetch.open.set()
    wait_for_threads()
    assert bytes_below(tmp_path) == 0


PROGRAM = """
import sys, time
from tests.support.far_storage import FarStorage, Gate, put_shards
from tasks.foundation.dataset.shard_verification import VerifiedShards
from tasks.foundation.storage.memory import MemoryStorage
far = FarStorage(MemoryStorage("ending"))
records = put_shards(far, [10, 10])
far.before = gate = Gate("s1", patience=None)
shards = VerifiedShards(far)
shards.open(records[:1], then=[records[1:]])
assert gate.reached.wait(60)
print("reached", flush=True)
if sys.argv[1] == "stay":
    time.sleep(60)
"""


def start(temporary: Path, how: str) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "TMPDIR": str(temporary)}
    program = [sys.executable, "-W", "always::ResourceWarning", "-c", PROGRAM, how]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == b"reached\n"
    return process


def test_a_process_ends_in_the_middle_of_a_download_and_after_a_kill_the_next_one_tidies_up(tmp_path: Path) -> None:
    folder = tmp_path / "of-children"
    folder.mkdir()
    with start(folder, "stay") as killed:
        killed.send_signal(signal.SIGKILL)
    assert [left.name[:13] for left in folder.iterdir()] == ["baton-shards-"]
    # It ends by itself though a download waits for ever, and removes what the one before left.
    with start(folder, "end") as ending:
        _, said = ending.communicate(timeout=PATIENCE)
    assert ending.returncode == 0, said.decode()
    assert b"baton-shards" not in said
    assert list(folder.iterdir()) == []
