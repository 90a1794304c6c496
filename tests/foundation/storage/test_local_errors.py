"""Errors of a local disk are reported with a remedy, and leave nothing behind."""

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.foundation.errors import FileAlreadyThere, FileMissing, StorageError
from tasks.foundation.storage.local import LocalStorage


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.rglob(".unfinished-*")]


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


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS])
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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("verb", ["create", "write", "write_buffers", "upload"])
def test_full_disk_is_an_error_and_leaves_nothing(
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
    with pytest.raises(StorageError, match="no space left on the disk; free some") as refused:
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
