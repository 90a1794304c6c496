"""Batches of a mixture are a function of the seed and the batch index, whatever cuts, hosts and replicas there are."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.data_spec import Exhausted, MixedSource, Mixture
from baton.tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, content_digest
from baton.tasks.foundation.dataset.evaluation_sets import set_batches, set_remainder
from baton.tasks.foundation.dataset.manifest import (
    dataset_folder,
    load_manifest,
    manifest_path,
    plain_datasets,
    read_manifest,
)
from baton.tasks.foundation.errors import DamagedDataset
from baton.tasks.foundation.storage.local import LocalStorage
from tests.foundation.dataset.conftest import FEATURES, Prepared, make_numbered
from tests.foundation.dataset.test_transformed_batches import BATCH, BOTH, global_batches, shifted

Mixed = Callable[..., Prepared]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    """Return a function that mixes numbered datasets; those of source k count from 10,000 k."""

    def make(
        shards: Sequence[Sequence[int]],
        weights: Sequence[int],
        exhausted: Exhausted = "repeat",
        validation: Sequence[Sequence[int]] | None = None,
    ) -> Prepared:
        folder = tmp_path_factory.mktemp("mixture")
        storage = LocalStorage(folder / "storage")
        held_out = validation or [()] * len(shards)
        sources = []
        for number, (train, own, weight) in enumerate(zip(shards, held_out, weights, strict=True)):
            (folder / str(number)).mkdir()
            one = make_numbered(
                folder / str(number), train, own, storage, name=f"numbered-{number}", begin=10_000 * number
            )
            sources.append(
                MixedSource(
                    source=f"numbers {number}",
                    folder=one.ref.folder,
                    content_digest=one.ref.content_digest,
                    weight=weight,
                    train_examples=one.ref.train_examples,
                    validation_examples=one.ref.validation_examples,
                )
            )
        mixture = Mixture(sources=tuple(sources), exhausted=exhausted)
        manifest = DatasetManifest(
            digest=mixture.digest,
            content_digest=content_digest(FEATURES, (), (), mixture=mixture),
            source="numbers",
            origin={},
            features=FEATURES,
            train=(),
            validation=(),
            mixture=mixture,
        )
        path = dataset_folder(mixture.digest)
        storage.create(manifest_path(path), manifest.to_json())
        ref = DatasetRef(
            folder=path,
            content_digest=manifest.content_digest,
            train_examples=manifest.train_examples,
            validation_examples=manifest.validation_examples,
            already_prepared=False,
        )
        return Prepared(storage, ref, manifest)

    return make


def labels_of(batches: Sequence[Any]) -> list[int]:
    return [int(label) for one in batches for label in one[:, -1]]


@pytest.mark.slow
@pytest.mark.nightly
def test_hundred_changes_of_the_count_change_no_mixed_batch(mixed: Mixed) -> None:
    prepared = mixed([[40, 31, 40, 17], [50, 9]], [5, 3])
    straight = {functions: global_batches(prepared, 0, 150, functions=functions) for functions in (None, BOTH)}
    draw, batch = random.Random(11), 0
    for change in range(100):
        length = draw.randint(1, 2) if batch < 100 else 1
        count = draw.choice([each for each in range(1, 17) if BATCH % each == 0])
        hosts = 2 if change % 8 == 0 and count % 2 == 0 else 1
        functions = BOTH if change % 5 == 0 else None
        found = global_batches(prepared, batch, length, hosts=hosts, replicas=count // hosts, functions=functions)
        for number, one in enumerate(found, start=batch):
            assert np.array_equal(one, straight[functions][number]), (number, hosts, count)
        batch += length
    labels = labels_of(straight[None])
    for source, (count, weight) in enumerate([(128, 5), (59, 3)]):
        own = [label % 10_000 for label in labels if label // 10_000 == source]
        for epoch in range(len(own) // count):  # no example is repeated or skipped
            assert sorted(own[epoch * count : (epoch + 1) * count]) == list(range(count))
        assert len([label for label in labels[:1024] if label // 10_000 == source]) == 1024 * weight // 8


def test_dropped_sources_give_each_example_once(mixed: Mixed) -> None:
    prepared = mixed([[40, 31], [9], [64, 64]], [4, 3, 1], "drop")
    everything = sorted([*range(71), *range(10_000, 10_009), *range(20_000, 20_128)])
    labels = labels_of(global_batches(prepared, 0, 9, functions=None))
    assert sorted(labels[:208]) == everything
    assert sorted(labels[208:416]) == everything
    assert labels[:208] != labels[208:416]
    # 192 of 208 examples are four whole batches; what remains is left out of the epoch.
    whole = global_batches(prepared, 0, 8, functions=None, drop_remainder=True)
    assert len(set(labels_of(whole[:4]))) == len(set(labels_of(whole[4:]))) == 192
    for first in (3, 4, 5):
        later = global_batches(prepared, first, 2, functions=None, drop_remainder=True)
        assert np.array_equal(np.concatenate(later), np.concatenate(whole[first : first + 2]))


def test_sources_of_a_mixture_keep_their_order(mixed: Mixed) -> None:
    prepared = mixed([[4, 3], [9, 5, 2]], [1, 2])
    batches = global_batches(prepared, 0, 9, functions=None, shuffle=False)
    assert np.array_equal(batches[4:], global_batches(prepared, 4, 5, functions=None, shuffle=False, replicas=2))
    for source, count in enumerate((7, 16)):
        own = [label % 10_000 for label in labels_of(batches) if label // 10_000 == source]
        assert own == [number % count for number in range(len(own))]


def test_far_batch_of_a_mixture_is_the_same_after_a_seek(mixed: Mixed) -> None:
    prepared = mixed([[40, 31], [9, 5]], [1, 1])
    far = 1_000_000
    two = global_batches(prepared, far, 2)
    assert np.array_equal(two[1], global_batches(prepared, far + 1, 1, hosts=2, replicas=3)[0])
    assert np.array_equal(two, global_batches(prepared, far, 2, in_memory=True))


def test_held_out_examples_of_each_source_are_read_once(mixed: Mixed) -> None:
    prepared = mixed([[5], [6], [7]], [1, 1, 1], validation=[[9, 4], [], [6]])
    expected = [*range(1000, 1013), *range(21_000, 21_006)]
    for batch_size in (1, 7, 14, 16, 50):
        settings = {"batch_size": batch_size, "function": shifted, "seed": 1}
        full = set_batches(prepared.storage, prepared.ref, on="validation", **settings)
        rest = set_remainder(prepared.storage, prepared.ref, on="validation", **settings)
        elements = [*full.as_numpy_iterator(), *([] if rest is None else rest.as_numpy_iterator())]
        assert [int(label) for _, labels in elements for label in labels] == expected


def test_changed_weight_in_a_manifest_is_damage(mixed: Mixed) -> None:
    prepared = mixed([[5], [6]], [2, 1])
    assert load_manifest(prepared.storage, prepared.ref) == prepared.manifest
    assert [folder for folder, _ in plain_datasets(prepared.storage, prepared.manifest, prepared.ref.folder)] == [
        "datasets/numbered-0",
        "datasets/numbered-1",
    ]
    path = manifest_path(prepared.ref.folder)
    text = prepared.storage.read(path)
    prepared.storage.write(path, text.replace(b'"weight": 2', b'"weight": 3'))
    with pytest.raises(DamagedDataset, match="its digest does not match the weights that it lists"):
        read_manifest(prepared.storage, prepared.ref.folder)
