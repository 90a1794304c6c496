"""Many transfers side by side: in order, bounded, and ended by the first that fails."""

import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest

from tasks.foundation.errors import FileTooShort, StorageError
from tasks.foundation.storage.download import copy_blocks, local_target, side_by_side


def test_results_are_in_order_and_no_more_than_allowed_run_at_once() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.002 * (7 - number % 7))
        with lock:
            running -= 1
        return number * number

    assert side_by_side(work, range(40), workers=5) == [number * number for number in range(40)]
    assert 1 < most <= 5


@pytest.mark.parametrize("workers", [1, 4])
def test_what_had_not_begun_is_left_once_one_has_failed(workers: int) -> None:
    begun: list[int] = []
    hold = threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise StorageError("refused")
        if workers > 1:
            hold.wait(0.3 if number == 0 else 0.002)

    with pytest.raises(StorageError, match="refused"):
        side_by_side(work, range(1000), workers=workers)
    assert len(begun) < 900


def test_whoever_is_interrupted_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    hold, ended = threading.Event(), threading.Event()

    def work(_: int) -> None:
        hold.wait(30)
        ended.set()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.foundation.storage.download.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(work, range(3), workers=3)
    assert not ended.is_set()
    hold.set()


class Full:
    """A file on a full disk."""

    name = "/disk/here"

    def write(self, _: bytes) -> int:
        raise OSError(28, "No space left on device")


def test_a_disk_that_fails_is_told_from_a_source_that_does(tmp_path: Path) -> None:
    full: IO[bytes] = Full()  # type: ignore[assignment]
    with pytest.raises(StorageError, match="/disk/here: what was downloaded could not be written"):
        copy_blocks([b"1"], full, None, where="gs://b/x")

    def broken() -> Any:
        yield b"1"
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"), local_target(tmp_path / "here") as file:
        copy_blocks(broken(), file, None, where="/other/disk")
    with pytest.raises(FileTooShort, match="/other/disk ends 2 bytes too early"):
        copy_blocks([b"1"], None, 3, where="/other/disk")
