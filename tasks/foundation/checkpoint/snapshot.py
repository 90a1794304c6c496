"""The train state at one step, copied into host memory, so that training can go on while it is written.

Of several linked hosts, each copies its share (`state/host_shares.py`), once the hosts have compared what they hold.
Weights that are not finite are refused before anything of them is written.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from baton.tasks.foundation.checkpoint.tensor_bundle import FileLayout, Location, arrange, resting_keys, string_tensor
from baton.tasks.foundation.contracts.checkpoint import OptimizerRecord, VariableRecord, replica_key
from baton.tasks.foundation.errors import NonFinite
from baton.tasks.foundation.machine.processes import enough_memory_for_snapshot
from baton.tasks.foundation.state.digest import OBJECT_GRAPH, stored_name
from baton.tasks.foundation.state.host_memory import PageBuffer
from baton.tasks.foundation.state.host_shares import HostShares
from baton.tasks.foundation.state.train_state import EarlierFiles, TrainState

# Data files begin at pages, so that they go to the disk without another copy.
_PAGE_BYTES = 4096
# What one thread copies at a time. More threads than these do not make memory faster.
_COPY_BYTES = 8 << 20
_MOST_THREADS = 4
# What the state of callbacks may take, whose size is known when it is read.
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue:
    """One tensor of a checkpoint.

    Attributes:
        key: in the train state; `OBJECT_GRAPH` for TensorFlow's graph, which is not part of the state.
        name: in the checkpoint's files.
        dtype: a number of TensorFlow's enum `DataType`.
        array: the value; a string's bytes as they are in a file, uint8 [size].
        crc32c: of a string, whose checksum is not that of its bytes, and of what was compared; None: not known yet.
        location: where it belongs in the files.
    """

    key: str
    name: str
    dtype: int
    array: Any
    crc32c: int | None
    location: Location

    @property
    def data(self) -> memoryview:
        """The bytes of the value."""
        return memoryview(_bytes_of(self.array))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The train state at one step.

    Attributes:
        step: the absolute step.
        where: added to the step in an error message, for example ", in segment 2".
        replicas: number of replicas that the state was trained on.
        signature: path, dtype and shape of each leaf.
        compiled_learning_rates, optimizers: see `TrainState`.
        trainable: key and path of each leaf that must be finite.
        values: of this host, in the order of the files.
        layout: of the files of all hosts.
        shares: of the state.
        earlier_files: of the checkpoint before, and then of this one.
        memory: holds the values; None if they are still in the model's variables. Then do not train until they are
            written.
        buffer: where the memory is given back.
    """

    step: int
    where: str
    replicas: int
    signature: tuple[VariableRecord, ...]
    compiled_learning_rates: Mapping[str, float]
    optimizers: Mapping[str, OptimizerRecord]
    trainable: tuple[tuple[str, str], ...]
    values: tuple[StoredValue, ...]
    layout: FileLayout
    shares: HostShares
    earlier_files: EarlierFiles
    memory: memoryview | None
    buffer: PageBuffer

    def shards(self) -> list[list[memoryview]]:
        """The content of each data file of this host, in parts. It is one part if the values were copied."""
        sizes = _sizes_of_shards(self.values, self.files)
        if self.memory is not None:
            begins = _shard_begins(sizes)
            return [[self.memory[begin : begin + size]] for begin, size in zip(begins, sizes, strict=True)]
        shards: list[list[memoryview]] = [[] for _ in sizes]
        for value, gap in _with_gaps(self.values):
            shards[value.location.shard - self.files.start] += [memoryview(bytes(gap)), value.data]
        return shards

    @property
    def files(self) -> range:
        """Indices of the data files of this host."""
        return self.layout.files_of[self.shares.host]

    def release(self) -> None:
        """Give the memory back, for the next snapshot. Nothing may read this one afterwards."""
        if self.memory is not None:
            self.buffer.give_back(self.memory)


