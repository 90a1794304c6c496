"""Reading a dataset's manifest, and its content digest."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.dataset import Feature
from baton.tasks.foundation.dataset.manifest import load_manifest, read_manifest, zero_examples
from baton.tasks.foundation.errors import AnotherVersion, DamagedDataset


def test_written_manifest_is_read_back(numbered: Callable[..., Any]) -> None:
    prepared = numbered([3, 2], [1])
    assert load_manifest(prepared.storage, prepared.ref) == prepared.manifest


def test_missing_manifest_is_damage(numbered: Callable[..., Any]) -> None:
    prepared = numbered([3])
    prepared.storage.delete(prepared.ref.folder)
    with pytest.raises(DamagedDataset, match=r"manifest\.json is missing.*run again"):
        load_manifest(prepared.storage, prepared.ref)


def test_manifest_of_another_dataset_is_refused(numbered: Callable[..., Any]) -> None:
    prepared = numbered([3])
    with pytest.raises(DamagedDataset, match="started with 000000000000"):
        load_manifest(prepared.storage, prepared.ref.model_copy(update={"content_digest": "0" * 64}))


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": 1}'])
def test_unreadable_manifest_is_damage(numbered: Callable[..., Any], damage: bytes) -> None:
    prepared = numbered([3])
    prepared.storage.write(f"{prepared.ref.folder}/manifest.json", damage)
    with pytest.raises(DamagedDataset, match=r"manifest\.json"):
        load_manifest(prepared.storage, prepared.ref)


def test_edited_manifest_is_damage(numbered: Callable[..., Any]) -> None:
    prepared = numbered([3, 4])
    path = f"{prepared.ref.folder}/manifest.json"
    content = json.loads(prepared.storage.read(path))
    content["train"].reverse()
    prepared.storage.write(path, json.dumps(content).encode())
    with pytest.raises(DamagedDataset, match="does not match the shards it lists; delete that folder"):
        load_manifest(prepared.storage, prepared.ref)


def test_manifest_of_a_newer_version_is_not_damage(numbered: Callable[..., Any]) -> None:
    prepared = numbered([3, 4])
    path = f"{prepared.ref.folder}/manifest.json"
    content = json.loads(prepared.storage.read(path))

    def written(**changes: Any) -> None:
        prepared.storage.write(path, json.dumps(content | changes).encode())

    written(licence="CC0")
    assert read_manifest(prepared.storage, prepared.ref.folder) == prepared.manifest
    written(format=3)
    with pytest.raises(AnotherVersion, match=r"manifest\.json: .*format is 3"):
        read_manifest(prepared.storage, prepared.ref.folder)
    # The newer version includes this key in its content digest.
    shards = [shard | {"codec": "zstd"} for shard in content["train"]]
    written(train=shards, content_digest="0" * 64)
    with pytest.raises(AnotherVersion, match=r"unknown keys \(train\.0\.codec, train\.1\.codec\)") as caught:
        read_manifest(prepared.storage, prepared.ref.folder)
    assert "delete" not in str(caught.value)


def test_zero_batch_has_the_shapes_of_a_batch(numbered: Callable[..., Any]) -> None:
    x, y = zero_examples(numbered([3]).manifest.features, 5)
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((5, 2), np.float32, (5,), np.int64)
    named = numbered([3]).manifest.model_copy(
        update={
            "features": (Feature(name="x/a", dtype="bool", shape=()), Feature(name="x/b", dtype="uint8", shape=(1,)))
        }
    )
    (inputs,) = zero_examples(named.features, 2)
    assert {key: (value.shape, value.dtype.name) for key, value in inputs.items()} == {
        "a": ((2,), "bool"),
        "b": ((2, 1), "uint8"),
    }
