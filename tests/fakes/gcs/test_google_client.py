"""The official client, which verifies checksums, pages and preconditions itself, against the fake."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.api_core.exceptions import NotFound, PreconditionFailed
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption

from tests.fakes.gcs.server import FakeGcs, FaultPlan

QUANTUM = 256 * 1024
LARGE = os.urandom(9 * 2**20 + 12345)


@pytest.fixture
def server() -> Iterator[FakeGcs]:
    with FakeGcs() as fake:
        yield fake
        assert fake.errors == []


@pytest.fixture
def client(server: FakeGcs) -> storage.Client:
    return storage.Client(project="p", credentials=AnonymousCredentials(), client_options={"api_endpoint": server.url})


@pytest.fixture
def bucket(client: storage.Client) -> Iterator[storage.Bucket]:
    yield client.bucket("bucket")
    client.close()


@pytest.mark.parametrize("checksum", ["crc32c", None])
def test_small_object_keeps_bytes_and_metadata(bucket: storage.Bucket, server: FakeGcs, checksum: str | None) -> None:
    blob = bucket.blob("a/b c")
    blob.metadata = {"step": "12"}
    blob.upload_from_string(b"-\r\n\x00data", checksum=checksum)
    assert server.store.bytes("bucket", "a/b c") == b"-\r\n\x00data"
    found = bucket.get_blob("a/b c")
    assert found is not None
    assert found.metadata == {"step": "12"}
    assert found.download_as_bytes(checksum=checksum) == b"-\r\n\x00data"
    assert (found.size, found.crc32c, found.generation) == (8, blob.crc32c, blob.generation)


def test_large_file_uses_a_resumable_upload(bucket: storage.Bucket, server: FakeGcs, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(LARGE)
    blob = bucket.blob("large", chunk_size=QUANTUM)
    blob.upload_from_filename(str(tmp_path / "large"), checksum="crc32c", if_generation_match=0)
    assert server.store.bytes("bucket", "large") == LARGE
    assert server.count("upload.chunk") == -(-len(LARGE) // QUANTUM)
    bucket.blob("large").download_to_filename(str(tmp_path / "again"), checksum="crc32c")
    assert (tmp_path / "again").read_bytes() == LARGE
    assert bucket.blob("large", chunk_size=QUANTUM * 8).download_as_bytes() == LARGE


def test_corrupted_download_is_detected(bucket: storage.Bucket, server: FakeGcs) -> None:
    blob = bucket.blob("n")
    blob.upload_from_string(b"data" * 1000)
    server.store.corrupt("bucket", "n", bit=77)
    with pytest.raises(DataCorruption):
        blob.download_as_bytes(checksum="crc32c")


def test_corrupted_upload_is_detected(bucket: storage.Bucket, server: FakeGcs) -> None:
    server.faults = FaultPlan.scripted([{"fault": "corrupt-upload", "match": {"kind": "upload.chunk"}}])
    blob = bucket.blob("n", chunk_size=QUANTUM)
    with pytest.raises(Exception, match="CRC32C"):
        blob.upload_from_string(LARGE, checksum="crc32c")
    assert server.store.names("bucket") == []


def test_second_create_is_refused(bucket: storage.Bucket, server: FakeGcs) -> None:
    bucket.blob("n").upload_from_string(b"first", if_generation_match=0)
    with pytest.raises(PreconditionFailed, match="pre-conditions you specified did not hold"):
        bucket.blob("n").upload_from_string(b"second", if_generation_match=0)
    assert server.store.bytes("bucket", "n") == b"first"


def test_pages_prefixes_and_delimiters_are_listed(client: storage.Client, server: FakeGcs) -> None:
    names = [f"{folder}/{number:03d}" for folder in "abc" for number in range(25)] + ["top", "a.txt", "b/"]
    for name in names:
        server.store.put("bucket", name, b"")
    listed = [blob.name for blob in client.list_blobs("bucket", page_size=10)]
    assert listed == sorted(names)
    assert server.count("object.list") == 8
    assert [blob.name for blob in client.list_blobs("bucket", prefix="b/01")] == [f"b/01{n}" for n in range(10)]
    for page_size in (1, 2, 3, 100):
        top = client.list_blobs("bucket", delimiter="/", page_size=page_size)
        assert [blob.name for blob in top] == ["a.txt", "top"]
        assert sorted(top.prefixes) == ["a/", "b/", "c/"]
        inside = client.list_blobs("bucket", prefix="b/", delimiter="/", page_size=page_size)
        assert [blob.name for blob in inside] == ["b/", *(f"b/{n:03d}" for n in range(25))]


def test_large_rewrite_takes_several_calls() -> None:
    with FakeGcs(rewrite_bytes_per_call=1000) as server:
        client = storage.Client(
            project="p", credentials=AnonymousCredentials(), client_options={"api_endpoint": server.url}
        )
        source, target = client.bucket("bucket").blob("source"), client.bucket("bucket").blob("target")
        source.upload_from_string(b"x" * 2500)
        token, done, total = target.rewrite(source)
        assert (done, total) == (1000, 2500)
        assert server.store.names("bucket") == ["source"]
        token, done, _ = target.rewrite(source, token=token)
        assert done == 2000
        assert target.rewrite(source, token=token)[0] is None
        assert server.store.bytes("bucket", "target") == b"x" * 2500


def test_objects_are_deleted_alone_and_in_a_batch(
    client: storage.Client, bucket: storage.Bucket, server: FakeGcs
) -> None:
    for name in ("a", "b", "c", "d"):
        server.store.put("bucket", name, b"")
    bucket.blob("a").delete()
    with pytest.raises(NotFound, match="No such object: bucket/a"):
        bucket.blob("a").delete()
    with client.batch():
        bucket.blob("b").delete()
        bucket.blob("c").delete()
    assert server.store.names("bucket") == ["d"]
    with pytest.raises(NotFound), client.batch():
        bucket.blob("missing").delete()