def take_snapshot(state: TrainState, *, where: str = "", copy: bool = True) -> Snapshot | None:
    """Take a snapshot. With several hosts, all of them call it at the same step.

    Args:
        where: added to the step in an error message, for example ", in segment 2".
        copy: whether to copy the values, so that training can go on before they are written. Without, no memory is
            needed.

    Returns:
        The snapshot of this host's share; None if the chief saves all, and this host is another one.

    Raises:
        ModelError: the random streams of the replicas could not be restored.
        HostsDiffer: hosts hold different values; raised on all of them.
    """
    state.replica_variables.gather()
    state.seeds.require_derived()
    shares = state.shares
    if not shares.saves:
        return None
    values, layout = _values_of(state, where)
    memory = None
    if copy:
        files = layout.files_of[shares.host]
        sizes = _sizes_of_shards(values, files)
        memory = state.page_buffer.borrow(sum(map(_in_pages, sizes)))
        values = _copied(values, memory, dict(zip(files, _shard_begins(sizes), strict=True)))
    return Snapshot(
        step=state.step,
        where=where,
        replicas=state.accelerator.replicas,
        signature=state.signature,
        compiled_learning_rates=state.compiled_learning_rates,
        optimizers=state.optimizers,
        trainable=tuple(_trainable(state)),
        values=values,
        layout=layout,
        shares=shares,
        earlier_files=state.earlier_files,
        memory=memory,
        buffer=state.page_buffer,
    )


def snapshot_bytes(state: TrainState) -> int:
    """Memory of this host that a snapshot of a train state needs, in bytes."""
    return state.shares.bytes_of_mine


def fits_memory(state: TrainState) -> bool:
    """Whether there is memory for a snapshot: that of the one before, or free memory of this host."""
    size = snapshot_bytes(state)
    return state.page_buffer.size >= size or enough_memory_for_snapshot(size)


def reserve_memory(state: TrainState) -> None:
    """Get the memory of the first snapshot ready while the training goes on, unless memory is short.

    Call it when a step has been trained, so that what the step needs is taken already.
    """
    shares = state.shares
    if not shares.saves or state.page_buffer.size or not fits_memory(state):
        return
    graph, _ = string_tensor(state.object_graph)
    layout = _layout(state, shares.sizes, len(graph))
    sizes = {OBJECT_GRAPH: len(graph), **shares.sizes}
    files = layout.files_of[shares.host]
    mine = [(location, sizes[key]) for key, location in layout.locations.items() if location.shard in files]
    size = sum(map(_in_pages, _shard_sizes(mine, files))) + _SPARE_BYTES
    state.page_buffer.reserve(size)


def _layout(state: TrainState, sizes: Mapping[str, int], graph_bytes: int) -> FileLayout:
    shares = state.shares
    resting = resting_keys(state.leaves, sizes, state.accelerator.replicas)
    return arrange(sizes, graph_bytes=graph_bytes, resting=resting, owners=shares.owners, hosts=shares.hosts)


def _values_of(state: TrainState, where: str) -> tuple[tuple[StoredValue, ...], FileLayout]:
    """The values of this host, which are the same on the others, where they should be; and where all values go."""
    shares = state.shares
    graph, graph_crc32c = string_tensor(state.object_graph)
    arrays = state.host_values.read(shares.mine)
    crcs = shares.require_same(arrays, state.host_values.read, step=state.step, where=where)
    layout = _layout(state, shares.sizes | {key: array.nbytes for key, array in arrays.items()}, len(graph))
    files = layout.files_of[shares.host]

    def stored(key: str, location: Location) -> StoredValue:
        crc32c: int | None
        if key == OBJECT_GRAPH:
            dtype, array, crc32c = tf.string, np.frombuffer(graph, np.uint8), graph_crc32c
        else:
            dtype, array, crc32c = state.saved[key].dtype, arrays[key], crcs.get(key)
        return StoredValue(
            key=key,
            name=key if key == OBJECT_GRAPH else stored_name(key),
            dtype=dtype.as_datatype_enum,
            array=array,
            crc32c=crc32c,
            location=location,
        )

    mine = tuple(stored(key, location) for key, location in layout.locations.items() if location.shard in files)
    return mine, layout


def _trainable(state: TrainState) -> Iterator[tuple[str, str]]:
    for leaf in state.leaves:
        if leaf.trainable and leaf.components[0].dtype.is_floating:
            yield replica_key(leaf.path, 0) if leaf.per_replica else leaf.path, leaf.path


