"""The limits of the files of a home: what is larger is not read, and nothing is written that is not read."""

import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.tasks.foundation.contracts.home_files import most_bytes, refuse_unreadable, require_readable
from baton.tasks.foundation.errors import FileTooLarge, PathRefused, TooLargeToWrite
from baton.tasks.foundation.log.files import Hint
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.fakes.gcs.server import FakeGcs

MB = 1 << 20
ATTEMPT = f"attempts/{'a' * 32}.json"
LIMITS = {
    "log/HINT": 1 << 10,
    "log/00000007.json": 16 * MB,
    "log/123456789.json": 16 * MB,
    "log/blocks/00000000.json": 64 * MB,
    "checkpoints/00000100-00000001-a/manifest.json": 32 * MB,
    "datasets/0123/manifest.json": 32 * MB,
    "code/0123456789abcdef.json": 32 * MB,
    ATTEMPT: MB,
    "attempts/closed/0a.json": 32 * MB,
    "answers/0b-1.json": 32 * MB,
    "answers/0b-1.error.json": 32 * MB,
    "audits/20260101T000000Z-0a.json": 4 * MB,
    "proofs/20260101T000000Z-0a.json": 4 * MB,
    "confusion/00000100-00000001-a.json": MB,
    "fork.json": MB,
}

Plant = Callable[[str, int], None]


@pytest.fixture(params=["folder", "memory", "bucket"])
def planted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Storage, Plant]]:
    """A store, and how somebody else puts a file of zeros of any size into it."""
    if request.param == "folder":

        def sparse(path: str, size: int) -> None:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).touch()
            os.truncate(tmp_path / path, size)

        yield LocalStorage(tmp_path), sparse
    elif request.param == "memory":
        memory = MemoryStorage(f"large-{uuid.uuid4().hex}")
        yield memory, lambda path, size: memory._put(path, bytes(size))
        memory.delete("")
    else:
        from baton.tasks.foundation.storage.gcs.storage import CloudStorage

        cloud: FakeGcs = request.getfixturevalue("cloud")
        store = CloudStorage("bucket", "team/run")
        yield store, lambda path, size: cloud.store.put("bucket", f"team/run/{path}", bytes(size))


@pytest.mark.parametrize("path", LIMITS)
def test_every_kind_of_file_has_a_limit(path: str) -> None:
    for above in ("", "digits/", "/home/me/runs/digits/", "gs://bucket/team/digits/", "memory://x/"):
        assert most_bytes(above + path) == LIMITS[path]
    refuse_unreadable(path, bytes(LIMITS[path]))
    with pytest.raises(TooLargeToWrite, match=rf"would have more than {LIMITS[path]} bytes, more than such a file may"):
        refuse_unreadable(path, bytes(LIMITS[path] + 1))


def test_what_is_only_written_has_no_limit(tmp_path: Path) -> None:
    refuse_unreadable("report/index.html", bytes(100 * MB))
    assert most_bytes("report/index.html") == 32 * MB
    own = LocalStorage(tmp_path, guarded=False)  # a source of the user's
    own.write("log/HINT", bytes(5000))
    assert len(own.read("log/HINT")) == 5000


def test_larger_files_are_not_read(planted: tuple[Storage, Plant]) -> None:
    store, plant = planted
    plant(ATTEMPT, MB)
    assert len(store.read(ATTEMPT)) == MB
    plant(ATTEMPT, MB + 1)
    with pytest.raises(FileTooLarge, match=rf"{ATTEMPT} has more than {MB} bytes"):
        store.read(ATTEMPT)
    plant("log/HINT", 2000)
    assert Hint(store).read() == 0


def test_what_no_reader_reads_is_not_written(planted: tuple[Storage, Plant]) -> None:
    store, _ = planted
    for write in (store.write, store.create):
        with pytest.raises(TooLargeToWrite):
            write(ATTEMPT, bytes(MB + 1))
        assert not store.exists(ATTEMPT)


def test_a_file_that_is_larger_than_it_says_is_not_read_beyond_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of a file of /proc is 0, and others grow while they are read."""
    store = LocalStorage(tmp_path)
    small = tmp_path.stat()
    monkeypatch.setattr(os, "fstat", lambda _: small)
    monkeypatch.setattr("baton.tasks.foundation.storage.local._require_regular", lambda *_: None)
    (tmp_path / "attempts").mkdir()
    (tmp_path / ATTEMPT).write_bytes(bytes(2 * MB))
    with pytest.raises(FileTooLarge):
        store.read(ATTEMPT)


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        ("[" + "[]," * 199_998 + "[]]", True),
        ("[" + "{}," * 200_001 + "{}]", False),
        ("[" + "7," * 999_999 + "7]", True),
        ("[" + "7," * 1_000_001 + "7]", False),
        (json.dumps({"model.py": "x = [" + "[], {}, \\ \"'" * 300_000}), True),
        ('"' + "\\\\" * MB + '"' + "[]," * 200_001, False),
        ('"' + "[]," * 200_001, False),  # a text without an end is no JSON
    ],
    ids=["lists", "too many", "values", "too many values", "in a text", "after a text", "open text"],
)
def test_lists_and_values_are_counted_but_not_those_in_texts(text: str, *, is_read: bool) -> None:
    path = "code/0123456789abcdef.json"
    if is_read:
        require_readable(path, text.encode())
        return
    with pytest.raises(FileTooLarge, match="has more than 200000 lists or 1000000 values, more than such a file may"):
        require_readable(path, text.encode())


@pytest.mark.parametrize("kind", ["pipe", "link to a device", "link to a pipe"])
def test_pipes_and_devices_are_not_opened(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    if kind == "link to a device":
        file.symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / "pipe" if "link" in kind else file)
        if "link" in kind:
            file.symlink_to("pipe")
    store = LocalStorage(tmp_path, guarded=False)
    for read in (store.read, store.checksum, store.stat, lambda path: store.read_range(path, 0, 10)):
        with pytest.raises(PathRefused, match="file is not a regular file, but a pipe or a device"):
            read("file")
    with pytest.raises(PathRefused):
        store.download("file", tmp_path / "copy")
