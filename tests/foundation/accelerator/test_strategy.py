"""One accelerator a process, with the threads that the run began with."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tasks.foundation.accelerator import gpu, strategy, tpu_environment
from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.accelerator.environment import thread_counts
from tasks.foundation.accelerator.strategy import acquire, threads_of_others
from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.errors import AcceleratorError
from tasks.foundation.user_code import describe
from tests.support.lab import Lab, in_fresh_process, spec_of
from tests.support.stand_in_tpu import TOLD, look_like_a_tpu_vm

CPUS = len(os.sched_getaffinity(0))
RECORDED = Environment(accelerator="cpu", replicas=1, intra_op_threads=5, inter_op_threads=6, versions={})


@pytest.mark.parametrize(("batch", "replicas", "each"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (1016, 8, 127)])
def test_a_batch_is_divided(batch: int, replicas: int, each: int) -> None:
    assert per_replica_batch_size(batch, replicas) == each


@pytest.mark.parametrize(
    ("batch", "replicas", "remedy"),
    [(1020, 8, "try 1016 or 1024"), (3, 4, "try 4"), (1, 2, "try 2"), (9, 4, "8 or 12")],
)
def test_a_batch_that_cannot_be_divided_is_refused(batch: int, replicas: int, remedy: str) -> None:
    with pytest.raises(AcceleratorError) as refused:
        per_replica_batch_size(batch, replicas)
    assert f"train.global_batch_size = {batch} is not divisible by {replicas} replicas" in str(refused.value)
    assert remedy in str(refused.value)
    assert "try 0" not in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "recorded", "counts"),
    [
        ({}, None, (CPUS, CPUS)),
        ({}, RECORDED, (5, 6)),
        ({"intra_op_threads": 2}, RECORDED, (2, 6)),
        ({"intra_op_threads": 2, "inter_op_threads": 3}, None, (2, 3)),
    ],
)
def test_thread_counts_are_asked_for_or_recorded_or_those_of_the_machine(
    asked: dict[str, int], recorded: Environment | None, counts: tuple[int, int]
) -> None:
    assert thread_counts(AcceleratorSpec(**asked), recorded) == counts  # type: ignore[arg-type]


def test_the_process_keeps_its_first_accelerator() -> None:
    first = acquire(AcceleratorSpec(), None)
    assert acquire(AcceleratorSpec(kind="cpu"), first.environment) is first
    assert first.replicas == 1
    assert {"python", "tensorflow-cpu", "keras", "numpy"} <= set(first.environment.versions)


@pytest.mark.parametrize(
    ("asked", "recorded", "wanted"),
    [
        ({"kind": "cpu", "replicas": 2}, None, f"('cpu', 2, {CPUS}, {CPUS})"),
        ({"intra_op_threads": 7}, None, f"('cpu', 1, 7, {CPUS})"),
        ({}, RECORDED, "('cpu', 1, 5, 6)"),
    ],
)
def test_another_accelerator_needs_another_process(
    asked: dict[str, Any], recorded: Environment | None, wanted: str
) -> None:
    with pytest.raises(AcceleratorError) as refused:
        acquire(AcceleratorSpec(**asked), recorded)
    text = f"this process runs with accelerator, replicas and threads ('cpu', 1, {CPUS}, {CPUS})"
    assert text in str(refused.value)
    assert f"{wanted} needs a process of its own" in str(refused.value)
    assert refused.value.exit_code == 2


def test_deterministic_operations_are_a_setting_of_the_process() -> None:
    assert acquire(AcceleratorSpec(), None).environment.deterministic
    with pytest.raises(AcceleratorError) as refused:
        acquire(AcceleratorSpec(), None, deterministic=False)
    assert str(refused.value) == ("this process runs with train.deterministic = true; false needs a process of its own")
    # TensorFlow itself was told: it refuses what cannot be repeated.
    with pytest.raises(RuntimeError, match="cannot be called when determinism is enabled") as fault:
        tf.random.Generator.from_non_deterministic_state()
    assert describe(fault.value).endswith("or set train.deterministic: false")


def test_threads_that_user_code_has_set_are_told_of() -> None:
    own = acquire(AcceleratorSpec(), None)
    assert threads_of_others(own) == ""
    # As if user code had set those of this process after Baton had set others.
    other = replace(own, environment=own.environment.model_copy(update={"intra_op_threads": CPUS + 5}))
    told = threads_of_others(other)
    assert f"threads to {CPUS} within an operation and {CPUS} operations at a time" in told
    assert f"which holds, and not {CPUS + 5} and {CPUS}, which the log records" in told


def test_auto_chooses_the_cpu_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tpu_environment, "_DEVICES", tmp_path)
    monkeypatch.setattr(gpu, "_DEVICES", tmp_path)
    assert strategy._choose() == ("cpu", "accelerator: the CPU, for there is no TPU, and no GPU")
    (tmp_path / "nvidia0").touch()
    kind, said = strategy._choose()
    assert kind == "cpu"
    assert "for there is no TPU, and tensorflow-cpu sees no GPU (device files" in said
    assert "nvidia0; CUDA_VISIBLE_DEVICES=" in said


def test_auto_chooses_a_tpu_before_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in TOLD:
        monkeypatch.setenv(name, "")
    gpus = [SimpleNamespace(name="/physical_device:GPU:0")]
    monkeypatch.setattr(strategy, "gpus", lambda: gpus)
    monkeypatch.setattr(tpu_environment, "_DEVICES", tmp_path)
    assert strategy._choose() == ("gpu", "accelerator: 1 GPU (GPU:0), for there is no TPU")
    device = look_like_a_tpu_vm(tmp_path, set_attribute=monkeypatch.setattr)
    kind, said = strategy._choose()
    assert (kind, said) == ("tpu", f"accelerator: a TPU, for this machine has its device files ({device})")
    monkeypatch.setenv("PJRT_DEVICE", "CUDA")
    assert strategy._choose() == ("gpu", "accelerator: 1 GPU (GPU:0), for PJRT_DEVICE declines the TPU")


def test_auto_does_not_pass_over_a_tpu_in_silence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "accel0").touch()
    monkeypatch.setattr(tpu_environment, "_DEVICES", tmp_path)
    with pytest.raises(AcceleratorError, match=r"auto found a TPU \(.*accel0\), and tensorflow-cpu cannot.* kind: cpu"):
        acquire(AcceleratorSpec(), None)
    assert acquire(AcceleratorSpec(kind="cpu"), None).replicas == 1


def begin(folder: str, **accelerator: Any) -> dict[str, Any]:
    """Begin or go on with a run; tells what TensorFlow was set to and what the log has."""
    import tensorflow as tf

    lab = Lab(Path(folder))
    spec = spec_of("plain", accelerator=accelerator)
    lab.begin(spec)
    head = lab.log(spec).head()
    assert head is not None
    threading = tf.config.threading
    return {
        "set": [threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads()],
        "recorded": [head.environment.intra_op_threads, head.environment.inter_op_threads],
        "kinds": [entry.body.kind for entry in lab.log(spec).entries()],
        "warnings": lab.heard.warnings,
    }


@pytest.mark.slow
def test_a_run_keeps_the_threads_that_it_began_with(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = in_fresh_process(begin, folder=folder, intra_op_threads=1, inter_op_threads=3)
    again = in_fresh_process(begin, folder=folder)
    assert first == {"set": [1, 3], "recorded": [1, 3], "kinds": ["origin", "checkpoint"], "warnings": []}
    assert again == first
    changed = in_fresh_process(begin, folder=folder, intra_op_threads=2)
    assert (changed["set"], changed["recorded"]) == ([2, 3], [2, 3])
    assert changed["kinds"] == ["origin", "checkpoint", "change"]
    assert len(changed["warnings"]) == 1
    assert "the environment changed" in changed["warnings"][0]
    assert "intra_op_threads: 1 -> 2" in changed["warnings"][0]


def use_tensorflow_first() -> str:
    import tensorflow as tf

    tf.constant(1.0)
    try:
        acquire(AcceleratorSpec(kind="cpu", replicas=2), None)
    except AcceleratorError as fault:
        return str(fault)
    return "acquired"


@pytest.mark.slow
def test_tensorflow_must_not_be_used_before() -> None:
    told = in_fresh_process(use_tensorflow_first)
    assert "TensorFlow was in use before the accelerator was set up" in told
    assert "model.py and data.py must not create tensors when they are imported" in told
