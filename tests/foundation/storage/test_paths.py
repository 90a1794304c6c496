"""No path leaves its store: not by its text in any store, and not by a link on a local disk."""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.tasks.foundation.contracts.run_spec import WeightsSource
from baton.tasks.foundation.errors import PathRefused
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.storage.opening import open_storage
from baton.tasks.init_or_restore.weights.location import locate_weights

PATHS = {
    "up": "../victim",
    "up from below": "log/../../victim",
    "up only": "..",
    "absolute": "/victim",
    "another address": "gs://other/victim",
    "dot": "./victim",
    "empty part": "log//victim",
    "trailing slash": "log/",
    "backslash": "..\\victim",
    "null": "log/\0",
    "newline": "log/a\nb",
    "escape": "log/\x1b[31m",
    "one-byte escape": "log/\x9b31m",
    "lone surrogate": "log/\ud800",
    "long name": "n" * 256,
    "long": "/".join(["n" * 200] * 6),
    "very long": "n" * 1_000_000,
}


@pytest.fixture(params=["file", "gs", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "file":
        yield LocalStorage(tmp_path / "above" / "root")
    elif request.param == "gs":
        request.getfixturevalue("cloud")
        yield open_storage("gs://bucket/above/root", relative_to=tmp_path)
    else:
        name = uuid.uuid4().hex
        yield MemoryStorage(f"{name}/root")
        MemoryStorage(name).delete("")


def operations(store: Storage, path: str, here: Path) -> dict[str, Callable[[], object]]:
    """Every operation of a store that takes a path."""
    return {
        "at": lambda: store.at(path).read("a"),
        "read": lambda: store.read(path),
        "exists": lambda: store.exists(path),
        "create": lambda: store.create(path, b"x"),
        "write": lambda: store.write(path, b"x"),
        "upload": lambda: store.upload(here, path),
        "copy from": lambda: store.copy(f"home/{path}", "home/b"),
        "copy to": lambda: store.copy("home/a", f"home/{path}"),
        "stat": lambda: store.stat(path),
        "checksum": lambda: store.checksum(path),
        "local_path": lambda: store.local_path(path),
        "download": lambda: store.download(path, here.with_name("there")),
        "read_range": lambda: store.read_range(path, 0, 1),
        "files": lambda: list(store.files(path)),
        "folders": lambda: list(store.folders(path)),
        "delete": lambda: store.delete(path),
    }


def refusal_of(operation: Callable[[], object], name: str) -> str:
    try:
        operation()
    except PathRefused as refused:
        return str(refused)
    pytest.fail(f"{name}: not refused")


def test_path_outside_the_root_is_refused(storage: Storage, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.write_bytes(b"here")
    storage.write("home/a", b"a")
    for kind, path in PATHS.items():
        for name, operation in operations(storage, path, here).items():
            if name == "local_path" and not isinstance(storage, LocalStorage):
                continue  # always None
            refused = refusal_of(operation, f"{name} of {kind}")
            assert "not a path below this folder" in refused
            assert len(refused) < 1000
            assert refused.isprintable()
    assert list(storage.files("")) == ["home/a"]


def test_usual_names_are_accepted(storage: Storage) -> None:
    for path in (
        "a",
        "b/b.c",
        "checkpoints/00000001-00000002-abc/ckpt.data-00000-of-00001",
        "..a/b..",
        "ä ö/日本",
        ".x",
    ):
        storage.write(path, b"x")
        assert storage.read(path) == b"x"
    assert len(list(storage.files(""))) == 6


def linked(tmp_path: Path) -> tuple[LocalStorage, Path]:
    """A home with three links that leave it, and the folder they lead to."""
    home, victim = tmp_path / "home", tmp_path / "victim"
    (victim / "below").mkdir(parents=True)
    (victim / "file").write_bytes(b"victim")
    (victim / "below" / "file").write_bytes(b"victim")
    (home / "log").mkdir(parents=True)
    (home / "log" / "a").write_bytes(b"a")
    (home / "checkpoints").symlink_to(victim)
    (home / "log" / "out").symlink_to(victim / "file")
    (home / "log" / "dangling").symlink_to(victim / "new")
    return LocalStorage(home), victim


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("path", ["checkpoints/file", "checkpoints/below", "checkpoints/new/file"])
def test_folder_linked_outside_is_refused(path: str, tmp_path: Path) -> None:
    home, victim = linked(tmp_path)
    here = tmp_path / "here"
    here.write_bytes(b"here")
    before = tree(victim)
    for name, operation in operations(home, path, here).items():
        if name in {"at", "copy from", "copy to"}:  # homes below a storage root may be links
            continue
        assert f"checkpoints is a link to {victim}, outside of" in refusal_of(operation, name)
    assert tree(victim) == before


def test_file_linked_outside_is_neither_read_nor_written(tmp_path: Path) -> None:
    home, victim = linked(tmp_path)
    before = tree(victim)
    for path in ("log/out", "log/dangling"):
        for operation in (home.read, home.stat, home.exists, home.local_path):
            with pytest.raises(PathRefused, match="is a link to"):
                operation(path)
        for write in (home.write, home.create):
            with pytest.raises(PathRefused, match="is a link to"):
                write(path, b"x")
    assert tree(victim) == before


def test_delete_follows_no_links(tmp_path: Path) -> None:
    home, victim = linked(tmp_path)
    before = tree(victim)
    home.delete("checkpoints")
    home.delete("log")
    assert tree(victim) == before
    assert os.listdir(home.root) == []  # noqa: PTH208


def test_pipe_is_refused(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    (tmp_path / "log").mkdir()
    os.mkfifo(tmp_path / "log" / "HINT")
    with pytest.raises(PathRefused, match="HINT is neither a file nor a folder"):
        home.read("log/HINT")
    home.delete("log")
    assert not (tmp_path / "log").exists()


def test_storage_home_and_datasets_may_be_links(tmp_path: Path) -> None:
    """The storage, a home and datasets/ may be on other disks, and a home may link within itself."""
    for disk in ("storage", "home", "datasets"):
        (tmp_path / "disks" / disk).mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disks" / "storage")
    root = LocalStorage(tmp_path / "runs")
    (root.root / "digits").symlink_to(tmp_path / "disks" / "home")
    (root.root / "datasets").symlink_to(tmp_path / "disks" / "datasets")
    home = root.at("digits")
    home.create("log/0", b"x")
    (home.root / "log" / "1").symlink_to("0")
    (home.root / "log" / "2").hardlink_to(home.root / "log" / "0")
    assert home.read("log/1") == home.read("log/2") == b"x"
    root.create("datasets/abc/manifest.json", b"x")
    assert root.read("datasets/abc/manifest.json") == root.at("datasets/abc").read("manifest.json") == b"x"
    root.copy("digits/log/0", "forked/log/0")
    assert root.at("forked").read("log/0") == b"x"
    root.delete("datasets/abc")
    assert os.listdir(tmp_path / "disks" / "datasets") == []  # noqa: PTH208


def test_refused_names_are_not_listed(tmp_path: Path) -> None:
    for name in ("a", "b\nc", "d\\e", "f\x1b[31m"):
        (tmp_path / name).mkdir()
        (tmp_path / "a" / name).write_bytes(b"x")
    home = LocalStorage(tmp_path)
    assert list(home.folders("")) == ["a"]
    assert list(home.files("")) == ["a/a"]


def test_weights_may_be_links_but_not_inside_a_home(tmp_path: Path) -> None:
    """Download caches link from the name to the file."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "4f").write_bytes(b"x")
    model, home = tmp_path / "model", tmp_path / "home"
    (home / "log").mkdir(parents=True)
    model.mkdir()
    for link in (model / "saved_model.pb", home / "log" / "00000000.json"):
        link.symlink_to(tmp_path / "blobs" / "4f")
    assert locate_weights(WeightsSource(source="model"), tmp_path).kind == "saved_model"
    place = locate_weights(WeightsSource(source="home"), tmp_path)
    assert place.kind == "run"
    with pytest.raises(PathRefused, match="is a link to"):
        place.storage.read("log/00000000.json")
