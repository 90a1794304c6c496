"""The memory that a replica needs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest

from flows.doctor.run_file_checks import check_accelerator
from tests.support.faulty_runs import V5E, load_faulty_run


@pytest.mark.parametrize(
    ("policy", "gigabytes", "verdict"),
    [
        ("float32", 11, "pass"),
        ("float32", 12, "warn"),
        ("float32", 16, "fail"),
        ("mixed_bfloat16", 11, "pass"),
        ("mixed_bfloat16", 16, "warn"),
        ("mixed_bfloat16", 48, "fail"),
    ],
)
def test_memory_verdict_by_policy_and_size(policy: str, gigabytes: int, verdict: str, tmp_path: Path) -> None:
    from flows.doctor.xla_checks import check_memory

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype=policy)])
    built: Any = SimpleNamespace(state=SimpleNamespace(model=model, leaves=()), arguments=())
    found = check_memory(built, gigabytes * 10**9, check_accelerator(load_faulty_run(tmp_path), V5E).value)
    assert found.verdict == verdict
    assert ("3 times too much" in found.text) == (policy != "float32")
    assert bool(found.remedy) == (verdict != "pass")
