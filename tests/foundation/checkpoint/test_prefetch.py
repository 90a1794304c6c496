"""A checkpoint that was read ahead is downloaded once, and verified as any other."""

from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.checkpoint.verify import CheckpointPrefetch, FetchedFile, fetch, read_manifest
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.errors import DamagedCheckpoint, StorageError
from baton.tasks.foundation.storage.interface import FileStat
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.counting_storage import Counting
from tests.support.small_logs import begin, head_of, train

WHOLE = b"state at 0 by a0"


@pytest.fixture
def far(memory: MemoryStorage) -> Any:
    """A home in another place, with the checkpoint of step 0, that counts calls."""
    begin(memory)
    return Counting(memory)


def tip_of(home: Any) -> CheckpointRef:
    from baton.tasks.foundation.log.log import RunLog

    tip = head_of(RunLog(home)).tip
    assert tip is not None
    return tip


def restored(prefetch: CheckpointPrefetch, home: Any, ref: CheckpointRef, folder: Path) -> bytes:
    """The bytes that a restore reads."""
    folder.mkdir(exist_ok=True)
    fetch(home, ref, read_manifest(home, ref), folder, fetched=prefetch.take(home, ref))
    prefetch.drop()
    return (folder / "ckpt.data").read_bytes()


def test_files_are_downloaded_once(far: Any, tmp_path: Path) -> None:
    prefetch, ref = CheckpointPrefetch(), tip_of(far)
    prefetch.begin(far, ref)
    early = prefetch.take(far, ref)["ckpt.data"].path
    assert early.read_bytes() == WHOLE
    assert restored(prefetch, far, ref, tmp_path / "a") == WHOLE
    assert far.calls["download"] == 1
    assert not early.parent.exists()
    assert restored(prefetch, far, ref, tmp_path / "b") == WHOLE
    assert far.calls["download"] == 2


def test_another_checkpoint_is_downloaded(far: Any, memory: MemoryStorage, tmp_path: Path) -> None:
    prefetch, first = CheckpointPrefetch(), tip_of(far)
    prefetch.begin(far, first)
    train(begin_again(memory), 5)
    second = tip_of(far)
    assert second != first
    assert restored(prefetch, far, second, tmp_path / "a") == b"state at 5 by a"


def begin_again(memory: MemoryStorage) -> Any:
    from baton.tasks.foundation.log.log import RunLog

    return RunLog(memory)


def test_a_failed_download_is_tried_again_by_the_restore(far: Any, tmp_path: Path) -> None:
    prefetch, ref = CheckpointPrefetch(), tip_of(far)
    far.fails = lambda _number, verb: (StorageError("away"), False) if verb == "download" else None
    prefetch.begin(far, ref)
    assert prefetch.take(far, ref) == {}
    far.fails = lambda _number, _verb: None
    assert restored(prefetch, far, ref, tmp_path / "a") == WHOLE


def test_a_file_that_vanished_is_downloaded_again(far: Any, tmp_path: Path) -> None:
    prefetch, ref = CheckpointPrefetch(), tip_of(far)
    prefetch.begin(far, ref)
    prefetch.take(far, ref)["ckpt.data"].path.unlink()
    assert restored(prefetch, far, ref, tmp_path / "a") == WHOLE


def test_a_damaged_early_download_is_not_restored(far: Any, tmp_path: Path) -> None:
    ref, early = tip_of(far), tmp_path / "early"
    early.write_bytes(b"garbage")
    other = FileStat(size=7, crc32c="00000000")
    fetch(
        far,
        ref,
        read_manifest(far, ref),
        tmp_path,
        fetched={"ckpt.data": FetchedFile(path=early, stat=other)},
    )
    assert (tmp_path / "ckpt.data").read_bytes() == WHOLE


def test_damage_in_the_store_is_found_as_before(far: Any, memory: MemoryStorage, tmp_path: Path) -> None:
    prefetch, ref = CheckpointPrefetch(), tip_of(far)
    memory.write(f"{ref.path}/ckpt.data", b"state at 0 by b0")
    prefetch.begin(far, ref)
    with pytest.raises(DamagedCheckpoint, match="crc32c"):
        restored(prefetch, far, ref, tmp_path / "a")
    prefetch.drop()


def test_a_local_home_is_only_read_into_memory(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path / "home")
    begin(home)
    prefetch, ref = CheckpointPrefetch(), tip_of(home)
    prefetch.begin(home, ref)
    assert prefetch.take(home, ref) == {}
    prefetch.begin(home, ref.model_copy(update={"path": "checkpoints/nowhere"}))
    assert prefetch.take(home, ref) == {}


def test_checkpoint_read_ahead_brings_its_manifest(far: Any) -> None:
    prefetch, ref = CheckpointPrefetch(), tip_of(far)
    assert prefetch.manifest(far, ref) is None
    prefetch.begin(far, ref)
    assert prefetch.manifest(far, ref) == read_manifest(far, ref)
    assert prefetch.looks_whole(far, ref)
    prefetch.drop()
    assert prefetch.manifest(far, ref) is None
    assert not prefetch.looks_whole(far, ref)


@pytest.mark.parametrize("lost", ["ckpt.data", "manifest.json"])
def test_lost_or_damaged_files_do_not_look_whole(far: Any, lost: str) -> None:
    prefetch, ref = CheckpointPrefetch(), tip_of(far)
    far.delete(f"{ref.path}/{lost}")
    if lost == "ckpt.data":
        far.write(f"{ref.path}/{lost}", b"other bytes, and")
    prefetch.begin(far, ref)
    prefetch.take(far, ref)
    assert not prefetch.looks_whole(far, ref)
