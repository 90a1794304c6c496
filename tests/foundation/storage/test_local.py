"""A local disk that fails: what is said, and that nothing half-written is ever seen."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.foundation.errors import FileAlreadyThere, FileMissing, InvalidInput, StorageError
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.opening import open_storage
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


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root may write anywhere: become somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.slow
def test_of_racing_processes_exactly_one_wins(tmp_path: Path) -> None:
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
def test_after_a_kill_every_visible_file_is_complete(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"source" * 50_000)
    root = tmp_path / "root"
    for kill in range(6):
        with python(ENDLESS, str(root), str(source)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "going\n"
            threading.Event().wait(0.003 * kill)  # to hit another place each time
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
    assert listed == [[], ["a"], ["a", "b"]]
    assert on_disk == [1, 1, 1]
    assert leftovers(tmp_path) == []


def test_a_file_is_durable_before_it_has_its_name_and_the_name_before_create_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS])
def test_without_hard_links_a_create_is_refused_with_what_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match=r"without hard links .* use a local disk, NFS or gs://") as refused:
        LocalStorage(tmp_path).create("log/0", b"x")
    assert str(tmp_path / "log") in str(refused.value)
    assert not isinstance(refused.value, FileAlreadyThere)
    assert list(LocalStorage(tmp_path).files("")) == []
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("verb", ["create", "write", "upload"])
def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, verb: str
) -> None:
    def full(_: int) -> None:
        raise OSError(code, os.strerror(code))

    source = tmp_path / "source"
    source.write_bytes(b"new")
    storage = LocalStorage(tmp_path / "root")
    storage.write("kept", b"old")
    work = {
        "create": lambda: storage.create("new", b"new"),
        "write": lambda: storage.write("kept", b"new"),
        "upload": lambda: storage.upload(source, "kept"),
    }
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="no space left on the disk; free some") as refused:
        work[verb]()
    assert refused.value.retryable
    assert storage.read("kept") == b"old"
    assert list(storage.files("")) == ["kept"]
    assert leftovers(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """64 KiB of real disk; only root may mount one."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    folder = tmp_path / "disk"
    folder.mkdir()
    if mount is None or umount is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    if subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True, check=False
    ).returncode:
        pytest.skip("this machine does not let root mount")
    try:
        yield folder
    finally:
        subprocess.run([umount, folder], check=True)


def test_a_disk_that_is_really_full(small_disk: Path, tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.write_bytes(b"x" * 100_000)
    storage = LocalStorage(small_disk)
    storage.create("kept", b"k" * 10_000)
    with pytest.raises(StorageError, match=r"kept2.* no space left"):
        storage.create("kept2", b"x" * 100_000)
    with pytest.raises(StorageError, match=r"kept.* no space left"):
        storage.write("kept", b"x" * 100_000)
    with pytest.raises(StorageError, match=r"kept.* no space left"):
        storage.upload(source, "kept")
    assert list(storage.files("")) == ["kept"]
    assert storage.read("kept") == b"k" * 10_000
    assert leftovers(small_disk) == []
    storage.create("kept2", b"x" * 10_000)  # what failed gave its space back


def test_a_folder_that_must_not_be_written_is_named(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)  # so that the unprivileged one gets as far as here
    with unprivileged(), pytest.raises(StorageError, match="permission denied; see who owns the folder") as refused:
        LocalStorage(locked / "root").create("log/0", b"x")
    assert str(locked / "root") in str(refused.value)
    assert list(locked.iterdir()) == []


@pytest.mark.parametrize("verb", ["create", "write"])
@pytest.mark.parametrize("path", ["log/0", "log/deep/0"])
def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path, verb: str, path: str) -> None:
    (tmp_path / "log").write_text("a file")
    with pytest.raises(StorageError, match="a file stands where a folder is needed") as refused:
        getattr(LocalStorage(tmp_path), verb)(path, b"x")
    assert not isinstance(refused.value, FileAlreadyThere | FileMissing)
    assert str(tmp_path / path) in str(refused.value)
    assert (tmp_path / "log").read_text() == "a file"


def test_a_disk_that_fails_otherwise_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        LocalStorage(tmp_path).create("a", b"x")


def test_a_file_that_another_deleted_first_does_not_stop_a_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    for name in "abc":
        storage.write(f"folder/{name}", b"x")
    unlink, first = os.unlink, []

    def beaten_to_it(path: str, **options: int) -> None:
        unlink(path, **options)
        if not first:
            first.append(path)
            raise FileNotFoundError(errno.ENOENT, "gone", path)

    monkeypatch.setattr(os, "unlink", beaten_to_it)
    storage.delete("folder")
    assert first
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_upload_was_killed_is_still_seen(tmp_path: Path) -> None:
    """Nothing finished is in it, but it takes room: the sweep must find it."""
    folder = tmp_path / "checkpoints" / "00000001-00000001-aa"
    folder.mkdir(parents=True)
    (folder / ".unfinished-x").write_bytes(b"torn")
    assert list(LocalStorage(tmp_path).files("")) == []
    assert list(LocalStorage(tmp_path).folders("checkpoints")) == ["checkpoints/00000001-00000001-aa"]


@pytest.mark.parametrize("address", ["a\0b", "x" * 5000, "taken/sub"])
def test_an_address_that_is_no_folder_is_refused(tmp_path: Path, address: str) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(InvalidInput, match="name a folder"):
        open_storage(address, relative_to=tmp_path)


def test_a_home_folder_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert open_storage("~/runs", relative_to=tmp_path).uri == str(tmp_path / "me" / "runs")


def test_a_copy_is_a_hard_link(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a/1", b"x")
    storage.copy("a/1", "b/1")
    assert (tmp_path / "a/1").samefile(tmp_path / "b/1")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("reason", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_where_no_hard_link_can_be_made_the_bytes_are_copied_and_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
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


def test_a_copy_onto_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a/1", b"x")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StorageError, match="b/1: no space left on the disk"):
        storage.copy("a/1", "b/1")
    assert list(storage.files("")) == ["a/1"]
    assert leftovers(tmp_path) == []
