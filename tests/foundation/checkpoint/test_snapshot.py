"""A snapshot is a copy: training goes on while it is written, and its memory is used again."""

import hashlib
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.checkpoint import snapshot as module
from baton.tasks.foundation.checkpoint import tensor_bundle
from baton.tasks.foundation.checkpoint.snapshot import Snapshot, reserve_memory, snapshot_bytes, take_snapshot
from baton.tasks.foundation.checkpoint.write import write_snapshot
from baton.tasks.foundation.contracts.run_spec import AcceleratorSpec
from baton.tasks.foundation.machine.devices import acquire
from baton.tasks.foundation.model.randomness import StepDraws
from baton.tasks.foundation.state.host_memory import HostState
from baton.tasks.foundation.state.train_state import EarlierFiles, TrainState
from baton.tasks.foundation.storage.local import LocalStorage

SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
OPTIMIZERS = {
    "momentum": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.1),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "Lion": lambda: keras.optimizers.Lion(0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "EMA": lambda: ADAM(0.1, use_ema=True),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(ADAM(0.1), dynamic_growth_steps=4),
    "accumulation": lambda: ADAM(0.1, gradient_accumulation_steps=3),
}


def train_state(optimizer: Any, policy: str = "float32", callbacks: bool = False) -> TrainState:
    """Every kind of variable that is updated in place: dense and sparse, statistics, seeds, metrics."""
    layers, dtype = keras.layers, keras.DTypePolicy(policy)
    x = keras.Input((4,), dtype="int32")
    y = layers.Flatten()(layers.Embedding(50, 8, dtype=dtype)(x))
    y = layers.Dropout(0.3, dtype=dtype)(layers.BatchNormalization(dtype=dtype)(y))
    model = keras.Model(x, layers.Dense(3, dtype="float32")(layers.Dense(16, dtype=dtype)(y)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    model.train_on_batch(*batch(0))  # creates the metrics' variables
    draws = StepDraws(0, acquire(AcceleratorSpec(kind="cpu"), None))
    return TrainState(model, draws, host_state=HostState("callbacks") if callbacks else None)


def batch(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 50, (8, 4)), rng.integers(0, 3, 8)


def taken(state: TrainState, **settings: Any) -> Snapshot:
    found = take_snapshot(state, **settings)
    assert found is not None
    return found


def content(snapshot: Snapshot) -> str:
    return hashlib.sha256(b"".join(b"".join(shard) for shard in snapshot.shards())).hexdigest()


def require_still(state: TrainState, home: LocalStorage) -> None:
    """Train on top of a snapshot; its bytes stay, and are what is written."""
    digest = state.digest().root
    snapshot = taken(state)
    before = content(snapshot)
    values = {key: variable.numpy() for key, variable in state.saved.items()}
    for step in range(25):
        state.model.train_on_batch(*batch(step))
    changed = {key for key, variable in state.saved.items() if not np.array_equal(variable.numpy(), values[key])}
    assert {"model", "optimizer", "metrics"} <= {key.split("/")[0] for key in changed}
    assert len(changed) > len(values) / 2
    assert content(snapshot) == before
    assert write_snapshot(snapshot, home, base=7, attempt="abc").state_digest == digest != state.digest().root


def test_a_snapshot_stays_while_training_goes_on(staging_home: LocalStorage) -> None:
    require_still(train_state(ADAM(0.1)), staging_home)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        name if name in {"momentum", "loss scale"} else pytest.param(name, marks=pytest.mark.nightly)
        for name in OPTIMIZERS
    ],
)
def test_no_optimizer_moves_a_snapshot(staging_home: LocalStorage, optimizer: str) -> None:
    require_still(train_state(OPTIMIZERS[optimizer]()), staging_home)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "mixed_bfloat16",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mixed_float16", "bfloat16", "float64")),
    ],
)
def test_no_precision_moves_a_snapshot(staging_home: LocalStorage, policy: str) -> None:
    require_still(train_state(ADAM(0.1), policy), staging_home)


