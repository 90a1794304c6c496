"""Examples in memory are those of the records: the same batches, and nothing is held that does not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, Feature, ShardRecord, content_digest
from baton.tasks.foundation.dataset import read as decoded_examples
from baton.tasks.foundation.dataset import read as reader
from baton.tasks.foundation.dataset.manifest import manifest_path
from baton.tasks.foundation.dataset.read import decode_examples, decoded_bytes, fits_into_memory
from baton.tasks.foundation.dataset.shards import encode
from baton.tasks.foundation.errors import DamagedDataset
from baton.tasks.foundation.storage.local import LocalStorage
from tests.foundation.dataset.test_transformed_batches import BOTH, EXAMPLE, global_batches

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
DTYPES = ("bool", *INTEGERS, "float16", "float64", "complex64")


def test_batches_from_memory_are_those_of_the_records(numbered: Callable[..., Any]) -> None:
    prepared = numbered([40, 31, 40, 17])
    for functions in (None, EXAMPLE, BOTH):
        straight = global_batches(prepared, 0, 8, functions=functions)
        for first, hosts, replicas in ((0, 1, 1), (5, 1, 4), (3, 2, 3)):
            found = global_batches(
                prepared, first, 3, hosts=hosts, replicas=replicas, functions=functions, in_memory=True
            )
            assert np.array_equal(found, straight[first : first + 3])
    whole = global_batches(prepared, 0, 8, functions=None, drop_remainder=True)
    assert np.array_equal(global_batches(prepared, 0, 8, functions=None, drop_remainder=True, in_memory=True), whole)


def test_every_dtype_is_held_as_it_is(tmp_path: Path) -> None:
    features = (*(Feature(name=f"x/{name}", dtype=name, shape=(2,)) for name in DTYPES),)
    features += (Feature(name="x/text", dtype="string", shape=(2,), encoding="text"),)
    draw = np.random.default_rng(0)
    examples = [
        {f"x/{name}": np.frombuffer(draw.bytes(2 * np.dtype(name).itemsize), name) for name in DTYPES if name != "bool"}
        | {"x/bool": np.array([n % 2, 1], bool), "x/text": np.array([b"a" * n, b"\xff\x00"], object)}
        for n in range(9)
    ]
    storage, folder = LocalStorage(tmp_path), "datasets/all"
    file = tmp_path / folder / "train.tfrecord"
    file.parent.mkdir(parents=True)
    with tf.io.TFRecordWriter(str(file)) as writer:
        for example in examples:
            writer.write(encode({each.name: example[each.name] for each in features}))
    stored = storage.stat(f"{folder}/train.tfrecord")
    shards = (ShardRecord(path="train.tfrecord", examples=9, size=stored.size, crc32c=stored.crc32c),)
    digest = content_digest(features, shards, ())
    manifest = DatasetManifest(
        digest="all", content_digest=digest, source="s", origin={}, features=features, train=shards, validation=()
    )
    storage.write(manifest_path(folder), manifest.to_json())
    ref = DatasetRef(
        folder=folder, content_digest=digest, train_examples=9, validation_examples=0, already_prepared=True
    )
    settings: dict[str, Any] = {"seed": 0, "global_batch_size": 3, "window_shards": 1, "first_batch": 0}
    read, held = (
        list(reader.training_dataset(storage, ref, in_memory=in_memory, **settings).take(4).as_numpy_iterator())
        for in_memory in (False, True)
    )
    for (one,), (other,) in zip(read, held, strict=True):
        for name in one:
            assert one[name].dtype == other[name].dtype
            assert one[name].tobytes() == other[name].tobytes() or one[name].tolist() == other[name].tolist(), name
    assert decoded_bytes(storage, ref) == 9 * 2 * (sum(np.dtype(name).itemsize for name in DTYPES) + 8) + stored.size


def test_examples_are_held_for_one_dataset(numbered: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = numbered([5, 4]), numbered([7])
    held = decode_examples(one.storage, one.ref)
    assert decode_examples(one.storage, one.ref) is held
    # What is held already takes no more memory.
    monkeypatch.setattr(decoded_examples, "available_bytes", lambda: 10)
    assert fits_into_memory(one.storage, one.ref)
    assert not fits_into_memory(other.storage, other.ref)
    monkeypatch.setattr(decoded_examples, "available_bytes", lambda: 2 * decoded_bytes(other.storage, other.ref))
    assert fits_into_memory(other.storage, other.ref)
    assert decode_examples(other.storage, other.ref).tensors["y"].shape == (7,)
    assert not fits_into_memory(one.storage, one.ref) or decode_examples(one.storage, one.ref) is not held


def test_damaged_shard_is_never_held(numbered: Callable[..., Any]) -> None:
    prepared = numbered([6])
    file = Path(prepared.storage.root) / prepared.ref.folder / prepared.manifest.train[0].path
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(DamagedDataset):
        decode_examples(prepared.storage, prepared.ref)
