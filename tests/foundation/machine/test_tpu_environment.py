"""A TPU found without TensorFlow, and the variables that are set before TensorFlow is imported."""

import importlib.abc
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.errors import AcceleratorError
from baton.tasks.foundation.machine import tpu
from baton.tasks.foundation.machine.tpu import (
    device_files,
    looked_at,
    require_first_worker,
    require_local_tpu,
    require_one_host,
)
from tests.support.checkout import CHECKOUT
from tests.support.stand_in_tpu import ANNOUNCED, OF_A_SLICE, look_like_a_tpu_vm

ROOT = CHECKOUT


@pytest.fixture(autouse=True)
def _environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ANNOUNCED, *OF_A_SLICE):
        monkeypatch.setenv(name, "")  # restored after the test
        os.environ.pop(name)


@pytest.fixture
def tpu_vm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return look_like_a_tpu_vm(tmp_path / "dev", set_attribute=monkeypatch.setattr)


def require_both() -> None:
    require_one_host()
    require_local_tpu()


def refusal() -> str:
    with pytest.raises(AcceleratorError) as refused:
        require_both()
    assert refused.value.exit_code == 2
    return str(refused.value)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["accel0", "accel1"], ["accel0", "accel1"]),
        (["vfio/0", "vfio/vfio"], ["vfio/0"]),
        (["accel/accel0", "vfio/vfio", "null"], []),  # another vendor's chip, and a file that many machines have
    ],
)
def test_device_files_of_tpus_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str], found: list[str]
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setattr(tpu, "_DEVICES", tmp_path)
    assert device_files() == tuple(str(tmp_path / file) for file in found)


@pytest.mark.usefixtures("tpu_vm")
def test_tpu_vm_is_accepted() -> None:
    require_local_tpu()
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-8"
    require_one_host()


def test_missing_tpu_is_refused_with_all_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tpu, "_DEVICES", tmp_path)
    text = refusal()
    assert "this machine has no TPU" in text
    for part in ("accel[0-9]*", "vfio/[0-9]*: none", "PJRT_DEVICE=(not set)", "libtpu: not installed"):
        assert part in text
    assert "TensorFlow: tensorflow-cpu" in text
    assert "kind: auto" in text


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (
            ("tensorflow-cpu",),
            "tensorflow-cpu cannot use a TPU; install tensorflow-tpu in a separate environment: pip",
        ),
        (("tensorflow", "tensorflow-tpu"), "tensorflow and tensorflow-tpu are both installed"),
        ((), "this TensorFlow cannot use a TPU"),
    ],
)
@pytest.mark.usefixtures("tpu_vm")
def test_wrong_tensorflow_is_refused(monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], words: str) -> None:
    monkeypatch.setattr(tpu, "tensorflow_distributions", lambda: installed)
    assert words in refusal()


@pytest.mark.usefixtures("tpu_vm")
def test_missing_libtpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "library_path", lambda: None)
    assert "libtpu is not installed" in refusal()
    assert "pip install '.[tpu]'" in refusal()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TPU_WORKER_HOSTNAMES", "t1v-0,t1v-1", "TPU_WORKER_HOSTNAMES names 2 hosts"),
        ("TPU_WORKER_HOSTNAMES", "t1v-0,t1v-1", "on worker 0, use accelerator.kind: tpu with accelerator.tpu: slice"),
        ("MEGASCALE_NUM_SLICES", "2", "MEGASCALE_NUM_SLICES = 2"),
        ("TPU_PROCESS_ADDRESSES", "10.0.0.1:8476,10.0.0.2:8476", "TPU_PROCESS_ADDRESSES names 2 processes"),
        ("TPU_ACCELERATOR_TYPE", "v4-32", "TPU_ACCELERATOR_TYPE = v4-32, which has 4 hosts"),
        ("PJRT_DEVICE", "CPU", "the environment has PJRT_DEVICE = CPU; unset it"),
    ],
)
@pytest.mark.usefixtures("tpu_vm")
def test_environment_of_another_setup_is_refused(variable: str, value: str, words: str) -> None:
    os.environ[variable] = value
    assert words in refusal()


@pytest.mark.usefixtures("tpu_vm")
def test_only_the_first_worker_of_a_slice_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {"agent-worker-number": "0"}
    monkeypatch.setattr(tpu, "instance_attribute", metadata.get)
    require_first_worker()
    metadata["agent-worker-number"] = "2"
    with pytest.raises(AcceleratorError, match="is worker 2 of a TPU slice; baton runs on worker 0 only"):
        require_first_worker()
    os.environ["TPU_WORKER_ID"] = "0"
    require_first_worker()
    os.environ["TPU_WORKER_ID"] = "1"
    with pytest.raises(AcceleratorError, match="is worker 1 of a TPU slice"):
        require_first_worker()
    os.environ["MEGASCALE_NUM_SLICES"] = "2"
    with pytest.raises(AcceleratorError, match="MEGASCALE_NUM_SLICES = 2, and a TPUStrategy has the TPUs of one slice"):
        require_first_worker()


