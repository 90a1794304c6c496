"""An index that is no table, written by hand with all digests right: named as damage, never a traceback."""

import json
from typing import Any

import pytest

from baton.tasks.foundation.checkpoint.restore import restore_checkpoint
from baton.tasks.foundation.checkpoint.snapshot import take_snapshot
from baton.tasks.foundation.checkpoint.verify import verify_checkpoint
from baton.tasks.foundation.checkpoint.write import write_snapshot
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef, manifest_digest
from baton.tasks.foundation.errors import DamagedCheckpoint
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.init_or_restore.weights import weight_files

HARMS = {
    "empty": lambda _: b"",
    "short": lambda _: b"abc",
    "garbage": lambda data: bytes(reversed(data)),
    "a web page": lambda _: b"<html>no such object</html>" * 100,
    "zeros": lambda data: bytes(len(data)),
    "cut in half": lambda data: data[: len(data) // 2],
    "without its end": lambda data: data[:-1],
    "its end alone": lambda data: data[-48:],
}


def with_index(home: LocalStorage, ref: CheckpointRef, data: bytes) -> CheckpointRef:
    """Put another index into a checkpoint; its manifest, and the reference that is returned, have its digests."""
    home.write(f"{ref.path}/ckpt.index", data)
    manifest = json.loads(home.read(f"{ref.path}/manifest.json"))
    stored = home.stat(f"{ref.path}/ckpt.index")
    for file in manifest["files"]:
        if file["name"] == "ckpt.index":
            file.update(size=stored.size, crc32c=stored.crc32c, sha256=None)
    text = json.dumps(manifest).encode()
    home.write(f"{ref.path}/manifest.json", text)
    return ref.model_copy(update={"manifest_digest": manifest_digest(text)})


@pytest.mark.parametrize("harm", HARMS)
def test_every_reader_names_the_index(harm: str, state: Any, staging_home: LocalStorage, tmp_path: Any) -> None:
    snapshot = take_snapshot(state)
    assert snapshot is not None
    ref = write_snapshot(snapshot, staging_home, base=7, attempt="abc")
    ref = with_index(staging_home, ref, HARMS[harm](staging_home.read(f"{ref.path}/ckpt.index")))
    verify_checkpoint(staging_home, ref)
    for read in (
        lambda: restore_checkpoint(state, staging_home, ref),
        lambda: weight_files._read(staging_home, tmp_path / "here", ref),
    ):
        with pytest.raises(DamagedCheckpoint, match=r"ckpt\.index is not the index of this checkpoint") as found:
            read()
        assert found.value.exit_code == 4
