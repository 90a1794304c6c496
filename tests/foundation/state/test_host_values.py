"""Reading all variables at once: on a CPU without copies, from an accelerator in one batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.state.host_memory import HostValues
from tests.support.lab import Lab, built, in_fresh_process, spec_of


@pytest.mark.parametrize("on_host", [True, False])
def test_every_value_is_read(state: Any, monkeypatch: pytest.MonkeyPatch, on_host: bool) -> None:
    values = HostValues(state.saved, None)
    monkeypatch.setattr(values, "on_host", on_host)
    for _ in range(2):
        found = values.read(tuple(state.saved))
        assert list(found) == list(state.saved)
        for key, variable in state.saved.items():
            value = variable.numpy()
            assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
            assert found[key].tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16, tf.bool, tf.uint8, tf.complex64, tf.qint8])
def test_a_value_on_a_cpu_is_not_copied(dtype: tf.DType) -> None:
    data = tf.constant([0, 1, 1], tf.uint8 if dtype.size == 1 else tf.int8)
    value = tf.bitcast(data, dtype) if dtype.is_quantized else tf.cast(data, dtype)
    variable = tf.Variable(value)
    first, second = (HostValues({"key": variable}, None).read(("key",))["key"] for _ in range(2))
    assert np.shares_memory(first, second)
    assert first.dtype == variable.numpy().dtype
    assert first.tobytes() == variable.numpy().tobytes()


def read_replicas(folder: str) -> dict[str, bool]:
    """Two replicas that differ: each way of reading returns each replica's own values."""
    state = built(Lab(Path(folder)), spec_of("functional", replicas=2))
    for leaf in state.leaves:
        for number, part in enumerate(leaf.components):
            if leaf.per_replica and part.dtype.is_floating:
                part.assign(tf.ones_like(part) * (number + 3))
    expected = {key: getattr(item, "values", [item])[0].numpy().tobytes() for key, item in state.saved.items()}
    direct, fetched = HostValues(state.saved, None), HostValues(state.saved, None)
    fetched.on_host = False
    return {
        "on host": direct.on_host,
        "replicas": any(key.endswith("replica_1") for key in expected),
        "direct": {key: value.tobytes() for key, value in direct.read(tuple(state.saved)).items()} == expected,
        "fetched": {key: value.tobytes() for key, value in fetched.read(tuple(state.saved)).items()} == expected,
    }


@pytest.mark.slow
def test_each_replica_has_its_own_values(tmp_path: Path) -> None:
    assert all(in_fresh_process(read_replicas, folder=str(tmp_path)).values())
