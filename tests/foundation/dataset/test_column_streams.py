"""Parquet files in place: the order is that of records, through every way of reading, from every position."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from baton.tasks.foundation.contracts.data_spec import MixedSource, Mixture
from baton.tasks.foundation.contracts.dataset import (
    DatasetManifest,
    DatasetRef,
    Feature,
    HeldOut,
    RangeLayout,
    ShardRecord,
    content_digest,
)
from baton.tasks.foundation.dataset import read
from baton.tasks.foundation.dataset.columns import shared_features
from baton.tasks.foundation.dataset.evaluation_sets import set_batches, set_remainder
from baton.tasks.foundation.dataset.manifest import held_out_mask, manifest_path, positions_of_part
from baton.tasks.foundation.dataset.shards import original_read_errors
from baton.tasks.foundation.errors import DamagedDataset
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.foundation.dataset.conftest import make_numbered

FEATURES = (
    Feature(name="x", dtype="float32", shape=(2,), key="x", encoding="array"),
    Feature(name="y", dtype="int64", shape=(), key="y", encoding="array"),
)
FEW = settings(max_examples=4, derandomize=True, deadline=None)


@dataclasses.dataclass(frozen=True)
class Prepared:
    storage: Storage
    ref: DatasetRef
    manifest: DatasetManifest


def numbers(groups: Sequence[int], begin: int = 0) -> pa.Table:
    y = np.arange(begin, begin + sum(groups))
    x = np.stack([y, y / 2], axis=1).astype(np.float32)
    return pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 2), "y": y})


def ranges_of(file: Path, groups: Sequence[int], table: pa.Table, first: int = 0) -> list[ShardRecord]:
    """Write a file with row groups of these sizes; each is a range."""
    with parquet.ParquetWriter(file, table.schema) as writer:
        begin = 0
        for count in groups:
            writer.write_table(table.slice(begin, count), row_group_size=count)
            begin += count
    data, found = file.read_bytes(), parquet.read_metadata(file)
    foot = 8 + int.from_bytes(data[-8:-4], "little")
    ranges = []
    for number, count in enumerate(groups):
        group = found.row_group(number)
        columns = [group.column(index) for index in range(group.num_columns)]
        at = min(min(each.dictionary_page_offset or each.data_page_offset, each.data_page_offset) for each in columns)
        size = sum(each.total_compressed_size for each in columns)
        layout = RangeLayout(
            form="parquet",
            head_begin=len(data) - foot,
            head_size=foot,
            head_crc32c=f"{google_crc32c.value(data[-foot:]):08x}",
            first_part=number,
        )
        ranges.append(
            ShardRecord(
                path=str(file),
                begin=at,
                size=size,
                crc32c=f"{google_crc32c.value(data[at : at + size]):08x}",
                first=first,
                records=count,
                examples=count,
                layout=layout,
            )
        )
        first += count
    return ranges


def commit(
    storage: Storage,
    ranges: Sequence[ShardRecord],
    *,
    held_out: HeldOut | None = None,
    features: tuple[Feature, ...] = FEATURES,
    name: str = "columns",
) -> Prepared:
    parts: list[tuple[ShardRecord, ...]] = []
    for part in ("train", "validation"):
        counts = [
            len(positions_of_part(part, held_out, [each])) if held_out else each.examples * (part == "train")  # type: ignore[arg-type]
            for each in ranges
        ]
        parts.append(
            tuple(each.model_copy(update={"examples": n}) for each, n in zip(ranges, counts, strict=True) if n)
        )
    digest = content_digest(features, *parts, held_out)
    manifest = DatasetManifest(
        digest=name,
        content_digest=digest,
        source="table",
        origin={},
        features=features,
        train=parts[0],
        validation=parts[1],
        held_out=held_out,
    )
    return _ref(storage, manifest, f"datasets/{name}")


def _ref(storage: Storage, manifest: DatasetManifest, folder: str) -> Prepared:
    storage.write(manifest_path(folder), manifest.to_json())
    ref = DatasetRef(
        folder=folder,
        content_digest=manifest.content_digest,
        train_examples=manifest.train_examples,
        validation_examples=manifest.validation_examples,
        already_prepared=False,
    )
    return Prepared(storage, ref, manifest)


def training(prepared: Any, **changed: Any) -> Any:
    settings_ = {"seed": 0, "global_batch_size": 4, "window_shards": 2, "first_batch": 0, **changed}
    return read.training_dataset(prepared.storage, prepared.ref, **settings_)


def labels(dataset: Any, batches: int = -1) -> list[list[int]]:
    """The labels of the first batches; x says the same."""
    found = list(dataset.take(batches).as_numpy_iterator())
    for x, y in found:
        np.testing.assert_array_equal(x, np.stack([y, y / 2], axis=1).astype(np.float32))
    return [y.tolist() for _, y in found]


def records_of(folder: Path, groups: Sequence[int]) -> Any:
    return make_numbered(folder, groups)


@FEW
@given(
    groups=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 4)),
    seed=st.integers(0, 2**31 - 1),
    shuffle=st.booleans(),
)
def test_order_is_that_of_records_from_every_batch(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[int],
    sizes: tuple[int, int],
    seed: int,
    shuffle: bool,
) -> None:
    folder, (batch, window_shards) = tmp_path_factory.mktemp("columns"), sizes
    columns = commit(LocalStorage(folder / "storage"), ranges_of(folder / "a.parquet", groups, numbers(groups)))
    records = make_numbered(folder, groups)
    wanted = {"global_batch_size": batch, "window_shards": window_shards, "seed": seed, "shuffle": shuffle}
    batches = -(-2 * sum(groups) // batch)
    straight = labels(training(records, **wanted), batches)
    assert labels(training(columns, **wanted), batches) == straight
    first = seed % batches
    assert labels(training(columns, **wanted, first_batch=first), batches - first) == straight[first:]
    assert labels(training(columns, **wanted, in_memory=True, first_batch=first), batches - first) == straight[first:]
    halves = [
        labels(training(columns, **{**wanted, "global_batch_size": 2 * batch}, host=h, hosts=2), 2) for h in (0, 1)
    ]
    whole = labels(training(columns, **{**wanted, "global_batch_size": 2 * batch}), 2)
    assert [one + other for one, other in zip(*halves, strict=True)] == whole


@FEW
@given(
    groups=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    fraction=st.sampled_from([0.1, 0.5, 0.9]),
    seed=st.integers(0, 2**31 - 1),
    batch=st.integers(1, 6),
)
def test_held_out_rows_are_evaluated_once_in_the_order_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, groups: list[int], fraction: float, seed: int, batch: int
) -> None:
    folder, total = tmp_path_factory.mktemp("columns"), sum(groups) + 1
    groups = [*groups, 1]
    rule = HeldOut(fraction=fraction, seed=seed)
    held_out = np.flatnonzero(held_out_mask(rule, 0, total)).tolist()
    if not 0 < len(held_out) < total:
        rule = rule.model_copy(update={"exception": seed % total})
        held_out = np.flatnonzero(held_out_mask(rule, 0, total)).tolist()
    columns = commit(
        LocalStorage(folder / "storage"), ranges_of(folder / "a.parquet", groups, numbers(groups)), held_out=rule
    )
    at = {"on": "validation", "batch_size": batch}
    found = labels(set_batches(columns.storage, columns.ref, **at))
    rest = set_remainder(columns.storage, columns.ref, **at)
    found += [] if rest is None else labels(rest)
    assert [label for each in found for label in each] == held_out
    trained = sorted(set(range(total)) - set(held_out))
    epoch = labels(training(columns, global_batch_size=1), len(trained))
    assert sorted(label for each in epoch for label in each) == trained


def mixture_of(storage: Storage, *prepared: Any, exhausted: Any = "repeat") -> Prepared:
    mixture = Mixture(
        sources=tuple(
            MixedSource(
                source=each.manifest.source,
                folder=each.ref.folder,
                content_digest=each.ref.content_digest,
                weight=weight,
                train_examples=each.ref.train_examples,
                validation_examples=each.ref.validation_examples,
            )
            for weight, each in enumerate(prepared, start=1)
        ),
        exhausted=exhausted,
    )
    features = shared_features([each.manifest.features for each in prepared])
    manifest = DatasetManifest(
        digest=mixture.digest,
        content_digest=content_digest(features, (), (), mixture=mixture),
        source="mixture",
        origin={},
        features=features,
        train=(),
        validation=(),
        mixture=mixture,
    )
    return _ref(storage, manifest, f"datasets/{mixture.digest}")


@pytest.mark.parametrize("exhausted", ["repeat", "drop"])
def test_mixture_of_columns_and_records_has_the_order_of_records(exhausted: str, tmp_path: Path) -> None:
    storage, groups = LocalStorage(tmp_path / "storage"), [5, 3, 8]
    rows = numbers(groups, begin=100)
    columns = commit(storage, ranges_of(tmp_path / "a.parquet", groups, rows))
    same = make_numbered(tmp_path, groups, storage=storage, name="same", begin=100)
    others = make_numbered(tmp_path, [7, 2, 9], [4], storage=storage, name="others")
    mixed = mixture_of(storage, columns, others, exhausted=exhausted)
    records = mixture_of(storage, same, others, exhausted=exhausted)
    straight = labels(training(records), 30)
    assert labels(training(mixed), 30) == straight
    assert labels(training(mixed, first_batch=11), 19) == straight[11:]
    assert labels(training(mixed, in_memory=True, first_batch=11), 19) == straight[11:]
    held_out = labels(set_batches(storage, mixed.ref, on="validation", batch_size=2))
    assert held_out == [[1000, 1001], [1002, 1003]]


def test_ranges_in_a_store_are_read_like_local_ones(tmp_path: Path) -> None:
    groups = [5, 3, 8, 2]
    local = ranges_of(tmp_path / "a.parquet", groups, numbers(groups))
    store = MemoryStorage("column-streams/files")
    store.write("a.parquet", (tmp_path / "a.parquet").read_bytes())
    there = [each.model_copy(update={"path": "memory://column-streams/files/a.parquet"}) for each in local]
    rule = HeldOut(fraction=0.3, seed=3)
    here = commit(LocalStorage(tmp_path / "here"), local, held_out=rule)
    far = commit(LocalStorage(tmp_path / "there"), there, held_out=rule)
    assert labels(training(far), 9) == labels(training(here), 9)
    assert far.ref.content_digest == here.ref.content_digest


@pytest.mark.parametrize("where", ["row group", "footer", "gone"])
def test_changed_file_is_refused_by_name(where: str, tmp_path: Path) -> None:
    groups = [5, 3, 8]
    ranges = ranges_of(tmp_path / "a.parquet", groups, numbers(groups))
    columns = commit(LocalStorage(tmp_path / "storage"), ranges)
    file = tmp_path / "a.parquet"
    if where == "gone":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[ranges[1].begin + 9 if where == "row group" else -20] ^= 1
        file.write_bytes(data)
    text = "is missing" if where == "gone" else "has other bytes than when the dataset was prepared"
    for in_memory in (False, True):
        with pytest.raises(DamagedDataset, match=rf"a\.parquet {text}"), original_read_errors():
            list(training(columns, in_memory=in_memory).take(9))
    with pytest.raises(DamagedDataset, match=rf"a\.parquet {text}"), original_read_errors():
        list(training(columns).take(9))


def test_images_in_columns_are_decoded_in_order(tmp_path: Path) -> None:
    import tensorflow as tf

    groups = [9, 6]
    files = [tf.io.encode_png(np.full((8, 8, 3), n, np.uint8)).numpy() for n in range(15)]
    texts = [f"text {n}" for n in range(15)]
    table = pa.table({"image": [{"bytes": each} for each in files], "text": texts, "y": range(15)})
    features = (
        Feature(name="x/image", dtype="uint8", shape=(8, 8, 3), key="image.bytes", encoding="image"),
        Feature(name="x/text", dtype="string", shape=(), key="text", encoding="text"),
        FEATURES[1],
    )
    ranges = ranges_of(tmp_path / "a.parquet", groups, table)
    columns = commit(LocalStorage(tmp_path / "storage"), ranges, features=features)
    for in_memory in (False, True):
        found = list(training(columns, in_memory=in_memory).take(6).as_numpy_iterator())
        assert sorted({label for _, y in found for label in y.tolist()}) == list(range(15))
        for x, y in found:
            np.testing.assert_array_equal(x["image"], np.broadcast_to(y[:, None, None, None], (4, 8, 8, 3)))
            assert [each.decode() for each in x["text"]] == [f"text {n}" for n in y]
