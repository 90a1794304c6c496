"""Files of the checkpoint format as TensorFlow reads them: every tensor bit for bit, and no damaged ones."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from baton.tasks.foundation.checkpoint.tensor_bundle import (
    BundleEntry,
    data_file,
    index_of,
    locate,
    string_tensor,
    varint,
)
from baton.tasks.foundation.state.digest import OBJECT_GRAPH, object_graph_of, stored_name, tree_of
from baton.tasks.foundation.storage.transfers import checksum_bytes

DTYPES = [
    *(tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.bool),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
]
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)


def write(folder: Path, values: Mapping[str, Any], *, shard_bytes: int = 1 << 20) -> str:
    """Write a checkpoint of arrays and strings. Returns its prefix."""
    contents: list[tuple[str, int, tuple[int, ...], bytes, int]] = []
    for name, value in values.items():
        if isinstance(value, bytes):
            data, crc = string_tensor(value)
            contents.append((name, tf.string.as_datatype_enum, (), data, crc))
        else:
            data = value.tobytes()
            dtype = tf.as_dtype(value.dtype).as_datatype_enum
            contents.append((name, dtype, value.shape, data, int(checksum_bytes(data).crc32c, 16)))
    places = locate([len(data) for _, _, _, data, _ in contents], shard_bytes=shard_bytes)
    shards = [bytearray() for _ in range(places[-1].shard + 1)] if places else [bytearray()]
    for (_, _, _, data, _), place in zip(contents, places, strict=True):
        shard = shards[place.shard]
        shard += b"gap" * 30
        del shard[place.offset :]
        shard += data
    for number, shard in enumerate(shards):
        (folder / data_file(number, len(shards))).write_bytes(shard)
    entries = [
        BundleEntry(name=name, dtype=dtype, shape=shape, shard=at.shard, offset=at.offset, size=len(data), crc32c=crc)
        for (name, dtype, shape, data, crc), at in zip(contents, places, strict=True)
    ]
    (folder / "ckpt.index").write_bytes(index_of(reversed(entries), shards=len(shards)))
    return str(folder / "ckpt")


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    size = int(np.prod(shape)) * dtype.size
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype == tf.bool:
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, dtype.as_numpy_dtype).reshape(shape)


@given(st.dictionaries(NAMES, st.one_of(arrays(), st.binary(max_size=300)), max_size=40), st.integers(1, 2000))
@settings(max_examples=60)
def test_tensorflow_reads_every_tensor(values: dict[str, Any], shard_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = write(Path(folder), values, shard_bytes=shard_bytes)
        reader = tf.train.load_checkpoint(prefix)
        assert set(reader.get_variable_to_shape_map()) == set(values)
        for name, value in values.items():
            found = reader.get_tensor(name)
            if isinstance(value, bytes):
                assert found == value
            else:
                assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())


@pytest.mark.parametrize("count", [1, 15, 16, 17, 5000])
def test_an_index_of_any_length_is_read(tmp_path: Path, count: int) -> None:
    """5,000 keys take several blocks of the table."""
    shared = "a/common/beginning/of/every/key/"
    values = {f"{shared * (number % 4)}{number}": np.array(number, np.int64) for number in range(count)}
    reader = tf.train.load_checkpoint(write(tmp_path, values))
    assert len(reader.get_variable_to_shape_map()) == count
    for name in list(values)[:: max(1, count // 100)]:
        assert reader.get_tensor(name) == values[name]


@given(st.lists(st.integers(0, 300), min_size=1), st.integers(1, 500))
def test_tensors_never_overlap_and_files_are_bounded(sizes: list[int], shard_bytes: int) -> None:
    ends: dict[int, int] = {}
    places = locate(sizes, shard_bytes=shard_bytes)
    assert [place.shard for place in places] == sorted(place.shard for place in places)
    for size, place in zip(sizes, places, strict=True):
        assert place.offset >= ends.get(place.shard, 0)
        assert place.offset == 0 or place.offset + size <= shard_bytes
        assert place.offset % 64 == 0
        ends[place.shard] = place.offset + size
    assert sorted(ends) == list(range(max(ends) + 1))


@pytest.mark.parametrize("file", ["ckpt.index", "ckpt.data-00000-of-00001"])
def test_tensorflow_refuses_damage(tmp_path: Path, file: str) -> None:
    values = {f"model/{name}": np.arange(50, dtype=np.float32) for name in "abc"}
    prefix = write(tmp_path, {"graph": b"text" * 20, **values})
    whole = (tmp_path / file).read_bytes()
    refused = 0
    for position in range(0, len(whole), 7):
        (tmp_path / file).write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        try:
            reader = tf.train.load_checkpoint(prefix)
            found = {name: reader.get_tensor(name) for name in values}
            assert reader.get_tensor("graph") == b"text" * 20
        except (tf.errors.OpError, RuntimeError, ValueError):
            refused += 1
        else:  # a gap between tensors, or the filling of the footer
            assert all(np.array_equal(found[name], values[name]) for name in values)
    assert refused > len(whole) / 7 * 0.7


def test_the_graph_is_the_one_that_tensorflow_writes(tmp_path: Path, state: Any) -> None:
    written = tf.train.Checkpoint(**tree_of(state.saved)).write(str(tmp_path / "ckpt"))
    assert tf.train.load_checkpoint(written).get_tensor(OBJECT_GRAPH) == state.object_graph
    assert b"full_name" not in state.object_graph


def test_a_tree_of_variables_is_read_completely(tmp_path: Path) -> None:
    names = {"model/norm. 1/gamma": "gamma", "model/out.put/kernel": "k", "step": "step"}
    values = {key: np.full([3], number, np.float32) for number, key in enumerate(names)}
    stored = {stored_name(key): value for key, value in values.items()}
    prefix = write(tmp_path, {OBJECT_GRAPH: object_graph_of(names), **stored})
    variables = {key: tf.Variable([9.0, 9.0, 9.0]) for key in names}
    tf.train.Checkpoint(**tree_of(variables)).read(prefix).assert_consumed()
    for key, variable in variables.items():
        assert np.array_equal(variable.numpy(), values[key])
    assert dict(tf.train.list_variables(prefix))[stored_name("step")] == [3]


@pytest.mark.parametrize(("value", "digits"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02")])
def test_numbers_are_written_in_base_128(value: int, digits: str) -> None:
    assert varint(value).hex() == digits
