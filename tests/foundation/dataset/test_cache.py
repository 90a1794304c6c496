"""The cache of remote shards: read-ahead, its limit, verification, and clean-up."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.tasks.foundation.contracts.dataset import ShardRecord
from baton.tasks.foundation.dataset import cache as shared_cache
from baton.tasks.foundation.dataset import shards as shard_verification
from baton.tasks.foundation.dataset.cache import FileRange, ShardCache
from baton.tasks.foundation.dataset.shards import VerifiedShards
from baton.tasks.foundation.errors import StorageError
from baton.tasks.foundation.storage.memory import MemoryStorage
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


def test_opened_shards_have_their_bytes_and_are_deleted_at_the_end(far: FarStorage, temporary: Path) -> None:
    records = put_shards(far, [5, 6, 7])
    with VerifiedShards(far) as shards:
        assert read(shards.open(records)) == [content(0, 5), content(1, 6), content(2, 7)]
    assert bytes_below(temporary) == 18
    shared_cache.close_shared_cache()
    assert list(temporary.iterdir()) == []


def test_small_dataset_is_downloaded_once_per_process(far: FarStorage) -> None:
    records = put_shards(far, [5, 6, 7, 8])
    for _segment in range(3):
        with VerifiedShards(far) as training, VerifiedShards(far) as validation:
            for _epoch in range(2):
                for begin in (0, 2):
                    training.open(records[begin : begin + 2], upcoming=[records])
                    validation.open(records[:1])
    wait_for_threads()
    assert sorted(far.of("download")) == ["s0", "s1", "s2", "s3"]


class Case(NamedTuple):
    sizes: list[int]
    bound: int
    transfers: int
    plans_ahead: int
    pipelines: list[list[list[int]]]  # the shards of each pipeline's plans
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


@settings(max_examples=60, derandomize=True)
@given(case=CASES)
def test_only_pinned_shards_exceed_the_bound(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    """Several pipelines take turns; each may hold its last two plans, and the plans that it reads ahead."""
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
        """Return the bound, or the bytes of pinned plans: the last one, `before` plans before it, and those ahead."""
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
                paths, requested, _ = next(reading[turn])
                assert read(paths) == contents(requested)
                assert bytes_below(folder) <= limit(before=1)
        for one in opened:
            one.__exit__()
    wait_for_threads()
    assert bytes_below(folder) <= case.bound
    assert all(found <= most for found, most in seen)
    cache.close()


def size_of(records: Sequence[ShardRecord]) -> int:
    return sum(record.size for record in records)


def test_large_dataset_keeps_only_windows_in_use(far: FarStorage, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 30)
    records = put_shards(far, [10] * 12)
    most = []
    far.before = lambda *_: most.append(bytes_below(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_verification, "shared_cache", lambda: cache)
        with VerifiedShards(far) as shards:
            for paths, requested, _ in shards.read_ahead([([record], None) for record in records] * 2):
                assert read(paths) == contents(requested)
    assert max(most) <= 30
    # A dataset that does not fit is downloaded again in each epoch.
    assert sorted(far.of("download")) == sorted(record.path for record in records * 2)


def test_nothing_is_read_ahead_without_room_for_three_windows(
    far: FarStorage, temporary: Path, cache_bytes: Any
) -> None:
    cache_bytes(25)
    records = put_shards(far, [10] * 4)
    with VerifiedShards(far) as shards:
        for number, (paths, _, _) in enumerate(shards.read_ahead([([record], None) for record in records])):
            wait_for_threads()
            assert read(paths) == [content(number, 10)]
            assert bytes_below(temporary) == 20
            # The first window has none before it, so there is room for a second one.
            assert far.of("download") == [f"s{index}" for index in range(max(number + 1, 2))]


def test_least_recently_used_shard_is_evicted_first(far: FarStorage, cache_bytes: Any) -> None:
    cache_bytes(30)
    a, b, c, d = put_shards(far, [10] * 4)
    for record in (a, b, c, a, d, a, c, b):
        with VerifiedShards(far) as shards:
            shards.open([record])
    assert far.of("download") == ["s0", "s1", "s2", "s3", "s1"]


def test_window_larger_than_the_cache_is_refused(far: FarStorage, cache_bytes: Any) -> None:
    cache_bytes(2 << 20)
    records = put_shards(far, [1 << 20] * 3)
    with VerifiedShards(far) as shards:
        with pytest.raises(StorageError) as caught:
            shards.open(records)
        for part in ("data.window_shards", "3.0 MiB", "2.0 MiB", "smaller", "TMPDIR", "BATON_CACHE_BYTES"):
            assert part in str(caught.value)
        assert far.of("download") == []
        assert len(shards.open(records[:2])) == 2


def test_next_window_is_downloaded_while_one_is_in_use(far: FarStorage) -> None:
    records = put_shards(far, [10] * 6)
    fetched = threading.Event()
    far.after = lambda method, path: fetched.set() if (method, path) == ("download", "s3") else None
    with VerifiedShards(far) as shards:
        windows = shards.read_ahead([(records[begin : begin + 2], None) for begin in (0, 2, 4)])
        next(windows)
        assert fetched.wait(PATIENCE)
        wait_for_threads()
        # It reads only one window ahead.
        assert sorted(far.of("download")) == ["s0", "s1", "s2", "s3"]
        before = len(far.calls)
        next(windows)
        wait_for_threads()
        assert sorted(path for name, path in far.calls[before:] if name == "download") == ["s4", "s5"]


def test_parallel_downloads_stay_within_the_store_limit(far: FarStorage) -> None:
    records = put_shards(far, [10] * 9)
    together = threading.Barrier(3)
    now, most, lock = 0, 0, threading.Lock()

    def before(method: str, _path: str) -> None:
        nonlocal now, most
        if method == "download":
            with lock:
                now += 1
                most = max(most, now)
            together.wait(PATIENCE)  # fails unless three downloads run at once

    def after(method: str, _path: str) -> None:
        nonlocal now
        with lock:
            now -= method == "download"

    far.transfers, far.before, far.after = 3, before, after
    with VerifiedShards(far) as shards:
        assert len(shards.open(records)) == 9
    assert most == 3


def test_needed_shard_is_downloaded_before_read_ahead(far: FarStorage) -> None:
    records = put_shards(far, [10] * 5)
    far.transfers = 1
    far.before = gate = Gate("s1")
    with VerifiedShards(far, plans_ahead=3) as first, VerifiedShards(far) as second:
        first.open(records[:1], upcoming=[[record] for record in records[1:4]])
        assert gate.reached.wait(PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            needed = pool.submit(second.open, records[4:])
            while not any(entry.file_range.address.endswith("s4") for entry in shared_cache.shared_cache()._waiting):
                pass
            gate.open.set()
            needed.result(PATIENCE)
        wait_for_threads()
    assert far.of("download") == ["s0", "s1", "s4", "s2", "s3"]


def test_read_ahead_error_is_raised_once_when_its_shard_is_opened(far: FarStorage) -> None:
    records = put_shards(far, [10] * 3)
    far.before = FailOnce("s1", StorageError("the store is away"))
    with VerifiedShards(far) as shards:
        windows = shards.read_ahead([([record], None) for record in records])
        assert read(next(windows)[0]) == [content(0, 10)]
        wait_for_threads()
        with pytest.raises(StorageError, match="the store is away") as caught:
            next(windows)
        assert type(caught.value) is StorageError
    with VerifiedShards(far) as shards:
        assert read(shards.open(records[1:2])) == [content(1, 10)]


def test_read_ahead_error_of_an_unused_shard_is_ignored(far: FarStorage, temporary: Path) -> None:
    records = put_shards(far, [10] * 2)
    far.before = FailOnce("s1", StorageError("the store is away"))
    with VerifiedShards(far) as shards:
        shards.open(records[:1], upcoming=[records[1:]])
        wait_for_threads()
        shards.open(records[:1])
    assert bytes_below(temporary) == 10


def test_waiting_downloads_are_dropped_at_the_end(far: FarStorage, temporary: Path) -> None:
    records = put_shards(far, [10] * 5)
    far.transfers = 1
    far.before = gate = Gate("s1")
    with VerifiedShards(far) as shards:
        shards.open(records[:1], upcoming=[records[1:]])
        assert gate.reached.wait(PATIENCE)
    gate.open.set()
    wait_for_threads()
    assert far.of("download") == ["s0", "s1"]
    assert bytes_below(temporary) == 20


def test_many_threads_share_a_small_cache(far: FarStorage, temporary: Path, cache_bytes: Any) -> None:
    cache_bytes(60)
    records = put_shards(far, [10] * 8)

    def pipeline(start: int) -> None:
        plans = [([records[(start + step * 3) % 8], records[(start + step * 5 + 1) % 8]], None) for step in range(40)]
        with VerifiedShards(far) as shards:
            for paths, requested, _ in shards.read_ahead(plans):
                assert read(paths) == contents(requested)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(pipeline, range(4)))
    wait_for_threads()
    assert bytes_below(temporary) <= 60


class Fetch:
    """A download of ten bytes that waits until the test opens it."""

    def __init__(self, name: str) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.file_range = FileRange(address=name, begin=0, size=10, crc32c="", fetch=self, transfers=4)

    def __call__(self, target: Path) -> None:
        self.reached.set()
        assert self.open.wait(PATIENCE)
        target.write_bytes(bytes(10))


def test_unwanted_download_is_evicted_when_it_ends(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 10)
    fetches = [Fetch("a"), Fetch("b")]
    pins = [cache.pin([fetch.file_range]) for fetch in fetches]
    for fetch in fetches:
        assert fetch.reached.wait(PATIENCE)
    for pin in pins:
        pin.release()
    for fetch in fetches:
        fetch.open.set()
    wait_for_threads()
    assert bytes_below(tmp_path) == 10


def test_pin_waits_for_room_of_an_unwanted_download(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 10)
    given_up, needed = Fetch("a"), Fetch("b")
    needed.open.set()
    pin = cache.pin([given_up.file_range])
    assert given_up.reached.wait(PATIENCE)
    pin.release()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(cache.pin, [needed.file_range])
        while not (needed.reached.is_set() or cache._changed._waiters):  # type: ignore[attr-defined]
            pass
        began_at_once = needed.reached.is_set()
        given_up.open.set()
        assert len(held.result(PATIENCE).files()) == 1
    assert not began_at_once
    assert bytes_below(tmp_path) == 10


def test_closed_cache_fails_waiting_readers(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 20)
    fetches = [Fetch("a"), Fetch("b")]
    ranges = [fetch.file_range for fetch in fetches]
    pin = cache.pin(ranges)
    assert fetches[0].reached.wait(PATIENCE)
    cache.close()
    with pytest.raises(StorageError, match="closed"):
        pin.files()
    with pytest.raises(StorageError, match="closed"):
        cache.pin(ranges)
    pin.release()
    for fetch in fetches:
        fetch.open.set()
    wait_for_threads()
    assert bytes_below(tmp_path) == 0
