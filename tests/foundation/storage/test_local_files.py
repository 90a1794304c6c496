"""Files of a local disk: written past the page cache and read back; temporary ones of killed processes are swept."""

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.foundation.errors import BatonError, StorageError
from baton.tasks.foundation.storage import local_files
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.local_files import (
    ALIGNMENT,
    compare_with_buffers,
    sweep,
    sweep_once,
    temporary_file,
    temporary_folder,
    write_buffers_durably,
)
from baton.tasks.foundation.storage.transfers import checksum_bytes
from tests.support import forked

SIZES = [0, 1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT, 3 * ALIGNMENT + 5]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"of before, and longer" * 1000)
    return tmp_path / "file"


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each call of the system reads or writes: past the page cache, or through it."""
    found: list[str] = []

    def watched(name: str, function: Callable[..., int]) -> Callable[..., int]:
        def call(handle: int, *rest: Any) -> int:
            direct = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT
            found.append(f"{'direct' if direct else 'cached'} {name}")
            return function(handle, *rest)

        return call

    monkeypatch.setattr(os, "pwrite", watched("write", os.pwrite))
    monkeypatch.setattr(os, "preadv", watched("read", os.preadv))
    return found


def aligned(data: bytes) -> memoryview:
    """Bytes at the beginning of a page."""
    view = memoryview(mmap.mmap(-1, max(len(data), 1)))[: len(data)]
    view[:] = data
    return view


def allows_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@given(st.lists(st.sampled_from(SIZES), max_size=3), st.booleans())
def test_any_buffers_are_written_whole(tmp_path: Path, sizes: Sequence[int], on_pages: bool) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"of before, and longer" * 1000)
    parts = [os.urandom(size) for size in sizes]
    buffers = [aligned(part) if on_pages else memoryview(b"x" + part)[1:] for part in parts]
    write_buffers_durably(file, buffers)
    assert file.read_bytes() == b"".join(parts)
    assert compare_with_buffers(file, buffers) == checksum_bytes(b"".join(parts))


def test_pages_go_past_the_page_cache(file: Path, modes: list[str]) -> None:
    if not allows_direct(file.parent):
        pytest.skip("this file system has no direct access")
    write_buffers_durably(file, [aligned(b"x" * (2 * ALIGNMENT + 7))])
    compare_with_buffers(file, [aligned(b"x" * (2 * ALIGNMENT + 7))])
    assert modes == ["direct write", "cached write", "direct read"]


@pytest.mark.parametrize("refused_at", ["open", "write", "read"])
def test_a_file_system_without_direct_access_is_used(
    file: Path, monkeypatch: pytest.MonkeyPatch, modes: list[str], refused_at: str
) -> None:
    def refusing(function: Callable[..., int], is_direct: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if is_direct(*arguments) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return function(*arguments)

        return call

    def flags_of(handle: int, *_: Any) -> int:
        return fcntl.fcntl(handle, fcntl.F_GETFL)

    if refused_at == "open":
        monkeypatch.setattr(os, "open", refusing(os.open, lambda _path, flags, *_: flags))
    else:
        name = "pwrite" if refused_at == "write" else "preadv"
        monkeypatch.setattr(os, name, refusing(getattr(os, name), flags_of))
    data = os.urandom(2 * ALIGNMENT + 7)
    write_buffers_durably(file, [aligned(data)])
    assert compare_with_buffers(file, [aligned(data)]) == checksum_bytes(data)
    assert file.read_bytes() == data
    assert modes


@pytest.mark.parametrize("most", [1, 100, ALIGNMENT])
def test_short_writes_and_reads_are_continued(file: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: pwrite(handle, data[:most], offset))
    monkeypatch.setattr(os, "preadv", lambda handle, parts, offset: preadv(handle, [parts[0][:most]], offset))
    data = os.urandom(ALIGNMENT + 203)
    write_buffers_durably(file, [aligned(data)])
    assert compare_with_buffers(file, [aligned(data)]) == checksum_bytes(data)


@pytest.mark.parametrize("damage", ["flip first", "flip last", "cut", "longer", "empty"])
@pytest.mark.parametrize("size", [100, 2 * ALIGNMENT, 5 << 20])
def test_a_disk_that_holds_other_bytes_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, size: int
) -> None:
    def damaging(file: Path, buffers: Sequence[memoryview]) -> None:
        data = bytearray(b"".join(buffers))
        data[0 if damage == "flip first" else -1] ^= damage.startswith("flip")
        file.write_bytes({"cut": data[:-1], "longer": data + b"x", "empty": b""}.get(damage, data))

    monkeypatch.setattr("baton.tasks.foundation.storage.local.write_buffers_durably", damaging)
    storage = LocalStorage(tmp_path)
    with pytest.raises(StorageError, match=r"the disk returned other bytes than were written.* run again"):
        storage.write_buffers("x/ckpt.data", [aligned(os.urandom(size))])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_errors_of_the_disk_are_raised(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pwrite", "preadv"):

        def fail(*_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(local_files.os, name, fail)
            with pytest.raises(StorageError, match=r"Input/output error; check the disk and run again"):
                LocalStorage(file.parent).write_buffers("other", [aligned(b"x" * 5000)])
    assert [path.name for path in file.parent.iterdir()] == ["file"]


HOLDER = """
import sys, tempfile
from pathlib import Path
from baton.tasks.foundation.storage.local_files import temporary_file, temporary_folder

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
    with forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
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
