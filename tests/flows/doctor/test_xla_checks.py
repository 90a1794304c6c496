"""The memory that a replica needs at least."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from flows.doctor.run_file_checks import check_accelerator
from tests.support.faulty_runs import V5E, load_faulty_run


def leaf(gigabytes: int, *, trainable: bool) -> Any:
    component = SimpleNamespace(dtype=tf.float32, shape=tf.TensorShape([gigabytes * 10**9 // 4]))
    path = "model/kernel" if trainable else "optimizer/momentum"
    return SimpleNamespace(path=path, trainable=trainable, seed=False, per_replica=False, components=(component,))


@pytest.mark.parametrize(("parameters", "slots", "verdict"), [(2, 4, "pass"), (4, 4, "warn"), (6, 6, "fail")])
def test_memory_counts_gradients_once_more(parameters: int, slots: int, verdict: str, tmp_path: Path) -> None:
    from flows.doctor.device_checks import check_memory

    leaves = (leaf(parameters, trainable=True), leaf(slots, trainable=False))
    built: Any = SimpleNamespace(state=SimpleNamespace(leaves=leaves), arguments=())
    found = check_memory(built, check_accelerator(load_faulty_run(tmp_path), V5E).value)
    assert (found.verdict, found.value) == (verdict, (2 * parameters + slots) * 10**9)
    assert bool(found.remedy) == (verdict != "pass")
