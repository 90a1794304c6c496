"""A local folder is checked early for what a commit does: create, sync, hard-link, delete.

A disk that is really mounted read-only is in tests/end_to_end/test_read_only_storage.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.foundation.errors import StorageError, StoreRefused
from tasks.foundation.storage.local import LocalStorage
from tests.support.checkout import CHECKOUT


def test_probe_leaves_a_writable_folder_unchanged(tmp_path: Path) -> None:
    there, missing = LocalStorage(tmp_path), LocalStorage(tmp_path / "not" / "there")
    assert there.probe() == [] == missing.probe()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("root", [".", "not/there"])
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (1, r"this file system has no hard links .*use a local disk, NFS or gs://"),
        (13, r"no permission to create files"),
        (30, r"mounted read-only; make it writable .*--set storage=FOLDER"),
    ],
)
def test_unusable_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str, root: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreRefused, match=rf"^{tmp_path}.*{message}") as error:
        LocalStorage(tmp_path / root).probe()
    assert error.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_a_transient_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="no space left on the disk; free some and run again") as error:
        LocalStorage(tmp_path).probe()
    assert not isinstance(error.value, StoreRefused)


PROGRAM = """
import sys
from pathlib import Path
from tests.support.run_without_root_rights import give_up_root_rights
from tasks.foundation.errors import StoreRefused
from tasks.foundation.storage.local import LocalStorage
give_up_root_rights()
home = Path(sys.argv[1], "run")
for path in sys.argv[2:]:
    folder = home / path
    folder.chmod(0o555)
    try:
        LocalStorage(home.parent).probe("run")
    except StoreRefused as error:
        print(path, f"{folder}: no permission to create files" in str(error), "owns the folder" in str(error))
    else:
        print(path, "passes")
    folder.chmod(0o755)
"""


def test_each_folder_that_a_run_writes_to_must_be_writable(tmp_path: Path) -> None:
    home, other = tmp_path / "storage" / "run", tmp_path / "other"
    written = [".", "log", "log/blocks", "attempts", "checkpoints", "tensorboard/train", "anything"]
    for path in [*written, "checkpoints/00000010-a", "checkpoints/00000010-a/deep"]:
        (home / path).mkdir(parents=True, exist_ok=True)
    other.mkdir()
    (home / "link").symlink_to(other)
    before = sorted(home.rglob("*"))
    paths = [*written, "checkpoints/00000010-a", "link"]
    command = [sys.executable, "-c", PROGRAM, str(home.parent), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKOUT)
    expected = [*(f"{path} True True" for path in written), "checkpoints/00000010-a passes", "link passes"]
    assert done.stdout.splitlines() == expected
    assert sorted(home.rglob("*")) == before
    assert list(other.iterdir()) == []


def test_files_of_others_beside_a_new_storage_folder_stay(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-thesis").write_text("mine")
    LocalStorage(tmp_path / "new").probe("run")
    assert [file.name for file in tmp_path.iterdir()] == [".unfinished-thesis"]
