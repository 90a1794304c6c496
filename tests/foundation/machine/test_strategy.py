"""One accelerator per process, with the run's recorded thread counts; lost devices."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from baton.tasks.foundation.contracts.log_entry import Environment
from baton.tasks.foundation.contracts.placement import AcceleratorSpec, per_replica_batch_size
from baton.tasks.foundation.errors import AcceleratorError, AcceleratorLost
from baton.tasks.foundation.machine import devices
from baton.tasks.foundation.machine.devices import Accelerator, acquire, may_be_lost, thread_override_warning
from baton.tasks.foundation.machine.environment import thread_counts
from baton.tasks.foundation.user_traceback import describe
from tests.support.lab import Lab, in_fresh_process, spec_of
from tests.support.stand_in_tpu import ANNOUNCED, OF_A_SLICE, StandInSystem, look_like_a_tpu_vm

TPU = AcceleratorSpec(kind="tpu")
NAMED = AcceleratorSpec(kind="tpu", tpu="my-tpu")
CPUS = len(os.sched_getaffinity(0))
RECORDED = Environment(accelerator="cpu", replicas=1, intra_op_threads=5, inter_op_threads=6, versions={})


@pytest.mark.parametrize(("batch", "replicas", "each"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (1016, 8, 127)])
def test_batch_is_divided(batch: int, replicas: int, each: int) -> None:
    assert per_replica_batch_size(batch, replicas) == each


@pytest.mark.parametrize(
    ("batch", "replicas", "remedy"),
    [(1020, 8, "try 1016 or 1024"), (3, 4, "try 4"), (1, 2, "try 2"), (9, 4, "8 or 12")],
)
def test_indivisible_batch_is_refused(batch: int, replicas: int, remedy: str) -> None:
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
def test_thread_counts_come_from_file_log_or_machine(
    asked: dict[str, int], recorded: Environment | None, counts: tuple[int, int]
) -> None:
    assert thread_counts(AcceleratorSpec(**asked), recorded) == counts  # type: ignore[arg-type]


def test_process_keeps_its_first_accelerator() -> None:
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
def test_other_settings_need_another_process(asked: dict[str, Any], recorded: Environment | None, wanted: str) -> None:
    with pytest.raises(AcceleratorError) as refused:
        acquire(AcceleratorSpec(**asked), recorded)
    text = f"this process already uses accelerator, replicas and threads ('cpu', 1, {CPUS}, {CPUS})"
    assert text in str(refused.value)
    assert f"start another process for {wanted}" in str(refused.value)
    assert refused.value.exit_code == 2


def test_determinism_is_fixed_for_the_process() -> None:
    assert acquire(AcceleratorSpec(), None).environment.deterministic
    with pytest.raises(AcceleratorError) as refused:
        acquire(AcceleratorSpec(), None, deterministic=False)
    assert str(refused.value) == (
        "this process already uses train.deterministic = true; start another process for false"
    )
    # TensorFlow refuses operations that are not deterministic.
    with pytest.raises(RuntimeError, match="cannot be called when determinism is enabled") as fault:
        tf.random.Generator.from_non_deterministic_state()
    assert describe(fault.value).endswith("or set train.deterministic: false")


def test_threads_set_by_user_code_cause_a_warning() -> None:
    own = acquire(AcceleratorSpec(), None)
    assert thread_override_warning(own) == ""
    # As if user code had set other counts after Baton.
    other = replace(own, environment=own.environment.model_copy(update={"intra_op_threads": CPUS + 5}))
    warning = thread_override_warning(other)
    assert f"threads to {CPUS} within an operation and {CPUS} operations at a time" in warning
    assert f"the log records {CPUS + 5} and {CPUS}" in warning


def test_process_keeps_its_named_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_acquired", [])
    monkeypatch.setattr(devices, "_set_up", lambda *_: None)
    cores = [f"/job:worker/replica:0/task:{host}/device:TPU:{core}" for host in range(2) for core in range(4)]
    made = SimpleNamespace(num_replicas_in_sync=8, extended=SimpleNamespace(worker_devices=cores))
    monkeypatch.setattr(devices, "tpu_strategy", lambda _spec, **_: made)
    accelerator = acquire(NAMED, None)
    assert accelerator.environment.devices == "tpu, 8 replicas on 2 TensorFlow servers"
    assert (accelerator.kind, accelerator.hosts) == ("tpu", 1)
    assert accelerator.io_device == "/job:localhost"
    assert acquire(NAMED, None) is accelerator
    for other in (AcceleratorSpec(kind="tpu", tpu="your-tpu"), TPU):
        with pytest.raises(AcceleratorError, match=r"this process already uses .*tpu/my-tpu"):
            acquire(other, None)
    devices._acquired[0].lost = True
    with pytest.raises(AcceleratorLost, match="lost its accelerator tpu/my-tpu; run the same command again"):
        acquire(NAMED, None)
    monkeypatch.setattr(devices, "_acquired", [])
    assert acquire(TPU, None).io_device is None


@pytest.mark.parametrize(("spec", "asked"), [(TPU, 0), (AcceleratorSpec(kind="cpu"), 1)])
def test_determinism_is_not_enabled_on_tpus(monkeypatch: pytest.MonkeyPatch, spec: AcceleratorSpec, asked: int) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(devices, "_acquired", [])
    monkeypatch.setattr(devices, "_set_up", lambda *_: None)
    monkeypatch.setattr(devices, "tpu_strategy", lambda _spec, **_: SimpleNamespace(num_replicas_in_sync=8))
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: calls.append(True))
    assert acquire(spec, None).environment.deterministic
    assert len(calls) == asked


def test_lost_tpu_ends_the_work_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(accelerator="tpu", replicas=8, intra_op_threads=1, inter_op_threads=1, versions={})
    accelerator = Accelerator(strategy=None, environment=environment)
    acquired = devices._Acquired(("tpu", 1, 1, 1), accelerator)
    monkeypatch.setattr(devices, "_acquired", [acquired])
    with pytest.raises(AcceleratorLost) as lost, may_be_lost(accelerator):
        raise tf.errors.UnavailableError(None, None, "Socket\nclosed")
    assert "(tpu, 8 replicas) was lost: UnavailableError: Socket closed. Committed checkpoints are kept" in str(
        lost.value
    )
    assert (lost.value.exit_code, acquired.lost) == (3, True)


def test_garbled_call_of_a_server_is_work_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_acquired", [])
    garbled = tf.errors.InternalError(None, None, "Unable to parse request")
    threads = {"intra_op_threads": 1, "inter_op_threads": 1}
    for servers, fault, expected in (
        (2, garbled, AcceleratorLost),
        (0, garbled, tf.errors.InternalError),
        (2, tf.errors.InternalError(None, None, "XLA cannot compile"), tf.errors.InternalError),
    ):
        environment = Environment(accelerator="tpu", replicas=8, servers=servers, versions={}, **threads)
        with pytest.raises(expected), may_be_lost(Accelerator(strategy=None, environment=environment)):
            raise fault


def test_cpu_is_never_lost() -> None:
    accelerator = acquire(AcceleratorSpec(kind="cpu"), None)
    with pytest.raises(tf.errors.CancelledError), may_be_lost(accelerator):
        raise tf.errors.CancelledError(None, None, "called off")
    assert acquire(AcceleratorSpec(kind="cpu"), None) is accelerator


def test_lost_gpu_needs_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    acquired = devices._Acquired(("gpu", 1, 2, 3), acquire(AcceleratorSpec(kind="cpu"), None), lost=True)
    monkeypatch.setattr(devices, "_acquired", [acquired])
    spec = AcceleratorSpec(kind="gpu", intra_op_threads=2, inter_op_threads=3)
    with pytest.raises(AcceleratorLost, match="this process lost its accelerator gpu; run the same command again"):
        acquire(spec, None)


def test_tpu_that_stays_lost_is_resumable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*ANNOUNCED, *OF_A_SLICE):
        monkeypatch.setenv(name, "")  # so that the variables are restored
    look_like_a_tpu_vm(tmp_path / "dev", set_attribute=monkeypatch.setattr)
    system = StandInSystem()
    system.install(monkeypatch.setattr)

    def fail(_resolver: Any) -> None:
        raise tf.errors.UnavailableError(None, None, "still down")

    acquired = devices._Acquired(("tpu", 1, 2, 3), acquire(AcceleratorSpec(kind="cpu"), None), lost=True)
    monkeypatch.setattr(devices, "_acquired", [acquired])
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", fail)
    spec = AcceleratorSpec(kind="tpu", intra_op_threads=2, inter_op_threads=3)
    with pytest.raises(
        AcceleratorLost,
        match=r"lost its accelerator tpu and could not initialize it again: .*: still down",
    ):
        acquire(spec, None)
    assert (system.calls, acquired.lost) == (["shut down"], True)


def begin(folder: str, **accelerator: Any) -> dict[str, Any]:
    """Begin or continue a run; returns TensorFlow's thread counts and those of the log."""
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
        "warnings": lab.recorder.warnings,
    }


@pytest.mark.slow
def test_run_keeps_its_recorded_thread_counts(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = in_fresh_process(begin, folder=folder, intra_op_threads=1, inter_op_threads=3)
    assert first == {"set": [1, 3], "recorded": [1, 3], "kinds": ["origin", "checkpoint"], "warnings": []}
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
def test_tensorflow_used_before_acquire_is_refused() -> None:
    output = in_fresh_process(use_tensorflow_first)
    assert "TensorFlow was used before the accelerator was set up" in output
    assert "model.py and data.py must create tensors only within functions" in output