def _copied(values: Sequence[StoredValue], memory: memoryview, begins: Mapping[int, int]) -> tuple[StoredValue, ...]:
    """The same values, copied into memory, each file where it begins there, with zeros between values."""
    area = np.frombuffer(memory, np.uint8)
    pairs: list[tuple[Any, Any]] = []
    copies: list[Any] = []
    for value, gap in _with_gaps(values):
        begin = begins[value.location.shard] + value.location.offset
        area[begin - gap : begin] = 0
        target = area[begin : begin + value.array.nbytes]
        pairs.append((target, _bytes_of(value.array)))
        copies.append(target.view(value.array.dtype).reshape(value.array.shape))
    _copy_in_threads(pairs)
    return tuple(replace(value, array=array) for value, array in zip(values, copies, strict=True))


def _copy_in_threads(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Copy each array to its target; both are uint8 [size]."""
    parcels: list[list[tuple[Any, Any]]] = [[]]
    size = 0
    for target, source in pairs:
        for begin in range(0, len(source), _COPY_BYTES):
            part = slice(begin, begin + _COPY_BYTES)
            parcels[-1].append((target[part], source[part]))
            size += len(source[part])
            if size >= _COPY_BYTES:
                parcels.append([])
                size = 0
    threads = min(_MOST_THREADS, len(parcels), len(os.sched_getaffinity(0)))
    if threads == 1:
        list(map(_copy, parcels))
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="baton-snapshot") as pool:
        list(pool.map(_copy, parcels))


def _copy(parcel: Iterable[tuple[Any, Any]]) -> None:
    for target, source in parcel:
        np.copyto(target, source)


def _bytes_of(array: Any) -> Any:
    """The bytes of an array, uint8 [size]; without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _with_gaps(values: Iterable[StoredValue]) -> Iterator[tuple[StoredValue, int]]:
    """Each value, and the number of bytes between it and the one before in its file."""
    shard, end = -1, 0
    for value in values:
        if value.location.shard != shard:
            shard, end = value.location.shard, 0
        yield value, value.location.offset - end
        end = value.location.offset + value.array.nbytes


def _sizes_of_shards(values: Sequence[StoredValue], files: range) -> list[int]:
    return _shard_sizes([(value.location, value.array.nbytes) for value in values], files)


def _shard_sizes(tensors: Iterable[tuple[Location, int]], files: range) -> list[int]:
    """The size of each of some data files, from the tensors in them: where each is, and its size in bytes."""
    shards = dict.fromkeys(files, 0)
    for location, size in tensors:
        shards[location.shard] = location.offset + size
    return list(shards.values())


def _shard_begins(sizes: Sequence[int]) -> list[int]:
    """Where each data file begins in memory."""
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + _in_pages(size))
    return begins[:-1]


def _in_pages(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


_BLOCK = 1 << 18
# All bits of the exponent are set in NaN and infinity. NumPy is slow with these dtypes.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}


def require_finite(snapshot: Snapshot) -> None:
    """Check the trainable variables of a snapshot.

    Raises:
        NonFinite: one holds NaN or infinity.
    """
    values = {value.key: value.array for value in snapshot.values}
    for key, path in snapshot.trainable:
        if key in values and not all_finite(values[key]):  # otherwise another host looks at it
            raise NonFinite(
                f"step {snapshot.step}{snapshot.where}: {path} holds NaN or infinity, which is not committed. Lower "
                "the learning rate, clip gradients, or look at the data of these steps",
                step=snapshot.step,
            )


def all_finite(array: Any) -> bool:
    """Whether an array of any floating dtype holds neither NaN nor infinity."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return all(_block_is_finite(flat[begin : begin + _BLOCK]) for begin in range(0, len(flat), _BLOCK))


def _block_is_finite(block: Any) -> bool:
    exponent = _EXPONENTS.get(block.dtype.name)
    if exponent is not None:
        return not bool(np.any((block.view(np.uint16) & exponent) == exponent))
    return bool(np.isfinite(block).all())
