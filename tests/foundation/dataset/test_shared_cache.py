"""The shard cache of the process: its limit, its folder, and its removal."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.dataset import cache
from baton.tasks.foundation.dataset.shards import VerifiedShards
from baton.tasks.foundation.errors import InvalidInput, StorageError
from tests.support import forked
from tests.support.far_storage import PATIENCE, FarStorage, put_shards

pytestmark = pytest.mark.usefixtures("temporary")


@pytest.mark.parametrize("value", ["", "0", "-1", "8G", "1.5", "²"])
def test_invalid_cache_bytes_are_refused(far: FarStorage, temporary: Path, cache_bytes: Any, value: str) -> None:
    cache_bytes(value)
    with pytest.raises(InvalidInput, match="BATON_CACHE_BYTES"), VerifiedShards(far) as shards:
        shards.open(put_shards(far, [1]))
    assert list(temporary.iterdir()) == []


def test_default_bound_is_half_of_free_space_up_to_eight_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_CACHE_BYTES", raising=False)
    usage = cache.shutil.disk_usage(tmp_path)
    for free, bound in ((100, 50), (1 << 40, 8 << 30)):
        monkeypatch.setattr(cache.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert cache.bound_bytes(tmp_path) == bound


def test_missing_temporary_folder_is_reported(far: FarStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.close_shared_cache()

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    with pytest.raises(StorageError, match=r"No usable temporary directory.*TMPDIR"), VerifiedShards(far) as shards:
        shards.open(put_shards(far, [1]))


PROGRAM = """
import sys, time
from tests.support import forked
from tests.support.far_storage import FarStorage, Gate, put_shards
from baton.tasks.foundation.dataset.shards import VerifiedShards
from baton.tasks.foundation.storage.memory import MemoryStorage
far = FarStorage(MemoryStorage("ending"))
records = put_shards(far, [10, 10])
far.before = gate = Gate("s1", patience=None)
shards = VerifiedShards(far)
shards.open(records[:1], upcoming=[records[1:]])
assert gate.reached.wait(60)
print("reached", flush=True)
if sys.argv[1] == "stay":
    time.sleep(60)
"""


def start(temporary: Path, how: str) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "TMPDIR": str(temporary)}
    program = [sys.executable, "-W", "always::ResourceWarning", "-c", PROGRAM, how]
    popen = forked.Popen if how == "stay" else subprocess.Popen  # how a process ends is its own
    process = popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == b"reached\n"
    return process


@pytest.mark.slow
def test_process_exits_during_download_and_next_one_cleans_up(tmp_path: Path) -> None:
    folder = tmp_path / "of-children"
    folder.mkdir()
    with start(folder, "stay") as killed:
        killed.send_signal(signal.SIGKILL)
    assert [left.name[:13] for left in folder.iterdir()] == ["baton-shards-"]
    # The process exits although a download waits forever, and deletes the folder of the killed one.
    with start(folder, "end") as ending:
        _, stderr = ending.communicate(timeout=PATIENCE)
    assert ending.returncode == 0, stderr.decode()
    assert b"baton-shards" not in stderr
    assert list(folder.iterdir()) == []
