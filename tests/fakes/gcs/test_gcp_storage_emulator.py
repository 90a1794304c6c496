"""gcsfs against gcp-storage-emulator, an independent fake: both fakes agree on plain I/O.

That emulator ignores preconditions, as the last test shows, so nothing here proves anything about commits. It serves
one connection at a time and drops connections when more than five wait, so these tests send one request at a time.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gcp_storage_emulator import server as emulator


@pytest.fixture
def fs() -> Iterator[Any]:
    running = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    running.start()
    try:
        port = running._api._httpd.server_address[1]
        made = importlib.import_module("gcsfs.core").GCSFileSystem(
            token="anon",  # noqa: S106  # no secret
            endpoint_url=f"http://127.0.0.1:{port}",
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        yield made
        made.close_session(made.loop, made.session)
    finally:
        running.stop()


def test_files_are_written_read_listed_and_deleted(fs: Any) -> None:
    for name in ("a/1", "a/2", "b"):
        fs.pipe_file(f"bucket/{name}", name.encode() * 1000)
    assert fs.find("bucket") == ["bucket/a/1", "bucket/a/2", "bucket/b"]
    assert fs.cat_file("bucket/a/2") == b"a/2" * 1000
    assert fs.cat_file("bucket/a/2", start=3, end=6) == b"a/2"
    assert fs.info("bucket/b")["size"] == 1000
    fs.rm_file("bucket/a/1")
    assert fs.find("bucket") == ["bucket/a/2", "bucket/b"]
    with pytest.raises(FileNotFoundError):
        fs.cat_file("bucket/a/1")


def test_resumable_upload_stores_every_byte(fs: Any, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4096 * 6
    (tmp_path / "large").write_bytes(data)
    fs.put_file(str(tmp_path / "large"), "bucket/large", chunksize=2**20)
    fs.get_file("bucket/large", str(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == data


def test_emulator_ignores_preconditions(fs: Any) -> None:
    fs.pipe_file("bucket/entry", b"first", mode="create")
    fs.pipe_file("bucket/entry", b"second", mode="create")
    assert fs.cat_file("bucket/entry") == b"second", "a create-only write replaced another"
