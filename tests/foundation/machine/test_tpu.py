"""TPUs with stand-ins: every branch up to the first call that needs hardware, and a run on a stand-in."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from baton.tasks.foundation.contracts.placement import AcceleratorSpec
from baton.tasks.foundation.errors import AcceleratorError, AcceleratorLost
from baton.tasks.foundation.machine import tpu
from baton.tasks.foundation.machine import tpu as tpu_environment
from baton.tasks.foundation.machine.tpu import serve, tpu_strategy
from tests.support.event_recorder import EventRecorder
from tests.support.lab import in_fresh_process
from tests.support.stand_in_tpu import ANNOUNCED, OF_A_SLICE, StandInResolver, StandInSystem, look_like_a_tpu_vm

LOCAL = AcceleratorSpec(kind="tpu")
CALLS = {
    "TPUClusterResolver": (tf.distribute.cluster_resolver, "TPUClusterResolver"),
    "experimental_connect_to_cluster": (tf.config, "experimental_connect_to_cluster"),
    "shutdown_tpu_system": (tf.tpu.experimental, "shutdown_tpu_system"),
    "initialize_tpu_system": (tf.tpu.experimental, "initialize_tpu_system"),
    "TPUStrategy": (tf.distribute, "TPUStrategy"),
}


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandInSystem:
    for name in (*ANNOUNCED, *OF_A_SLICE, tpu._STREAMING):
        monkeypatch.setenv(name, "")
    look_like_a_tpu_vm(tmp_path / "dev", set_attribute=monkeypatch.setattr)
    system = StandInSystem()
    system.install(monkeypatch.setattr)
    monkeypatch.setattr(tf.distribute, "TPUStrategy", lambda resolver: ("strategy", resolver))
    monkeypatch.setattr(StandInResolver, "made", [])
    monkeypatch.setattr(tpu, "metadata_address", lambda: "169.254.169.254")
    monkeypatch.setattr(StandInResolver, "workers", [])
    return system


@pytest.fixture
def listening() -> Iterator[str]:
    """Address of a server on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def named(**settings: Any) -> AcceleratorSpec:
    return AcceleratorSpec(**{"kind": "tpu", "tpu": "my-tpu", **settings})


def test_local_tpu_is_initialized_without_connecting(system: StandInSystem) -> None:
    made, resolver = tpu_strategy(LOCAL)
    assert (made, resolver.made) == ("strategy", [{"tpu": "local"}])
    assert system.calls == ["initialize"]


def test_lost_tpu_is_shut_down_first(system: StandInSystem) -> None:
    tpu_strategy(LOCAL, again=True)
    assert system.calls == ["shut down", "initialize"]


def test_named_tpu_is_connected(system: StandInSystem, listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInResolver, "workers", [listening])
    tpu_strategy(named())
    assert StandInResolver.made == [{"tpu": "my-tpu"}]
    assert system.calls == ["connect", "initialize"]
    tpu_strategy(AcceleratorSpec(kind="tpu", tpu=f"grpc://{listening}"))


def test_each_host_of_a_named_tpu_must_respond(
    system: StandInSystem, monkeypatch: pytest.MonkeyPatch, listening: str
) -> None:
    monkeypatch.setattr(StandInResolver, "workers", [listening, "127.0.0.1:9"])
    with pytest.raises(
        AcceleratorLost, match=r"accelerator\.tpu = my-tpu: no TensorFlow server responds at 127.0.0.1:9 .* 0.1 s"
    ):
        tpu_strategy(named(connect_seconds=0.1))
    assert system.calls == []


