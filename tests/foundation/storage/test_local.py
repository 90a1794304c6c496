"""A local folder: races have one winner, files are durable, and unfinished ones are never visible."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tasks.foundation.errors import StorageError
from tasks.foundation.storage.local import LocalStorage
from tests.support.checkout import CHECKOUT

WRITER = """
import sys
from pathlib import Path
from tasks.foundation.errors import FileAlreadyThere
from tasks.foundation.storage.local import LocalStorage

storage, writer = LocalStorage(Path(sys.argv[1])), sys.argv[2]
print("ready", flush=True)
for number in sys.stdin:
    try:
        storage.create(f"log/{int(number)}", (writer + ":").encode() * 5000)
    except FileAlreadyThere:
        print("lost", flush=True)
    else:
        print("won", flush=True)
"""

ENDLESS = """
import itertools, sys
from pathlib import Path
from tasks.foundation.storage.local import LocalStorage

storage = LocalStorage(Path(sys.argv[1]))
taken = len(list(storage.files("log")))
source = Path(sys.argv[2])
for number in itertools.count(taken):
    storage.create(f"log/{number}", f"{number};".encode() * 20_000)
    storage.write("HINT", f"{number};".encode() * 20_000)
    storage.upload(source, f"up/{number % 3}")
    storage.write_buffers(f"up/{number % 3 + 3}", [memoryview(source.read_bytes())])
    if number == taken + 1:
        print("going", flush=True)
"""


def python(code: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.rglob(".unfinished-*")]


@pytest.mark.slow
def test_one_of_racing_processes_wins(tmp_path: Path) -> None:
    rounds = 20
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(python(WRITER, str(tmp_path), str(number))) for number in range(16)]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for number in range(rounds):
            for writer in writers:
                assert writer.stdin is not None
                writer.stdin.write(f"{number}\n")
            answers = [writer.stdout.readline().strip() for writer in writers if writer.stdout is not None]
            assert sorted(answers) == ["lost"] * 15 + ["won"]
            winner = answers.index("won")
            assert (tmp_path / "log" / str(number)).read_bytes() == f"{winner}:".encode() * 5000
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.close()
            assert writer.wait(60) == 0
    assert sorted(LocalStorage(tmp_path).files("")) == sorted(f"log/{number}" for number in range(rounds))
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_visible_files_are_complete_after_a_kill(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"source" * 50_000)
    root = tmp_path / "root"
    for kill in range(6):
        with python(ENDLESS, str(root), str(source)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "going\n"
            threading.Event().wait(0.003 * kill)  # so that each kill hits another moment
            process.send_signal(signal.SIGKILL)
        storage = LocalStorage(root)
        entries = sorted(int(path.removeprefix("log/")) for path in storage.files("log"))
        assert entries == list(range(len(entries)))
        for number in entries:
            assert storage.read(f"log/{number}") == f"{number};".encode() * 20_000
        assert storage.read("HINT") in {f"{number};".encode() * 20_000 for number in entries}
        for path in storage.files("up"):
            assert storage.read(path) == source.read_bytes()
    assert len(entries) >= 12


def test_unfinished_files_are_never_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    listed: list[list[str]] = []
    on_disk: list[int] = []
    link, replace = os.link, Path.replace

    def look() -> None:
        listed.append(sorted(storage.files("")))
        on_disk.append(len(leftovers(tmp_path)))

    def watched_link(source: str, target: str) -> None:
        look()
        link(source, target)

    def watched_replace(self: Path, target: Path) -> Path:
        look()
        return replace(self, target)

    monkeypatch.setattr(os, "link", watched_link)
    monkeypatch.setattr(Path, "replace", watched_replace)
    storage.create("a", b"1")
    storage.write("b", b"2")
    storage.upload(tmp_path / "a", "c")
    storage.write_buffers("d", [memoryview(b"4")])
    assert listed == [[], ["a"], ["a", "b"], ["a", "b", "c"]]
    assert on_disk == [1, 1, 1, 1]
    assert leftovers(tmp_path) == []


def test_file_is_synced_before_its_name_and_name_before_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, link = os.fsync, os.link

    def watched_fsync(handle: int) -> None:
        calls.append("sync folder" if Path(f"/proc/self/fd/{handle}").resolve().is_dir() else "sync file")
        fsync(handle)

    def watched_link(source: str, target: str) -> None:
        calls.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "link", watched_link)
    LocalStorage(tmp_path).create("a", b"1")
    assert calls == ["sync file", "link", "sync folder"]


def test_delete_ignores_files_deleted_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    for name in "abc":
        storage.write(f"folder/{name}", b"x")
    unlink, first = os.unlink, []

    def unlink_by_another(path: str, **options: int) -> None:
        unlink(path, **options)
        if not first:
            first.append(path)
            raise FileNotFoundError(errno.ENOENT, "gone", path)

    monkeypatch.setattr(os, "unlink", unlink_by_another)
    storage.delete("folder")
    assert first
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("times", [1, 100])
def test_delete_outlasts_a_writer_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("folder/first", b"x")
    rmdir, late = os.rmdir, iter(range(times))

    def rmdir_after_a_late_write(path: str, **options: int) -> None:
        if (number := next(late, None)) is not None:
            (tmp_path / "folder" / f"late-{number}").write_bytes(b"x")
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir_after_a_late_write)
    if times == 1:
        storage.delete("folder")
        assert not (tmp_path / "folder").exists()
    else:
        with pytest.raises(StorageError, match="Directory not empty"):
            storage.delete("folder")


def test_folder_with_unfinished_files_only_is_listed(tmp_path: Path) -> None:
    """It has no finished files but takes space, so garbage collection must find it."""
    folder = tmp_path / "checkpoints" / "00000001-00000001-aa"
    folder.mkdir(parents=True)
    (folder / ".unfinished-x").write_bytes(b"torn")
    assert list(LocalStorage(tmp_path).files("")) == []
    assert list(LocalStorage(tmp_path).folders("checkpoints")) == ["checkpoints/00000001-00000001-aa"]


def test_copy_is_a_hard_link(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a/1", b"x")
    storage.copy("a/1", "b/1")
    assert (tmp_path / "a/1").samefile(tmp_path / "b/1")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("reason", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_copy_without_hard_links_copies_and_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a/1", b"x" * 100_000)
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), real(handle))[1])

    def refuse(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "link", refuse)
    storage.copy("a/1", "b/1")
    assert storage.read("b/1") == b"x" * 100_000
    copied = (tmp_path / "b/1").stat()
    assert not (tmp_path / "a/1").samefile(tmp_path / "b/1")
    assert {copied.st_ino, (tmp_path / "b").stat().st_ino} <= set(synced)
    assert leftovers(tmp_path) == []