def test_files_are_the_same_without_a_copy(state: Any, staging_home: LocalStorage) -> None:
    copied = write_snapshot(taken(state), staging_home, base=7, attempt="aaa")
    state.earlier_files = EarlierFiles()  # else the file is not written again
    live = write_snapshot(taken(state, copy=False), staging_home, base=7, attempt="bbb")
    assert (copied.state_digest, copied.size) == (live.state_digest, live.size)
    for file in ("ckpt.index", "ckpt.data-00000-of-00001"):
        assert staging_home.read(f"{copied.path}/{file}") == staging_home.read(f"{live.path}/{file}")


def test_the_memory_is_used_again(state: Any) -> None:
    first = taken(state)
    before, first_address = content(first), address(first)
    second = taken(state)  # the first is not written yet
    assert address(second) != first_address
    assert content(first) == before
    second.release()
    second.release()
    third = taken(state)
    assert address(third) == address(second)
    assert content(third) == before
    assert state.page_buffer.borrow(1) is not third.memory


@pytest.mark.parametrize("callbacks", [False, True])
def test_first_snapshot_uses_the_reserved_memory(callbacks: bool) -> None:
    state = train_state(SGD(0.1), callbacks=callbacks)
    reserve_memory(state)
    reserved = state.page_buffer.borrow(1)
    state.page_buffer.give_back(reserved)
    if state.host_state is not None:
        state.host_state.write({"text": "long" * 10_000})
    assert address(taken(state)) == np.frombuffer(reserved, np.uint8).ctypes.data


def test_nothing_of_an_earlier_snapshot_remains(staging_home: LocalStorage) -> None:
    """The host state has another size at each step, so the values after it move."""
    state = train_state(SGD(0.1), callbacks=True)
    assert state.host_state is not None
    sizes = []
    for text in ("long" * 50, "", "long" * 20):
        state.host_state.write({"text": text})
        snapshot = taken(state)
        state.page_buffer = type(state.page_buffer)()
        fresh = taken(state)
        state.page_buffer = snapshot.buffer
        assert content(snapshot) == content(fresh)
        sizes.append(write_snapshot(snapshot, staging_home, base=7, attempt=f"a{len(sizes)}").size)
        assert state.digest().root == taken_digest(staging_home, sizes)
    assert sizes[0] > sizes[1]


def taken_digest(home: LocalStorage, sizes: list[int]) -> str:
    manifest = json.loads(home.read(f"checkpoints/00000000-00000007-a{len(sizes) - 1}/manifest.json"))
    return str(manifest["state_digest"])


@pytest.mark.parametrize("copy_bytes", [1, 50, 10_000])
def test_threads_copy_every_byte(state: Any, monkeypatch: pytest.MonkeyPatch, copy_bytes: int) -> None:
    expected = content(taken(state, copy=False))
    monkeypatch.setattr(module, "_COPY_BYTES", copy_bytes)
    assert content(taken(state)) == expected


@pytest.mark.parametrize("shard_bytes", [1, 200, 2000])
def test_many_files_restore_the_same_state(
    state: Any, staging_home: LocalStorage, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(tensor_bundle, "SHARD_BYTES", shard_bytes)
    ref = write_snapshot(taken(state), staging_home, base=7, attempt="abc")
    assert len(list(staging_home.files(ref.path))) > 3
    reader = tf.train.load_checkpoint(str(Path(staging_home.uri) / ref.path / "ckpt"))
    for value in taken(state).values[1:]:
        assert np.array_equal(reader.get_tensor(value.name), value.array)
    assert ref.state_digest == state.digest().root


def test_memory_is_said_beforehand(state: Any) -> None:
    snapshot = taken(state)
    assert snapshot.memory is not None
    assert snapshot_bytes(state) == sum(value.array.nbytes for value in snapshot.values[1:])
    assert 0 < snapshot_bytes(state) < len(snapshot.memory)


def address(snapshot: Snapshot) -> int:
    assert snapshot.memory is not None
    found: int = np.frombuffer(snapshot.memory, np.uint8).ctypes.data
    assert found % 4096 == 0
    return found
