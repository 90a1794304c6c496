"""The behaviour that all stores share, tested on each of them."""

import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.tasks.foundation.errors import FileAlreadyThere, FileMissing, StorageError
from baton.tasks.foundation.storage.interface import FileStat, Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.storage.opening import open_storage
from baton.tasks.foundation.storage.transfers import checksum_bytes, checksum_file

# The check value in the definition of crc32c.
VECTOR = b"123456789"
VECTOR_CRC32C = "e3069283"


@pytest.fixture(params=["file", "gs", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "file":
        yield LocalStorage(tmp_path / "root")
        return
    if request.param == "gs":
        request.getfixturevalue("cloud")
        yield open_storage("gs://bucket/some/root", relative_to=tmp_path)
        return
    root = f"test-{uuid.uuid4().hex}/root"
    yield MemoryStorage(root)
    MemoryStorage(root).delete("")


def together(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in `count` threads that start together; an error in one fails the test."""
    begin = threading.Barrier(count, timeout=300)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        begin.wait()
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as many thread switches as possible
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def test_created_file_is_read_back(storage: Storage) -> None:
    for data in (b"", b"a", bytes(range(256)) * 5000):
        path = f"deep/er/{len(data)}"
        assert not storage.exists(path)
        storage.create(path, data)
        assert storage.exists(path)
        assert storage.read(path) == data


def test_create_never_overwrites(storage: Storage) -> None:
    storage.create("log/0", b"first")
    with pytest.raises(FileAlreadyThere) as refused:
        storage.create("log/0", b"second")
    assert "log/0 already exists" in str(refused.value)
    storage.write("log/1", b"written")
    with pytest.raises(FileAlreadyThere):
        storage.create("log/1", b"second")
    assert (storage.read("log/0"), storage.read("log/1")) == (b"first", b"written")
    assert sorted(storage.files("")) == ["log/0", "log/1"]


def test_deleted_file_can_be_created_again(storage: Storage) -> None:
    storage.create("a", b"1")
    storage.delete("a")
    storage.create("a", b"2")
    assert storage.read("a") == b"2"


def test_one_of_racing_creates_wins(storage: Storage) -> None:
    writers, rounds = 16, 20
    won: dict[int, list[int]] = {number: [] for number in range(rounds)}
    begin = threading.Barrier(writers, timeout=300)

    def work(writer: int) -> None:
        for number in range(rounds):
            begin.wait()
            try:
                storage.create(f"log/{number}", f"{writer}:".encode() * 1000)
            except FileAlreadyThere:
                continue
            won[number].append(writer)

    together(writers, work)
    assert {number: len(winners) for number, winners in won.items()} == dict.fromkeys(range(rounds), 1)
    for number, [winner] in won.items():
        assert storage.read(f"log/{number}") == f"{winner}:".encode() * 1000
    assert sorted(storage.files("log")) == sorted(f"log/{number}" for number in range(rounds))


def test_reader_sees_old_or_new_bytes(storage: Storage) -> None:
    versions = [bytes([number]) * 300_000 for number in range(4)]
    storage.write("a", versions[0])
    seen = [0]
    done = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            try:
                for round_ in range(60):
                    storage.write("a", versions[round_ % len(versions)])
            finally:
                done.set()
            return
        while not done.is_set():
            data = storage.read("a")
            assert data == bytes([data[0]]) * 300_000
            seen[0] += 1

    together(4, work)
    assert seen[0] > 0


def test_listing_during_writes_succeeds(storage: Storage) -> None:
    done = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            try:
                for name in range(150):
                    storage.create(f"many/{name}", b"x")
            finally:
                done.set()
            return
        while not done.is_set():
            assert all(path.startswith("many/") for path in storage.files("many"))

    together(3, work)
    assert len(list(storage.files("many"))) == 150


def test_stat_has_size_and_checksum(storage: Storage) -> None:
    storage.create("a", VECTOR)
    assert storage.stat("a") == FileStat(size=9, crc32c=VECTOR_CRC32C)
    storage.create("empty", b"")
    assert storage.stat("empty") == FileStat(size=0, crc32c="00000000")


def test_checksums_of_bytes_and_of_files_agree(tmp_path: Path) -> None:
    assert checksum_bytes(VECTOR) == FileStat(size=9, crc32c=VECTOR_CRC32C)
    # 32 zero bytes, from RFC 3720; the leading zeros of a checksum are kept.
    assert checksum_bytes(bytes(32)).crc32c == "8a9136aa"
    data = bytes(range(256)) * 10_000  # more than one block
    (tmp_path / "a").write_bytes(data)
    assert checksum_file(tmp_path / "a") == checksum_bytes(data)


def test_upload_replaces_a_file(storage: Storage, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"old")
    storage.upload(source, "x/ckpt.index")
    source.write_bytes(VECTOR)
    assert storage.upload(source, "x/ckpt.index") == FileStat(size=9, crc32c=VECTOR_CRC32C)
    assert storage.read("x/ckpt.index") == VECTOR
    assert source.read_bytes() == VECTOR
    assert list(storage.files("x")) == ["x/ckpt.index"]


def test_buffers_become_one_file(storage: Storage) -> None:
    storage.write("x/ckpt.data", b"old")
    parts = [b"", VECTOR[:4], b"", VECTOR[4:]]
    assert storage.write_buffers("x/ckpt.data", list(map(memoryview, parts))) == FileStat(size=9, crc32c=VECTOR_CRC32C)
    assert storage.read("x/ckpt.data") == VECTOR
    assert list(storage.files("x")) == ["x/ckpt.data"]
    assert storage.write_buffers("x/empty", []) == checksum_bytes(b"")
    assert storage.read("x/empty") == b""


def test_copy_is_independent_of_the_original(storage: Storage) -> None:
    storage.write("x/ckpt.index", VECTOR)
    storage.write("y/ckpt.index", b"replaced")
    for _ in range(2):
        storage.copy("x/ckpt.index", "y/ckpt.index")
        assert storage.read("y/ckpt.index") == VECTOR
    storage.write("x/ckpt.index", b"new")
    assert storage.read("y/ckpt.index") == VECTOR
    storage.delete("x")
    assert storage.stat("y/ckpt.index") == FileStat(size=9, crc32c=VECTOR_CRC32C)
    assert list(storage.files("")) == ["y/ckpt.index"]
    with pytest.raises(FileMissing, match=r"x/ckpt\.index does not exist"):
        storage.copy("x/ckpt.index", "z/ckpt.index")
    assert list(storage.files("")) == ["y/ckpt.index"]


def test_download_returns_size_and_checksum(storage: Storage, tmp_path: Path) -> None:
    storage.create("x/ckpt.index", VECTOR)
    target = tmp_path / "here"
    assert storage.download("x/ckpt.index", target) == FileStat(size=9, crc32c=VECTOR_CRC32C)
    assert target.read_bytes() == VECTOR
    assert storage.download("x/ckpt.index", target, begin=2, size=5) == checksum_bytes(VECTOR[2:7])
    assert target.read_bytes() == VECTOR[2:7]
    assert storage.download("x/ckpt.index", target, begin=9) == checksum_bytes(b"")
    assert storage.checksum("x/ckpt.index") == storage.stat("x/ckpt.index")
    assert storage.checksum("x/ckpt.index", begin=2, size=5) == checksum_bytes(VECTOR[2:7])
    there = storage.local_path("x/ckpt.index")
    assert there is None or there.read_bytes() == VECTOR


def test_download_beyond_the_end_is_refused(storage: Storage, tmp_path: Path) -> None:
    storage.create("x", VECTOR)
    with pytest.raises(StorageError, match="x ends 4 bytes too early"):
        storage.download("x", tmp_path / "here", begin=4, size=9)
    with pytest.raises(StorageError, match="x ends 4 bytes too early"):
        storage.checksum("x", begin=4, size=9)


def test_unwritable_download_target_is_named(storage: Storage, tmp_path: Path) -> None:
    storage.create("x", VECTOR)
    with pytest.raises(StorageError, match="nowhere/here: cannot write the downloaded file"):
        storage.download("x", tmp_path / "nowhere/here")


def test_read_range_returns_the_bytes_in_it(storage: Storage) -> None:
    storage.create("x", VECTOR)
    assert storage.read_range("x", 0, 4) == VECTOR[:4]
    assert storage.read_range("x", 7, 100) == VECTOR[7:]
    assert storage.read_range("x", 9, 1) == b""
    assert storage.read_range("x", 3, 0) == b""


def test_missing_file_is_reported(storage: Storage, tmp_path: Path) -> None:
    assert not storage.exists("no/thing")
    for ask in (storage.read, storage.stat, storage.checksum):
        with pytest.raises(FileMissing, match="no/thing does not exist"):
            ask("no/thing")
    with pytest.raises(FileMissing, match="no/thing does not exist"):
        storage.download("no/thing", tmp_path / "here")
    with pytest.raises(FileMissing, match="no/thing does not exist"):
        storage.read_range("no/thing", 0, 1)
    assert list(storage.files("no")) == []
    assert list(storage.files("")) == []


def test_folder_is_not_a_file(storage: Storage) -> None:
    storage.create("folder/file", b"x")
    assert not storage.exists("folder")
    assert not storage.exists("")


def test_files_are_listed_below_the_folder_only(storage: Storage) -> None:
    for path in ("a/1", "a/b/2", "ab/3", "4"):
        storage.create(path, b"x")
    assert sorted(storage.files("a")) == ["a/1", "a/b/2"]
    assert sorted(storage.files("")) == ["4", "a/1", "a/b/2", "ab/3"]


def test_delete_removes_files_and_folders_and_may_be_repeated(storage: Storage) -> None:
    for path in ("a/1", "a/b/2", "ab/3", "4"):
        storage.create(path, b"x")
    for _ in range(2):
        storage.delete("a")
        storage.delete("4")
        storage.delete("never/there")
        assert list(storage.files("")) == ["ab/3"]


def test_concurrent_deletes_of_one_folder_succeed(storage: Storage) -> None:
    for round_ in range(10):
        for name in range(30):
            storage.write(f"{round_}/{name % 3}/{name}", b"x")
        together(3, lambda _, folder=str(round_): storage.delete(folder))  # type: ignore[misc]
        assert list(storage.files(str(round_))) == []


def test_at_returns_a_store_further_down(storage: Storage) -> None:
    below = storage.at("runs").at("digits")
    below.create("log/0", b"x")
    assert storage.read("runs/digits/log/0") == b"x"
    assert list(below.files("log")) == ["log/0"]
    assert below.uri == f"{storage.uri}/runs/digits"


def test_folders_are_listed_one_level_deep(storage: Storage) -> None:
    for path in ("a/1", "a/b/2", "c/d/e/3", "4"):
        storage.write(path, b"x")
    assert sorted(storage.folders("")) == ["a", "c"]
    assert sorted(storage.folders("c")) == ["c/d"]
    assert list(storage.folders("no")) == []
