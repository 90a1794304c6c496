"""GPUs, as far as tests can cover them without one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from baton.tasks.foundation.errors import AcceleratorError
from baton.tasks.foundation.machine import devices as gpu
from baton.tasks.foundation.machine.cluster import Cluster
from baton.tasks.foundation.machine.devices import gpu_strategy, grow_memory, why_no_gpu, worker_strategy


def have(monkeypatch: pytest.MonkeyPatch, count: int) -> list[Any]:
    found = [SimpleNamespace(name=f"/physical_device:GPU:{index}") for index in range(count)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: found if kind == "GPU" else [])
    return found


def test_missing_gpu_is_refused_with_all_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "_DEVICES", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    have(monkeypatch, 0)
    with pytest.raises(AcceleratorError) as refused:
        grow_memory()
    for part in (
        "accelerator.kind = gpu, but tf.config.list_physical_devices('GPU') is empty",
        "tensorflow-cpu sees no GPU",
        f"{tmp_path}/nvidia[0-9]*: none",
        "CUDA_VISIBLE_DEVICES=-1",
        "pip install '.[gpu]'",
    ):
        assert part in str(refused.value)
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    assert f"{tmp_path}/nvidia[0-9]*: {tmp_path}/nvidia0; CUDA" in why_no_gpu()


def test_memory_grows_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = have(monkeypatch, 2)
    grown: list[Any] = []
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda *arguments: grown.append(arguments))
    grow_memory()
    assert grown == [(device, True) for device in found]


def test_several_gpus_are_mirrored_and_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda devices: devices)
    have(monkeypatch, 3)
    assert gpu_strategy() == ["GPU:0", "GPU:1", "GPU:2"]
    have(monkeypatch, 1)
    assert gpu_strategy() is tf.distribute.get_strategy()


def test_every_gpu_of_a_worker_is_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def make(resolver: Any) -> Any:
        asked.append((resolver.task_id, resolver.num_accelerators(), resolver.cluster_spec().as_dict()))
        return SimpleNamespace(num_replicas_in_sync=6)

    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", make)
    have(monkeypatch, 3)
    worker_strategy(Cluster(("a:2222", "b:2222"), 1))
    assert asked == [(1, {"GPU": 3}, {"worker": ["a:2222", "b:2222"]})]
