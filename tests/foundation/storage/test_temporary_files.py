"""Temporary files of killed processes are removed by the next process; files in use are kept."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.foundation.errors import BatonError
from tasks.foundation.storage import local_files
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.local_files import sweep, sweep_once, temporary_file, temporary_folder
from tests.support.checkout import CHECKOUT

HOLDER = """
import sys, tempfile
from pathlib import Path
from tasks.foundation.storage.local_files import temporary_file, temporary_folder

tempfile.tempdir = sys.argv[1]
with temporary_file(Path(sys.argv[1]), ".unfinished-") as file, temporary_folder("baton-staging-") as folder:
    file.write_bytes(b"half")
    (folder / "ckpt.index").write_bytes(b"half")
    print("holding", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    sweep_once.cache_clear()


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


def test_sweep_keeps_files_of_a_living_process(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    for prefix in (".unfinished-", "baton-staging-"):
        sweep(tmp_path, prefix)
    assert names(tmp_path) == [".unfinished", "baton-staging"]
    os.kill(holder.pid, signal.SIGSTOP)  # a stopped process is still alive
    for prefix in (".unfinished-", "baton-staging-"):
        sweep(tmp_path, prefix)
    assert names(tmp_path) == [".unfinished", "baton-staging"]
    os.kill(holder.pid, signal.SIGCONT)
    holder.communicate("")
    assert holder.returncode == 0
    assert names(tmp_path) == []


def test_files_of_a_killed_process_are_swept(
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


def test_sweep_keeps_other_names_users_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_file_swept_before_locking_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, swept = local_files.fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not swept:
            swept.append(handle)
            next(iter(tmp_path.iterdir())).unlink()
        flock(handle, how)

    monkeypatch.setattr(local_files.fcntl, "flock", late)
    with temporary_file(tmp_path, ".unfinished-") as file:
        assert swept
        assert file.exists()
    assert names(tmp_path) == []


def test_without_locks_nothing_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_handle: int, _how: int) -> None:
        raise OSError("no locks here")

    (tmp_path / ".unfinished-old").write_bytes(b"half")
    monkeypatch.setattr(local_files.fcntl, "flock", refuse)
    LocalStorage(tmp_path).create("a", b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".unfinished-old", "a"]


def test_error_inside_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(BatonError), temporary_file(tmp_path, "a-"), temporary_folder("b-"):
        raise BatonError("within")
    assert list(tmp_path.iterdir()) == []


def test_folder_swept_before_opening_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    real, swept = os.open, []

    def sweeps_first(path: str, *rest: int, **named: int) -> int:
        if not swept and Path(path).name.startswith("baton-race-"):
            swept.append(path)
            Path(path).rmdir()
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", sweeps_first)
    with temporary_folder("baton-race-") as folder:
        assert folder.is_dir()
        assert str(folder) not in swept
    assert swept
    assert list(tmp_path.iterdir()) == []
