"""A local folder is checked early for what a commit does: create, sync, hard-link, delete.

A disk that is really mounted read-only is in tests/end_to_end/test_read_only_storage.py.
"""

import os
from pathlib import Path

import pytest

from tasks.foundation.errors import StorageError, StoreRefused
from tasks.foundation.storage.local import LocalStorage


def test_probe_leaves_a_writable_folder_unchanged(tmp_path: Path) -> None:
    there, missing = LocalStorage(tmp_path), LocalStorage(tmp_path / "not" / "there")
    assert there.probe() == [] == missing.probe()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (1, r"this file system has no hard links .*use a local disk, NFS or gs://"),
        (13, r"no permission to create files"),
        (30, r"mounted read-only; make it writable .*--set storage=FOLDER"),
    ],
)
def test_unusable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreRefused, match=rf"^{tmp_path}.*{message}") as error:
        LocalStorage(tmp_path).probe()
    assert error.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_a_transient_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="no space left on the disk; free some and run again") as error:
        LocalStorage(tmp_path).probe()
    assert not isinstance(error.value, StoreRefused)
