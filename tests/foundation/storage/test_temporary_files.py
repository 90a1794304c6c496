"""What a killed process leaves is removed by the next one; what a living one works on is not."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.foundation.errors import BatonError
from tasks.foundation.storage import temporary_files
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.temporary_files import sweep, temporary_file, temporary_folder
from tests.support.checkout import CHECKOUT

HOLDER = """
import sys, tempfile
from pathlib import Path
from tasks.foundation.storage.temporary_files import temporary_file, temporary_folder

tempfile.tempdir = sys.argv[1]
with temporary_file(Path(sys.argv[1]), ".unfinished-") as file, temporary_folder("baton-staging-") as folder:
    file.write_bytes(b"half")
    (folder / "ckpt.index").write_bytes(b"half")
    print("holding", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary_files, "_LOOKED_AT", set())


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        yield process
        process.kill()


def names(folder: Path) -> list[str]:
    return sorted(path.name.rsplit("-", 1)[0] for path in folder.iterdir())


def test_a_living_process_keeps_its_own(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    for prefix in (".unfinished-", "baton-staging-"):
        sweep(tmp_path, prefix)
    assert names(tmp_path) == [".unfinished", "baton-staging"]
    os.kill(holder.pid, signal.SIGSTOP)  # however long it has been still
    for prefix in (".unfinished-", "baton-staging-"):
        sweep(tmp_path, prefix)
    assert names(tmp_path) == [".unfinished", "baton-staging"]
    os.kill(holder.pid, signal.SIGCONT)
    holder.communicate("")
    assert holder.returncode == 0
    assert names(tmp_path) == []


def test_what_a_killed_one_left_goes_with_the_next_write(
    tmp_path: Path, holder: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.kill()
    holder.wait()
    assert names(tmp_path) == [".unfinished", "baton-staging"]
    LocalStorage(tmp_path).write("HINT", b"1")
    assert names(tmp_path) == ["HINT", "baton-staging"]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder("baton-staging-") as own:
        assert names(tmp_path) == ["HINT", "baton-staging"]
        assert list(own.iterdir()) == []
    assert names(tmp_path) == ["HINT"]


def test_other_names_other_users_and_links_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").write_bytes(b"mine")
    (tmp_path / ".unfinished-link").symlink_to(tmp_path / "kept")
    (tmp_path / ".unfinished-foreign").write_bytes(b"theirs")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    sweep(tmp_path, ".unfinished-")
    assert (tmp_path / ".unfinished-foreign").exists()
    monkeypatch.undo()
    sweep(tmp_path, ".unfinished-")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".unfinished-link", "kept"]
    sweep(tmp_path / "nowhere", ".unfinished-")


def test_a_file_that_is_swept_between_its_making_and_its_locking_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, swept = temporary_files.fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not swept:
            swept.append(handle)
            next(iter(tmp_path.iterdir())).unlink()
        flock(handle, how)

    monkeypatch.setattr(temporary_files.fcntl, "flock", late)
    with temporary_file(tmp_path, ".unfinished-") as file:
        assert swept
        assert file.exists()
    assert names(tmp_path) == []


def test_without_locks_nothing_is_removed_and_everything_else_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_handle: int, _how: int) -> None:
        raise OSError("no locks here")

    (tmp_path / ".unfinished-old").write_bytes(b"half")
    monkeypatch.setattr(temporary_files.fcntl, "flock", refuse)
    LocalStorage(tmp_path).create("a", b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".unfinished-old", "a"]


def test_an_error_within_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(BatonError), temporary_file(tmp_path, "a-"), temporary_folder("b-"):
        raise BatonError("within")
    assert list(tmp_path.iterdir()) == []
