"""What `kind: auto` chooses, and the line that gives the reason."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.tasks.foundation.contracts.placement import AcceleratorSpec
from baton.tasks.foundation.errors import AcceleratorError
from baton.tasks.foundation.machine import devices, tpu
from baton.tasks.foundation.machine.devices import acquire, choose_kind
from tests.support.stand_in_tpu import ANNOUNCED, look_like_a_tpu_vm


def test_auto_chooses_the_cpu_and_gives_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tpu, "_DEVICES", tmp_path)
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)
    assert choose_kind() == ("cpu", "accelerator: CPU (no TPU or GPU found)")
    (tmp_path / "nvidia0").touch()
    kind, line = choose_kind()
    assert kind == "cpu"
    assert "accelerator: CPU (no TPU found; tensorflow-cpu sees no GPU (device files" in line
    assert "nvidia0; CUDA_VISIBLE_DEVICES=" in line


def test_auto_chooses_a_tpu_before_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ANNOUNCED:
        monkeypatch.setenv(name, "")
    gpus = [SimpleNamespace(name="/physical_device:GPU:0")]
    monkeypatch.setattr(devices, "gpus", lambda: gpus)
    monkeypatch.setattr(tpu, "_DEVICES", tmp_path)
    assert choose_kind() == ("gpu", "accelerator: 1 GPU, GPU:0 (no TPU found)")
    device = look_like_a_tpu_vm(tmp_path, set_attribute=monkeypatch.setattr)
    kind, line = choose_kind()
    assert (kind, line) == ("tpu", f"accelerator: TPU ({device})")
    monkeypatch.setenv("PJRT_DEVICE", "CUDA")
    assert choose_kind() == ("gpu", "accelerator: 1 GPU, GPU:0 (PJRT_DEVICE excludes the TPU)")


def test_auto_refuses_a_tpu_that_the_packages_cannot_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "accel0").touch()
    monkeypatch.setattr(tpu, "_DEVICES", tmp_path)
    with pytest.raises(AcceleratorError, match=r"auto found a TPU \(.*accel0\), but tensorflow-cpu cannot.* kind: cpu"):
        acquire(AcceleratorSpec(), None)
    assert acquire(AcceleratorSpec(kind="cpu"), None).replicas == 1


@pytest.mark.parametrize(
    ("variable", "value"), [("TPU_WORKER_HOSTNAMES", "t1v-0,t1v-1"), ("TPU_ACCELERATOR_TYPE", "v5litepod-16")]
)
def test_auto_refuses_a_host_of_a_slice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str
) -> None:
    monkeypatch.setattr(tpu, "_DEVICES", tmp_path)  # a container without the device files
    monkeypatch.setenv(variable, value)
    with pytest.raises(AcceleratorError, match=f"{variable}.* slice of one host, such as v5litepod-8, or .*kind: cpu"):
        choose_kind()
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert choose_kind()[0] == "cpu"
