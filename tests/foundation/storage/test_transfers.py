"""What arrives is checksummed, in any order of its parts; requests side by side end at the first failure."""

import io
import random
import threading
import time
from pathlib import Path
from typing import IO, Any

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.foundation.errors import FileTooShort, StorageError
from baton.tasks.foundation.storage.transfers import (
    DOWNLOADED,
    Parts,
    beside,
    checksum_bytes,
    copy_blocks,
    joined_crc32c,
    local_target,
    parallel_map,
)


class Full:
    """A file on a full disk."""

    name = "/disk/here"

    def seek(self, _: int) -> int:
        return 0

    def write(self, _: bytes) -> int:
        raise OSError(28, "No space left on device")


def test_disk_errors_differ_from_source_errors(tmp_path: Path) -> None:
    full: IO[bytes] = Full()  # type: ignore[assignment]
    with pytest.raises(StorageError, match="/disk/here: cannot write the downloaded file"):
        copy_blocks([b"1"], full, None, source="gs://b/x")

    def broken() -> Any:
        yield b"1"
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"), local_target(tmp_path / "here") as file:
        copy_blocks(broken(), file, None, source="/other/disk")
    with pytest.raises(FileTooShort, match="/other/disk ends 2 bytes too early"):
        copy_blocks([b"1"], None, 3, source="/other/disk")


@given(st.lists(st.binary(max_size=40), max_size=6), st.randoms())
def test_parts_in_any_order_make_the_whole(parts: list[bytes], order: random.Random) -> None:
    offsets = [sum(map(len, parts[:index])) for index in range(len(parts))]
    shuffled = [(offset, part) for offset, part in zip(offsets, parts, strict=True) if part]
    order.shuffle(shuffled)
    file = io.BytesIO()
    file.name = "here"
    taken, before = Parts(file), DOWNLOADED.bytes
    for offset, part in shuffled:
        taken.take(offset, part)
    whole = b"".join(parts)
    assert DOWNLOADED.bytes - before == len(whole)
    assert copy_blocks(parts, None, None, source="gs://b/x") == checksum_bytes(whole)
    assert DOWNLOADED.bytes - before == 2 * len(whole)
    assert taken.stat(len(whole), source="gs://b/x") == checksum_bytes(whole) == taken.stat(None, source="gs://b/x")
    assert file.getvalue() == whole
    with pytest.raises(FileTooShort, match="gs://b/x ends 2 bytes too early"):
        taken.stat(len(whole) + 2, source="gs://b/x")


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crcs_of_two_parts_give_that_of_both(first: bytes, second: bytes) -> None:
    crcs = google_crc32c.value(first), google_crc32c.value(second)
    assert joined_crc32c(*crcs, len(second)) == google_crc32c.value(first + second)


def test_a_missing_part_is_never_passed_over() -> None:
    parts = Parts(None)
    parts.take(0, b"12")
    parts.take(3, b"4")
    with pytest.raises(AssertionError, match="a part begins at 3, after 2 bytes"):
        parts.stat(None, source="gs://b/x")
    full: IO[bytes] = Full()  # type: ignore[assignment]
    with pytest.raises(StorageError, match="/disk/here: cannot write the downloaded file"):
        Parts(full).take(0, b"1")


def test_results_are_in_order_and_threads_are_bounded() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.002 * (7 - number % 7))
        with lock:
            running -= 1
        return number * number

    assert parallel_map(work, range(40), workers=5) == [number * number for number in range(40)]
    assert 1 < most <= 5


@pytest.mark.parametrize("workers", [1, 4])
def test_items_not_started_are_skipped_after_a_failure(workers: int) -> None:
    begun: list[int] = []
    hold = threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise StorageError("refused")
        if workers > 1:
            hold.wait(0.3 if number == 0 else 0.002)

    with pytest.raises(StorageError, match="refused"):
        parallel_map(work, range(1000), workers=workers)
    assert len(begun) < 900


def test_interrupted_caller_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    hold, ended = threading.Event(), threading.Event()

    def work(_: int) -> None:
        hold.wait(30)
        ended.set()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("baton.tasks.foundation.storage.transfers.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parallel_map(work, range(3), workers=3)
    assert not ended.is_set()
    hold.set()


def test_work_beside_runs_while_the_body_does() -> None:
    go = threading.Event()
    with beside(lambda: go.wait(30)) as found:
        assert not found.done()
        go.set()
    assert found.result()


def test_failed_body_does_not_wait_for_work_beside() -> None:
    hold = threading.Event()
    with pytest.raises(StorageError, match="refused"), beside(lambda: hold.wait(30)) as found:
        raise StorageError("refused")
    assert not found.done()
    hold.set()


def test_error_of_work_beside_is_raised_by_its_result() -> None:
    with beside(lambda: int("x")) as found:
        pass
    with pytest.raises(ValueError, match="invalid literal"):
        found.result()
