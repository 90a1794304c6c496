"""gcsfs, on which Baton's store is built, against the fake."""

import importlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gcs.server import FakeGcs, FaultPlan

# The core module has the plain file system in every environment.
GCSFileSystem = importlib.import_module("gcsfs.core").GCSFileSystem
LARGE = os.urandom(8 * 2**20)


@pytest.fixture
def fs(server: FakeGcs) -> Iterator[Any]:
    made = GCSFileSystem(token="anon", endpoint_url=server.url, skip_instance_cache=True, use_listings_cache=False)  # noqa: S106  # no secret
    yield made
    made.close_session(made.loop, made.session)


def test_small_files_are_written_and_read(fs: Any, server: FakeGcs) -> None:
    fs.pipe_file("bucket/a/b c", b"123\n--==0==--\n")
    assert server.store.bytes("bucket", "a/b c") == b"123\n--==0==--\n"
    assert fs.cat_file("bucket/a/b c") == b"123\n--==0==--\n"
    assert fs.cat_file("bucket/a/b c", start=1, end=3) == b"23"
    fs.pipe_file("bucket/empty", b"")
    assert fs.cat_file("bucket/empty") == b""


@pytest.mark.parametrize("consistency", ["none", "md5", "size"])
def test_large_files_are_transferred_in_chunks(fs: Any, server: FakeGcs, tmp_path: Path, consistency: str) -> None:
    (tmp_path / "large").write_bytes(LARGE)
    fs.put_file(str(tmp_path / "large"), "bucket/large", chunksize=2**20, consistency=consistency)
    assert server.store.bytes("bucket", "large") == LARGE
    assert server.count("upload.chunk") == 8
    assert fs.cat_file("bucket/large") == LARGE
    fs.get_file("bucket/large", str(tmp_path / "again"), consistency=consistency)
    assert (tmp_path / "again").read_bytes() == LARGE


def test_large_file_is_created_in_chunks(fs: Any, server: FakeGcs) -> None:
    fs.pipe_file("bucket/large", LARGE, chunksize=2**20, mode="create")
    assert server.store.bytes("bucket", "large") == LARGE


@pytest.mark.parametrize("size", [0, 1000, 256 * 1024, 6 * 2**20, 8 * 2**20])
def test_open_file_is_written(fs: Any, server: FakeGcs, size: int) -> None:
    with fs.open("bucket/file", "wb", block_size=2**20) as file:
        for start in range(0, size, 300_000):
            file.write(LARGE[start : min(start + 300_000, size)])
    assert server.store.bytes("bucket", "file") == LARGE[:size]
    with fs.open("bucket/file", "rb") as file:
        assert file.read() == LARGE[:size]


def test_second_create_is_refused(fs: Any, server: FakeGcs) -> None:
    fs.pipe_file("bucket/n", b"first", mode="create")
    with pytest.raises(FileExistsError):
        fs.pipe_file("bucket/n", b"second", mode="create")
    with pytest.raises(FileExistsError):
        fs.pipe_file("bucket/n", LARGE, chunksize=2**20, mode="create")
    assert server.store.bytes("bucket", "n") == b"first"


def test_session_that_lost_the_race_is_cancelled(fs: Any, server: FakeGcs) -> None:
    server.faults = FaultPlan.scripted(
        [{"match": {"kind": "upload.chunk"}, "fault": "slow", "delay_seconds": 0.3, "skip": 1}]
    )

    def put_during_the_upload() -> None:
        while not server.count("upload.chunk"):
            time.sleep(0.01)
        server.store.put("bucket", "n", b"first")

    winner = threading.Thread(target=put_during_the_upload)
    winner.start()
    with pytest.raises(FileExistsError):
        fs.pipe_file("bucket/n", LARGE[: 2**20], chunksize=2**19, mode="create")
    winner.join()
    assert server.count("upload.cancel") == 1
    assert server.store.bytes("bucket", "n") == b"first"


def test_folders_are_listed_and_described(fs: Any) -> None:
    for name in ("a/1", "a/2", "b/c/3", "top"):
        fs.pipe_file(f"bucket/{name}", name.encode())
    assert fs.find("bucket") == ["bucket/a/1", "bucket/a/2", "bucket/b/c/3", "bucket/top"]
    assert fs.ls("bucket", detail=False) == ["bucket/a", "bucket/b", "bucket/top"]
    assert fs.info("bucket/a/1")["size"] == 3
    assert fs.info("bucket/a")["type"] == "directory"
    assert fs.exists("bucket/top")
    assert not fs.exists("bucket/none")
    with pytest.raises(FileNotFoundError):
        fs.cat_file("bucket/none")


def test_files_are_copied_moved_and_removed(fs: Any, server: FakeGcs) -> None:
    fs.pipe_file("bucket/a/1", b"data")
    fs.cp_file("bucket/a/1", "other/copied")
    fs.mv("bucket/a/1", "bucket/a/2")
    assert server.count("object.move") == 1
    assert (server.store.names("bucket"), server.store.names("other")) == (["a/2"], ["copied"])
    fs.pipe_file("bucket/a/3", b"")
    fs.rm("bucket/a", recursive=True)
    assert server.store.names("bucket") == []
    with pytest.raises(FileNotFoundError):
        fs.rm("bucket/none")


def test_objects_are_deleted_in_a_batch(fs: Any, server: FakeGcs) -> None:
    """gcsfs sends batches like this to the real service when it deletes many objects."""
    for number in range(3):
        server.store.put("bucket", f"n {number}", b"")
    responses = importlib.import_module("fsspec.asyn").sync(
        fs.loop, fs._rm_files, ["bucket/n 0", "bucket/n 2", "bucket/none"]
    )
    assert responses[:2] == ["bucket/n 0", "bucket/n 2"]
    assert "No such object: bucket/none" in str(responses[2])
    assert server.store.names("bucket") == ["n 1"]
    assert server.count("batch") == 1


def test_files_are_merged_and_keep_attributes(fs: Any, server: FakeGcs) -> None:
    fs.pipe({"bucket/1": b"one", "bucket/2": b"two"})
    fs.merge("bucket/all", ["bucket/1", "bucket/2"])
    assert server.store.bytes("bucket", "all") == b"onetwo"
    fs.setxattrs("bucket/1", step="12")
    assert fs.getxattr("bucket/1", "step") == "12"


@pytest.mark.parametrize("fault", ["reset-before-body", "reset-after-body", "expired-token", "reset-in-response"])
def test_gcsfs_retries_after_a_fault(fs: Any, server: FakeGcs, fault: str) -> None:
    server.faults = FaultPlan.scripted([{"match": {"kind": "object.insert"}, "fault": fault}])
    fs.pipe_file("bucket/n", b"data")
    assert server.store.bytes("bucket", "n") == b"data"
    assert server.count("object.insert") == 2
