"""Files in a store give the same examples as the same local files."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.errors import InvalidInput, SourceError
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.storage.transfers import checksum_bytes
from baton.tasks.prepare_data.sources.source_files import SourceFile, find_files
from baton.tasks.prepare_data.sources.verified_reads import map_ahead

FILES = {
    "parts/1.csv": "a,y\n1,0\n2,1\n",
    "parts/2.csv": "a,y\n3,1\n",
    "corpus/a.txt": "01234567",
    "corpus/b/one.txt": "89abcdef",
}


@pytest.fixture
def remote() -> Iterator[MemoryStorage]:
    storage = MemoryStorage("remote-test")
    storage.delete("")
    yield storage
    storage.delete("")


@pytest.fixture
def filled(workshop: Any, remote: MemoryStorage) -> MemoryStorage:
    """The same files locally and in the store."""
    for name, content in FILES.items():
        workshop.write(name, content)
        remote.write(name, content.encode())
    return remote


def found(path: str, suffix: str = "") -> list[str]:
    return [file.uri.removeprefix("memory://remote-test/") for file in find_files(path, Path(), suffix=suffix)]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("memory://remote-test/parts/1.csv", ["parts/1.csv"]),
        ("memory://remote-test/parts", ["parts/1.csv", "parts/2.csv"]),
        ("memory://remote-test/parts/", ["parts/1.csv", "parts/2.csv"]),
        ("memory://remote-test", sorted(FILES)),
        ("memory://remote-test/*/?.csv", ["parts/1.csv", "parts/2.csv"]),
        ("memory://remote-test/parts/[2-9].csv", ["parts/2.csv"]),
        ("memory://remote-test/*.txt", []),
        ("memory://remote-test/**/*.txt", ["corpus/a.txt", "corpus/b/one.txt"]),
        ("memory://remote-test/corpus/*", ["corpus/a.txt"]),
        ("memory://remote-test/part", []),
    ],
)
@pytest.mark.usefixtures("filled")
def test_files_are_found_by_name_folder_and_pattern(path: str, names: list[str]) -> None:
    if names:
        assert found(path) == names
        return
    with pytest.raises(SourceError, match=r"no files at memory://remote-test.*name a file, or a folder"):
        found(path)


@pytest.mark.usefixtures("filled")
def test_only_files_with_the_suffix_are_found() -> None:
    assert found("memory://remote-test", ".txt") == ["corpus/a.txt", "corpus/b/one.txt"]
    with pytest.raises(SourceError, match=r"no files ending in '\.md'"):
        found("memory://remote-test", ".md")


def test_name_that_looks_like_a_pattern_is_found(filled: MemoryStorage) -> None:
    filled.write("parts/[2].csv", b"a,y\n9,1\n")
    assert found("memory://remote-test/parts/[2].csv") == ["parts/[2].csv"]
    assert found("memory://remote-test/p*/[2].csv") == ["parts/2.csv"]


@pytest.mark.parametrize("path", ["s3://bucket/x", "gs://B/x", "gs://"])
def test_unknown_stores_are_refused(path: str) -> None:
    with pytest.raises(InvalidInput, match=r"bucket|unknown"):
        found(path)


def test_home_folder_of_an_unknown_user_is_refused() -> None:
    with pytest.raises(SourceError, match=r"~no-such-user/x: no such user's home folder; name a file or folder"):
        found("~no-such-user/x")


def test_file_address_is_a_local_path(workshop: Any) -> None:
    file = workshop.write("t.txt", "0123456789")
    (listed,) = find_files(f"file://{file}", Path("/nowhere"))
    assert (listed.uri, listed.read()) == (str(file), b"0123456789")


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("table", {"path": "parts", "y": "y"}),
        ("table", {"path": "parts/*.csv", "y": "y"}),
        ("text", {"path": "corpus", "length": 3}),
        ("text", {"path": "corpus", "length": 3, "max_bytes": 11}),
    ],
)
def test_remote_files_give_the_same_examples_as_local_ones(
    workshop: Any, filled: MemoryStorage, source: str, options: dict[str, Any]
) -> None:
    near = workshop.prepare(source, options)
    far_options = {**options, "path": f"{filled.uri}/{options['path']}"}
    far = workshop.prepare(source, far_options)
    assert far.content_digest == near.content_digest
    assert load_manifest(workshop.storage, far).origin.keys() == load_manifest(workshop.storage, near).origin.keys()
    assert workshop.prepare(source, far_options).already_prepared


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_read_from_the_store_in_parts(
    workshop: Any, remote: MemoryStorage, save: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).normal(size=(2000, 50, 10)).astype(np.float32)
    file = workshop.code / "data.npz"
    save(file, x=x, y=np.arange(2000))
    remote.upload(file, "data.npz")
    options = {"path": "data.npz", "y": "y"}
    near = workshop.prepare("npz", options)
    monkeypatch.setattr(MemoryStorage, "download", None)
    far = workshop.prepare("npz", {**options, "path": "memory://remote-test/data.npz"})
    assert far.content_digest == near.content_digest
    remote.write("other.npz", b"")
    with pytest.raises(SourceError, match="found 2 files; name one"):
        workshop.prepare("npz", {**options, "path": "memory://remote-test"})


def test_store_checksums_name_the_dataset(workshop: Any, filled: MemoryStorage) -> None:
    options = {"path": "memory://remote-test/corpus", "length": 3}
    first = workshop.prepare("text", options)
    folders = {first.folder, workshop.prepare("text", {**options, "max_bytes": 11}).folder}
    folders.add(workshop.prepare("text", {**options, "max_bytes": 10}).folder)
    filled.write("corpus/a.txt", b"0123456x")
    folders.add(workshop.prepare("text", options).folder)
    filled.delete("corpus/a.txt")
    filled.write("corpus/aa.txt", b"01234567")
    folders.add(workshop.prepare("text", options).folder)
    assert len(folders) == 5


def test_names_of_local_datasets_are_pinned(workshop: Any) -> None:
    """Datasets that are already prepared are found by name."""
    for name, content in FILES.items():
        workshop.write(name, content)
    folders = [
        workshop.prepare(source, options).folder
        for source, options in [
            ("table", {"path": "parts", "y": "y"}),
            ("text", {"path": "corpus", "length": 3}),
            ("text", {"path": "corpus", "length": 3, "max_bytes": 11}),
        ]
    ]
    assert folders == [
        "datasets/fc981626698de9ac5f1c340c",
        "datasets/425c5438a25104a094e73efb",
        "datasets/a0e2aab9c2199123f5aeb28d",
    ]


@pytest.mark.parametrize("change", [lambda store: store.write("parts/2.csv", b"a,y\n4,1\n"), None])
def test_file_changed_or_deleted_while_reading_is_refused(
    workshop: Any, filled: MemoryStorage, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    workshop.emit = lambda _: change(filled) if change else filled.delete("parts/2.csv")
    monkeypatch.setattr("baton.tasks.prepare_data.stage._REPORT_EVERY_EXAMPLES", 3)
    expected = "changed while it was being read" if change else "is missing; restore it"
    with pytest.raises(SourceError, match=rf"memory://remote-test/parts/2\.csv:? {expected}"):
        workshop.prepare("table", {"path": "memory://remote-test/parts", "y": "y"})
    assert workshop.files() == {}


def blocks_of(file: SourceFile) -> list[bytes]:
    with file.reading() as blocks:
        return list(blocks)


def test_long_file_is_read_in_parallel_parts(remote: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.tasks.prepare_data.sources.verified_reads._REQUEST_BYTES", 1000)
    monkeypatch.setattr("baton.tasks.prepare_data.sources.verified_reads._SMALL_BYTES", 0)
    monkeypatch.setattr(MemoryStorage, "transfers", 3)
    data = np.random.default_rng(0).bytes(12_345)
    remote.write("long", data)
    (file,) = find_files("memory://remote-test/long", Path())
    assert [len(block) for block in blocks_of(file)] == [1000] * 12 + [345]
    assert b"".join(blocks_of(file)) == data
    with file.open() as opened:
        opened.seek(-5, 2)
        assert (opened.tell(), opened.read(100), opened.read(1)) == (12_340, data[-5:], b"")
        opened.seek(7)
        opened.seek(3, 1)
        assert opened.read(4) == data[10:14]
    # The file became shorter between two requests.
    monkeypatch.setattr(MemoryStorage, "stat", lambda *_: checksum_bytes(data + b"more"))
    with pytest.raises(SourceError, match="changed while it was being read"):
        blocks_of(file)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_map_ahead_keeps_order_and_bounds(workers: int) -> None:
    consumed: list[int] = []

    def items() -> Iterator[int]:
        for item in range(100):
            consumed.append(item)
            yield item

    results = map_ahead(lambda item: item * item, items(), workers=workers)
    assert list(islice(results, 3)) == [0, 1, 4]
    assert len(consumed) <= 3 + 2 * workers
    assert list(results) == [item * item for item in range(3, 100)]
    with pytest.raises(ZeroDivisionError):
        list(map_ahead(lambda item: 1 // (item - 7), range(20), workers=workers))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """gs://bucket through the real client, on a local server."""
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    from tests.fakes.gcs.server import FakeGcs

    with FakeGcs(buckets=("bucket",)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        from baton.tasks.foundation.storage.opening import open_storage

        yield open_storage("gs://bucket", relative_to=Path())


def test_images_in_cloud_storage(workshop: Any, bucket: Any) -> None:
    import tensorflow as tf

    from baton.tasks.foundation.dataset import read

    for index in range(12):
        png = tf.io.encode_png(np.full((9, 9, 3), 10 * index, np.uint8)).numpy()
        bucket.write(f"pets/{'cat' if index < 5 else 'dog'}/{index:02d}.png", png)
    ref = workshop.prepare("images", {"path": "gs://bucket/pets", "size": [4, 4]}, classes=2, shard_examples=5)
    dataset = read.training_dataset(
        workshop.storage, ref, seed=0, global_batch_size=ref.train_examples, window_shards=2, first_batch=0
    )
    x, y = next(dataset.as_numpy_iterator())
    assert sorted(y.tolist()) == sorted((x[:, 0, 0, 0] >= 50).astype(int).tolist())
    assert x.shape == (ref.train_examples, 4, 4, 3)
    bucket.write("pets/dog/bad.png", b"GIF89a")
    with pytest.raises(SourceError, match=r"gs://bucket/pets/dog/bad\.png is GIF"):
        workshop.prepare("images", {"path": "gs://bucket/pets", "size": [4, 4]})


def test_records_in_cloud_storage(workshop: Any, bucket: Any) -> None:
    import tensorflow as tf

    from baton.tasks.foundation.dataset import read
    from baton.tasks.foundation.dataset.evaluation_sets import set_batches

    for part in range(3):
        with tf.io.TFRecordWriter(str(workshop.code / "made")) as writer:
            for number in range(10 * part, 10 * part + 10):
                values = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
                example = tf.train.Example(features=tf.train.Features(feature={"n": values}))
                writer.write(example.SerializeToString())
        bucket.upload(workshop.code / "made", f"data/part-{part}.tfrecord")
    options = {"path": "gs://bucket/data/*.tfrecord", "features": {"n": {"dtype": "int64"}}, "x": "n", "y": "n"}
    ref = workshop.prepare("tfrecord", options, shard_examples=4)
    assert load_manifest(workshop.storage, ref).train[0].path == "gs://bucket/data/part-0.tfrecord"
    dataset = read.training_dataset(
        workshop.storage, ref, seed=0, global_batch_size=ref.train_examples, window_shards=3, first_batch=0
    )
    trained = [int(number) for number in next(dataset.as_numpy_iterator())[1]]
    held_out = [
        int(y[0]) for _, y in set_batches(workshop.storage, ref, on="validation", batch_size=1).as_numpy_iterator()
    ]
    assert sorted(trained + held_out) == list(range(30))
    assert held_out == sorted(held_out) != []
