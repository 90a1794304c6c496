"""The local disk: atomic, durable, one winner, no half files; its errors name the folder and the remedy, early."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.errors import FileAlreadyThere, FileMissing, StorageError, StoreRefused
from baton.tasks.foundation.storage import local as module
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.local_files import sweep
from tests.support import forked

WRITER = """
import sys
from pathlib import Path
from baton.tasks.foundation.errors import FileAlreadyThere
from baton.tasks.foundation.storage.local import LocalStorage

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
from baton.tasks.foundation.storage.local import LocalStorage

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
    return forked.Popen(
        [sys.executable, "-c", code, *arguments],
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


@pytest.mark.parametrize("path", ["log/00000001.json", "attempts/one.json"])
def test_folder_that_is_moved_away_during_a_write_is_not_made_again(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be paused between the check and the write."""
    storage = LocalStorage(tmp_path / "storage").at("home")
    storage.create("log/00000000.json", b"{}")
    assert storage.read("log/00000000.json") == b"{}"
    make = module.make_durably

    def moved_before(folder: Path, **options: Path | None) -> None:
        storage.root.rename(tmp_path / "moved")
        make(folder, **options)

    monkeypatch.setattr(module, "make_durably", moved_before)
    with pytest.raises(StorageError, match="existed before and is gone"):
        storage.create(path, b"{}")
    assert not storage.root.exists()


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


@pytest.mark.parametrize("links", [True, False])
def test_copy_stays_while_others_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """Each host and each process sweeps a folder when it first writes there."""
    storage = LocalStorage(tmp_path)
    storage.write("a/1", b"x" * 100_000)
    seen: list[str] = []

    def then_sweep(work: Callable[..., object], *args: Any) -> None:
        work(*args)
        seen.extend(leftovers(tmp_path))
        sweep(tmp_path / "b", ".unfinished-")

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", partial(then_sweep, os.link) if links else refuse)
    monkeypatch.setattr(module, "copy_durably", partial(then_sweep, module.copy_durably))
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda file, target: then_sweep(replace, file, target))
    storage.copy("a/1", "b/1")
    assert seen
    assert (tmp_path / "a/1").samefile(tmp_path / "b/1") == links
    assert storage.read("b/1") == b"x" * 100_000
    assert leftovers(tmp_path) == []


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Become another user for a while, because root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_create_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match=r"no hard links .* use a local disk, NFS or gs://") as refused:
        LocalStorage(tmp_path).create("log/0", b"x")
    assert str(tmp_path / "log") in str(refused.value)
    assert not isinstance(refused.value, FileAlreadyThere)
    assert list(LocalStorage(tmp_path).files("")) == []
    assert leftovers(tmp_path) == []


PROBLEMS = {
    errno.ENOSPC: "no space left on the disk; free some and run again",
    errno.EDQUOT: "the disk quota is exceeded, .*; delete files that count, or have it raised, and run again",
    errno.EROFS: "the disk is mounted read-only; make it writable and run again",
    errno.EMLINK: r"too many links: .*; keep fewer checkpoints .*, or take another storage folder \(--set storage=",
    errno.EXDEV: "invalid cross-device link: .*; put it on one, or take another storage folder",
    errno.ENAMETOOLONG: "the path is too long for this file system; .* a shorter name, or take another storage folder",
}


@pytest.mark.parametrize("code", PROBLEMS, ids=errno.errorcode.get)
@pytest.mark.parametrize("verb", ["create", "write", "write_buffers", "upload"])
def test_a_disk_that_refuses_is_an_error_and_leaves_nothing(
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
        "write_buffers": lambda: storage.write_buffers("kept", [memoryview(b"new")]),
        "upload": lambda: storage.upload(source, "kept"),
    }
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=PROBLEMS[code]) as refused:
        work[verb]()
    assert type(refused.value) is StorageError
    assert storage.read("kept") == b"old"
    assert list(storage.files("")) == ["kept"]
    assert leftovers(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 64 KiB. Only root can mount one."""
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


def test_really_full_disk_is_an_error(small_disk: Path, tmp_path: Path) -> None:
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
    storage.create("kept2", b"x" * 10_000)  # the failed writes freed their space


def test_missing_permission_names_the_folder(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)  # so that the other user can enter
    with unprivileged(), pytest.raises(StorageError, match="permission denied; check who owns the folder") as refused:
        LocalStorage(locked / "root").create("log/0", b"x")
    assert str(locked / "root") in str(refused.value)
    assert list(locked.iterdir()) == []


@pytest.mark.parametrize("verb", ["create", "write"])
@pytest.mark.parametrize("path", ["log/0", "log/deep/0"])
def test_file_in_place_of_a_folder_is_named(tmp_path: Path, verb: str, path: str) -> None:
    (tmp_path / "log").write_text("a file")
    with pytest.raises(StorageError, match="a file is in place of a folder") as refused:
        getattr(LocalStorage(tmp_path), verb)(path, b"x")
    assert not isinstance(refused.value, FileAlreadyThere | FileMissing)
    assert str(tmp_path / path) in str(refused.value)
    assert (tmp_path / "log").read_text() == "a file"


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EMLINK])
def test_a_commit_that_cannot_be_linked_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match=f"log/0: {PROBLEMS[code]}"):
        LocalStorage(tmp_path).create("log/0", b"x")
    assert list(LocalStorage(tmp_path).files("")) == []
    assert leftovers(tmp_path) == []


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    """By a real file system: a root whose files have more than the 4095 bytes of a path."""
    left = 4078 - len(str(tmp_path))
    storage = LocalStorage(tmp_path.joinpath(*["d" * 200] * (left // 201), "d" * (left % 201 or 1)))
    for work in (lambda: storage.create("log/00000000.json", b"x"), lambda: storage.exists("log/00000000.json")):
        with pytest.raises(StorageError, match=PROBLEMS[errno.ENAMETOOLONG]):
            work()
    with pytest.raises(StorageError, match=PROBLEMS[errno.ENAMETOOLONG]):
        LocalStorage(tmp_path / ("d" * 300)).probe()


def test_other_disk_errors_are_storage_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        LocalStorage(tmp_path).create("a", b"x")


def test_copy_to_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a/1", b"x")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StorageError, match="b/1: no space left on the disk"):
        storage.copy("a/1", "b/1")
    assert list(storage.files("")) == ["a/1"]
    assert leftovers(tmp_path) == []


def test_probe_leaves_a_writable_folder_unchanged(tmp_path: Path) -> None:
    there, missing = LocalStorage(tmp_path), LocalStorage(tmp_path / "not" / "there")
    assert there.probe() == [] == missing.probe()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("root", [".", "not/there"])
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (1, r"this file system has no hard links .*use a local disk, NFS or gs://"),
        (errno.EXDEV, r"cross-device link: .*; put it on one, or take another storage folder"),
        (errno.EMLINK, r"too many links: .*; keep fewer checkpoints"),
        (errno.ENAMETOOLONG, r"the path is too long .* a shorter name"),
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
from baton.tasks.foundation.errors import StoreRefused
from baton.tasks.foundation.storage.local import LocalStorage
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
    done = forked.run(command, capture_output=True, text=True, check=True)
    expected = [*(f"{path} True True" for path in written), "checkpoints/00000010-a passes", "link passes"]
    assert done.stdout.splitlines() == expected
    assert sorted(home.rglob("*")) == before
    assert list(other.iterdir()) == []


def test_files_of_others_beside_a_new_storage_folder_stay(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-thesis").write_text("mine")
    LocalStorage(tmp_path / "new").probe("run")
    assert [file.name for file in tmp_path.iterdir()] == [".unfinished-thesis"]