def test_hosts_of_a_slice_are_found(system: StandInSystem, monkeypatch: pytest.MonkeyPatch, listening: str) -> None:
    metadata = dict[str, str]()
    monkeypatch.setattr(tpu, "instance_attribute", metadata.get)
    monkeypatch.setattr(StandInResolver, "workers", [listening])
    slice_of_hosts = named(tpu="slice")
    with pytest.raises(AcceleratorError, match="neither TPU_WORKER_HOSTNAMES nor this machine's metadata names"):
        tpu_strategy(slice_of_hosts)
    metadata["worker-network-endpoints"] = "unknown:unknown:10.164.0.60,unknown:unknown:10.164.0.61"
    tpu_strategy(slice_of_hosts)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a.slice,b.slice")
    tpu_strategy(slice_of_hosts)
    assert StandInResolver.made == [
        {"tpu": "grpc://10.164.0.60:8470,grpc://10.164.0.61:8470"},
        {"tpu": "grpc://a.slice:8470,grpc://b.slice:8470"},
    ]
    assert system.calls == ["connect", "initialize"] * 2


def test_named_tpu_is_refused_without_a_metadata_server(
    system: StandInSystem, monkeypatch: pytest.MonkeyPatch, listening: str
) -> None:
    monkeypatch.setattr(tpu, "metadata_address", lambda: None)
    monkeypatch.setattr(StandInResolver, "workers", [listening])
    with pytest.raises(AcceleratorError) as refused:
        tpu_strategy(named())
    assert "accelerator.tpu = my-tpu: this machine is not on Google Cloud" in str(refused.value)
    assert StandInResolver.made == []
    monkeypatch.setattr(tpu, "metadata_address", lambda: "169.254.169.254")
    tpu_strategy(named())
    assert system.calls == ["connect", "initialize"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "fault",
    [
        tf.errors.NotFoundError(None, None, "TPUs not found in the cluster."),
        tf.errors.UnavailableError(None, None, "failed to connect to all addresses"),
        ValueError("Could not lookup TPU metadata\nfrom name"),
        RuntimeError("already held by process 7"),
        ImportError("no googleapiclient"),
    ],
    ids=lambda fault: type(fault).__name__,
)
@pytest.mark.usefixtures("system")
def test_every_failure_names_the_call_and_the_findings(
    monkeypatch: pytest.MonkeyPatch, listening: str, call: str, fault: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(StandInResolver, "workers", [listening])
    monkeypatch.setattr(*CALLS[call], fail)
    spec = named() if call == "experimental_connect_to_cluster" else LOCAL
    with pytest.raises(AcceleratorError) as refused:
        tpu_strategy(spec, again=True)
    text = str(refused.value)
    assert f"{call} failed with {type(fault).__name__}: {' '.join(str(fault).split())}" in text
    for part in (f"accelerator.tpu = {spec.tpu}", "accel0", "PJRT_DEVICE=TPU", "libtpu: /opt/libtpu.so"):
        assert part in text
    assert "logical devices: /device:CPU:0" in text
    assert refused.value.__cause__ is fault


@pytest.mark.usefixtures("system")
def test_unlisted_devices_do_not_hide_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("first")

    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", fail)
    monkeypatch.setattr(tf.config, "list_logical_devices", fail)
    with pytest.raises(AcceleratorError, match=r"RuntimeError: first.*logical devices: unavailable \(RuntimeError\)"):
        tpu_strategy(LOCAL)


@pytest.mark.parametrize("spec", [LOCAL, named()])
def test_packages_are_checked_before_any_call(
    system: StandInSystem, monkeypatch: pytest.MonkeyPatch, spec: AcceleratorSpec
) -> None:
    monkeypatch.setattr(tpu_environment, "tensorflow_distributions", lambda: ("tensorflow-cpu",))
    with pytest.raises(AcceleratorError, match="tensorflow-cpu cannot use a TPU"):
        tpu_strategy(spec)
    assert (StandInResolver.made, system.calls) == ([], [])


def test_server_needs_a_tpu_and_a_free_port(system: StandInSystem, listening: str) -> None:
    with pytest.raises(AcceleratorError, match=f"cannot listen at port {listening.rpartition(':')[2]}: .*Google's"):
        serve(int(listening.rpartition(":")[2]), ready=system.calls.clear)
    tpu._DEVICES.joinpath("accel0").unlink()
    with pytest.raises(AcceleratorError, match="this machine has no TPU"):
        serve(0, ready=system.calls.clear)


class _Flaky:
    """The compiled loop; one of its calls finds the TPU gone."""

    def __init__(self, loop: Any, fails_at: list[int]) -> None:
        self._loop, self._fails_at = loop, fails_at

    def get_concrete_function(self, *arguments: Any) -> Any:
        return self._loop.get_concrete_function(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        self._fails_at[0] -= 1
        if self._fails_at[0] == 0:
            raise tf.errors.UnavailableError(None, None, "Socket closed")
        return self._loop(*arguments)


def train_on_stand_in(folder: str) -> dict[str, Any]:
    """The digits through all stages on a stand-in TPU: straight, and with the TPU lost in the second segment."""
    look_like_a_tpu_vm(Path(folder) / "dev")
    system = StandInSystem()
    system.install()
    from baton.flows.opened_run import OpenedRun, storage_of
    from baton.flows.result import Goal
    from baton.flows.train import train
    from baton.tasks.foundation.contracts.run_file import load_run_file
    from baton.tasks.foundation.log.log import RunLog
    from baton.tasks.foundation.telemetry.events import Note
    from baton.tasks.train_segment import trainer
    from tests.support.shipped_runs import SHORT, run_file

    loses = [0]
    make_loop = trainer.make_loop
    trainer.make_loop = lambda *arguments: _Flaky(make_loop(*arguments), loses)
    found: dict[str, Any] = {"digests": []}
    common = ["train.steps=16", "train.segment_steps=6", "train.log_every_steps=4", "evaluate.every_steps=16"]
    for name in ("straight", "lost"):
        kept = [setting for setting in SHORT["digits"] if not setting.startswith(("train.", "evaluate."))]
        # 20 examples are 10 per replica, which a TPU pads to 16.
        settings = [*kept, *common, f"run={name}", f"storage={folder}/runs", "train.global_batch_size=20"]
        run = load_run_file(run_file("digits"), [*settings, "accelerator.kind=auto"])
        recorder = EventRecorder()
        try:
            # A segment begins with an inner loop of one step; the TPU is lost after the first segment's commit.
            loses[0] = 6 if name == "lost" else 0
            result = train(OpenedRun.open(run), Goal.of(run.spec), telemetry=recorder)
        except AcceleratorLost as fault:
            head = RunLog(storage_of(run).at(name)).require_head()
            found["loss"] = {"message": str(fault), "at": None if head.tip is None else head.tip.step}
            found["calls before"] = list(system.calls)
            result = train(OpenedRun.open(run), Goal.of(run.spec), telemetry=recorder)
        found["digests"].append(result.state_digest)
        found[name] = [event.text for event in recorder.events if isinstance(event, Note)]
    environment = RunLog(storage_of(run).at("straight")).require_head().environment
    found["environment"] = environment.model_dump()
    found["calls"] = system.calls
    return found


@pytest.mark.slow
def test_digits_train_on_a_stand_in_and_survive_its_loss(tmp_path: Path) -> None:
    found = in_fresh_process(train_on_stand_in, folder=str(tmp_path))
    assert found["digests"][0] == found["digests"][1]
    assert found["loss"]["at"] == 6
    assert "the accelerator (tpu, 2 replicas) was lost: UnavailableError: Socket closed" in found["loss"]["message"]
    assert found["calls before"] == ["initialize", "strategy"]
    assert found["calls"] == ["initialize", "strategy", "shut down", "initialize", "strategy"]
    assert (found["environment"]["accelerator"], found["environment"]["replicas"]) == ("tpu", 2)
    assert found["environment"]["hosts"] == 1
    notes = "\n".join(found["straight"])
    assert "accelerator: TPU (" in notes
    assert "variables: " in notes
    assert "on each of CPU:0, CPU:1" in notes
