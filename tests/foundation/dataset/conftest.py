"""Datasets with numbered examples, so that tests can identify each one."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, Feature, ShardRecord, content_digest
from baton.tasks.foundation.dataset import cache
from baton.tasks.foundation.dataset.manifest import manifest_path
from baton.tasks.foundation.dataset.shards import encode
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.far_storage import FarStorage

FEATURES = (Feature(name="x", dtype="float32", shape=(2,)), Feature(name="y", dtype="int64", shape=()))


@dataclasses.dataclass(frozen=True)
class Prepared:
    storage: Storage
    ref: DatasetRef
    manifest: DatasetManifest


def _write(storage: Storage, folder: Path, at: str, name: str, numbers: Sequence[int]) -> ShardRecord:
    file = folder / name
    with tf.io.TFRecordWriter(str(file)) as writer:
        for number in numbers:
            x = np.asarray([number, number / 2], np.float32)
            writer.write(encode({"x": x, "y": np.asarray(number, np.int64)}))
    stored = storage.upload(file, f"{at}/{name}")
    return ShardRecord(path=name, examples=len(numbers), size=stored.size, crc32c=stored.crc32c)


def make_numbered(
    folder: Path,
    train: Sequence[int],
    validation: Sequence[int] = (),
    storage: Storage | None = None,
    *,
    name: str = "numbered",
    begin: int = 0,
) -> Prepared:
    """Make a dataset with shards of the given counts; y counts from `begin`, of validation examples from 1000 more."""
    at = f"datasets/{name}"
    storage = storage or LocalStorage(folder / "storage")
    parts: list[list[ShardRecord]] = []
    for part, counts, first in (("train", train, begin), ("validation", validation, begin + 1000)):
        shards: list[ShardRecord] = []
        number = first
        for index, count in enumerate(counts):
            shards.append(_write(storage, folder, at, f"{part}-{index:05d}.tfrecord", range(number, number + count)))
            number += count
        parts.append(shards)
    digest = content_digest(FEATURES, *parts)
    manifest = DatasetManifest(
        digest=name,
        content_digest=digest,
        source="numbers",
        origin={},
        features=FEATURES,
        train=tuple(parts[0]),
        validation=tuple(parts[1]),
    )
    storage.write(manifest_path(at), manifest.to_json())
    ref = DatasetRef(
        folder=at,
        content_digest=digest,
        train_examples=manifest.train_examples,
        validation_examples=manifest.validation_examples,
        already_prepared=False,
    )
    return Prepared(storage, ref, manifest)


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Prepared]:
    def make(train: Sequence[int], validation: Sequence[int] = (), storage: Storage | None = None) -> Prepared:
        return make_numbered(tmp_path_factory.mktemp("dataset"), train, validation, storage)

    return make


@pytest.fixture(scope="session")
def labels() -> Callable[..., list[list[int]]]:
    """Return the labels of the first elements of a dataset, one list per element."""

    def read(dataset: Any, elements: int) -> list[list[int]]:
        return [element[1].tolist() for element in _first(dataset, elements)]

    return read


def _first(dataset: Any, elements: int) -> Iterator[Any]:
    yield from dataset.take(elements).as_numpy_iterator()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty temporary folder; the process creates a new cache in it."""
    cache.close_shared_cache()
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    cache.close_shared_cache()


@pytest.fixture
def far(request: pytest.FixtureRequest) -> Iterator[FarStorage]:
    store = MemoryStorage(f"cache-test/{request.node.name}")
    yield FarStorage(store)
    store.delete("")


@pytest.fixture
def cache_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    return lambda value: monkeypatch.setenv("BATON_CACHE_BYTES", str(value))