@pytest.mark.usefixtures("tpu_vm")
def test_type_of_a_tpu_vm_is_read_from_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "instance_attribute", {"accelerator-type": "v4-32"}.get)
    assert "(accelerator-type in the metadata = v4-32, which has 4 hosts)" in refusal()
    monkeypatch.setattr(tpu, "_DEVICES", tpu._DEVICES / "none")  # another machine of Google Cloud is not asked
    require_one_host()


@pytest.mark.usefixtures("tpu_vm")
def test_tensorflow_imported_too_early_is_refused() -> None:
    del os.environ["TF_PLUGGABLE_DEVICE_LIBRARY_PATH"]
    text = refusal()
    assert "TensorFlow was imported before the variables" in text
    assert "(TF_PLUGGABLE_DEVICE_LIBRARY_PATH)" in text


def test_distributions_are_read_from_package_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tpu.tensorflow_distributions() == ("tensorflow-cpu",)

    def version(name: str) -> str:
        if name in {"tensorflow", "tensorflow-tpu"}:
            return "2.19.1"
        raise PackageNotFoundError(name)

    monkeypatch.setattr(tpu, "version", version)
    assert tpu.tensorflow_distributions() == ("tensorflow", "tensorflow-tpu")


@pytest.mark.usefixtures("tpu_vm")
def test_nothing_is_announced_after_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ANNOUNCED:
        os.environ.pop(name)
    monkeypatch.setitem(sys.modules, "tensorflow", object())
    tpu.announce_tpu()
    assert not set(ANNOUNCED) & os.environ.keys()
    monkeypatch.delitem(sys.modules, "tensorflow")
    tpu.announce_tpu()
    assert os.environ["TF_PLUGGABLE_DEVICE_LIBRARY_PATH"] == "/opt/libtpu.so"
    assert "PJRT_DEVICE=TPU" in looked_at()


class _AtImport(importlib.abc.MetaPathFinder):
    """Prints the variables when TensorFlow is imported, and ends the process."""

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> None:
        if name == "tensorflow":
            sys.stdout.write(json.dumps({key: os.environ.get(key) for key in ANNOUNCED}) + "\n")
            sys.stdout.flush()
            os._exit(0)


def import_on_tpu_vm(folder: str, entry: str, distributions: str) -> None:
    """Import an entry point in a process without TensorFlow; return the variables at the time it imports TensorFlow."""
    tpu._DEVICES = Path(folder)
    tpu._DISTRIBUTIONS = tuple(distributions.split(","))  # type: ignore[misc]
    sys.meta_path.insert(0, _AtImport())
    if entry == "baton.flows.with_prefect.server":
        importlib.import_module(entry).set_quiet_defaults()
        entry = "baton.tasks.train_segment.stage"
    importlib.import_module(entry)
    if entry in {
        "baton.flows.train",
        "baton.flows.with_prefect.run_flows",
    }:  # a stage is imported only by the process that runs it
        importlib.import_module("baton.tasks.train_segment.stage")


@pytest.mark.parametrize(
    ("entry", "distributions", "preset", "values"),
    [
        ("baton.flows.train", "tensorflow-tpu", {}, ["TPU", "true", "LIB"]),
        ("baton.flows.with_prefect.server", "tensorflow-tpu", {}, ["TPU", "true", "LIB"]),
        ("baton.flows.with_prefect.run_flows", "tensorflow-tpu", {"PJRT_DEVICE": "CPU"}, ["CPU", "true", "LIB"]),
        ("baton.flows.train", "tensorflow-tpu,tensorflow-cpu", {}, [None, None, None]),
    ],
)
def test_variables_are_set_before_tensorflow_is_imported(
    tmp_path: Path, entry: str, distributions: str, preset: dict[str, str], values: list[str | None]
) -> None:
    packages, devices = tmp_path / "packages", tmp_path / "dev"
    (packages / "tensorflow_tpu-2.19.1.dist-info").mkdir(parents=True)
    (packages / "tensorflow_tpu-2.19.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tensorflow-tpu\nVersion: 2.19.1\n", encoding="utf-8"
    )
    (packages / "libtpu").mkdir()
    library = packages / "libtpu" / "libtpu.so"
    (packages / "libtpu" / "__init__.py").write_text(
        f"def get_library_path():\n    return {str(library)!r}\n", encoding="utf-8"
    )
    (devices / "vfio").mkdir(parents=True)
    (devices / "vfio" / "0").touch()
    code = (
        "from tests.foundation.machine import test_tpu_environment as here\n"
        f"here.import_on_tpu_vm({str(devices)!r}, {entry!r}, {distributions!r})"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ANNOUNCED}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**kept, **preset, "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = [str(library) if value == "LIB" else value for value in values]
    assert json.loads(done.stdout.splitlines()[-1]) == dict(zip(ANNOUNCED, expected, strict=True))
