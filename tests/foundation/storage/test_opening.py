"""Addresses open the store that they name; malformed ones are refused."""

import uuid
from pathlib import Path

import pytest

from baton.tasks.foundation.errors import BatonError, InvalidInput
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.opening import open_home, open_storage


@pytest.mark.parametrize("address", ["a\0b", "x" * 5000, "taken/sub"])
def test_invalid_folder_name_is_refused(tmp_path: Path, address: str) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(InvalidInput, match="name a folder"):
        open_storage(address, relative_to=tmp_path)


def test_tilde_means_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert open_storage("~/runs", relative_to=tmp_path).uri == str(tmp_path / "me" / "runs")


def test_addresses_open_their_store(tmp_path: Path) -> None:
    for address in ("runs", "./runs", str(tmp_path / "runs"), f"file://{tmp_path}/runs"):
        store = open_storage(address, relative_to=tmp_path)
        assert store.uri == str(tmp_path / "runs")
    assert open_storage("memory://a/b", relative_to=tmp_path).uri == "memory://a/b"
    assert list(tmp_path.iterdir()) == []  # opening writes nothing


def test_linked_home_belongs_to_the_storage_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, disk = tmp_path / "storage", tmp_path / "disk"
    (disk / "moved" / "log").mkdir(parents=True)
    storage.mkdir()
    (storage / "run").symlink_to(disk / "moved")
    (tmp_path / "way").symlink_to(storage)  # a link on the way is followed, as in a run file
    monkeypatch.setenv("HOME", str(tmp_path))
    for address in (
        "storage/run",
        "storage/run/",
        "storage/./run",
        f"file://{storage}/run",
        "way/run",
        "~/storage/run",
    ):
        root, home = open_home(address, relative_to=tmp_path)
        assert (root.uri, home.uri) == (str(storage), f"{storage}/run"), address
    for address in ("storage/run/log/..", "disk/moved", "storage/run/../moved"):
        root, home = open_home(address, relative_to=tmp_path)
        assert (root.uri, home.uri) == (str(disk), f"{disk}/moved"), address
    root, home = open_home("memory://a/b", relative_to=tmp_path)
    assert (root.uri, home.uri) == ("memory://a", "memory://a/b")


def test_unknown_scheme_and_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for address, remedy in (("s3://bucket", "use a local folder"), ("file", "name a folder")):
        with pytest.raises(InvalidInput, match=remedy) as refused:
            open_storage(address, relative_to=tmp_path)
        assert address in str(refused.value)


def test_memory_store_may_have_an_empty_root(tmp_path: Path) -> None:
    store = open_storage("memory://", relative_to=tmp_path)
    path = f"top-{uuid.uuid4().hex}/a"
    store.create(path, b"x")
    try:
        assert path in set(store.files(""))
        assert store.read(path) == b"x"
    finally:
        store.delete(path.split("/", maxsplit=1)[0])


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("gs://", "'' is not a valid bucket name"),
        ("gs:///runs", "'' is not a valid bucket name"),
        ("gs://My_Bucket/runs", "'My_Bucket' is not a valid bucket name"),
        ("gs://bucket//runs", "'/runs' is not a valid prefix"),
        ("gs://bucket/a//b", "'a//b' is not a valid prefix"),
        ("gs://bucket/../b", "'../b' is not a valid prefix"),
        ("gs://bucket/a?b", "'a?b' is not a valid prefix"),
        ("gs://bucket/a#1", "'a#1' is not a valid prefix"),
        ("s3://bucket/a", "s3:// is unknown"),
    ],
)
def test_malformed_address_is_refused(address: str, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        open_storage(address, relative_to=Path.cwd())
    assert message in str(error.value)
    assert isinstance(error.value, BatonError)


@pytest.mark.parametrize(
    ("address", "uri"),
    [
        ("gs://bucket", "gs://bucket"),
        ("gs://bucket/", "gs://bucket"),
        ("gs://bucket/a/b/", "gs://bucket/a/b"),
        ("gs://my.bucket_1-x/a=1/b c", "gs://my.bucket_1-x/a=1/b c"),
    ],
)
def test_gs_address_is_a_bucket_and_a_prefix(address: str, uri: str) -> None:
    storage: Storage = open_storage(address, relative_to=Path.cwd())
    assert storage.uri == uri
    assert storage.at("run").uri == f"{uri}/run"
