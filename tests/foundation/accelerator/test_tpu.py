"""The TPU's path with stand-ins: every branch up to the first call that needs hardware, and a run on top of it."""

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tasks.foundation.accelerator import strategy, tpu, tpu_environment
from tasks.foundation.accelerator.strategy import Accelerator, acquire, may_be_lost
from tasks.foundation.accelerator.tpu import tpu_strategy
from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.errors import AcceleratorError, AcceleratorLost
from tests.support.lab import Heard, in_fresh_process
from tests.support.stand_in_tpu import TOLD, StandInResolver, StandInSystem, look_like_a_tpu_vm

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
    for name in (*TOLD, "TPU_WORKER_HOSTNAMES", "MEGASCALE_NUM_SLICES"):
        monkeypatch.setenv(name, "")
    look_like_a_tpu_vm(tmp_path / "dev", set_attribute=monkeypatch.setattr)
    system = StandInSystem()
    system.install(monkeypatch.setattr)
    monkeypatch.setattr(tf.distribute, "TPUStrategy", lambda resolver: ("strategy", resolver))
    monkeypatch.setattr(StandInResolver, "made", [])
    monkeypatch.setattr(StandInResolver, "workers", [])
    return system


@pytest.fixture
def listening() -> Iterator[str]:
    """Address of a server on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def named(**settings: str) -> AcceleratorSpec:
    return AcceleratorSpec(**{"kind": "tpu", "tpu": "my-tpu", "zone": "us-east5-b", "project": "p", **settings})  # type: ignore[arg-type]


def test_the_local_tpu_is_initialized_and_not_connected_to(system: StandInSystem) -> None:
    made, resolver = tpu_strategy(LOCAL)
    assert (made, resolver.made) == ("strategy", [{"tpu": "local"}])
    assert system.calls == ["initialize"]


def test_a_lost_tpu_is_shut_down_first(system: StandInSystem) -> None:
    tpu_strategy(LOCAL, again=True)
    assert system.calls == ["shut down", "initialize"]


def test_a_named_tpu_is_resolved_and_connected_to(
    system: StandInSystem, listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInResolver, "workers", [listening])
    tpu_strategy(named())
    assert StandInResolver.made == [{"tpu": "my-tpu", "zone": "us-east5-b", "project": "p"}]
    assert system.calls == ["connect", "initialize"]
    tpu_strategy(AcceleratorSpec(kind="tpu", tpu=f"grpc://{listening}"))


@pytest.mark.parametrize(
    ("spec", "workers", "words"),
    [
        (named(), ["10.0.0.1:8470", "10.0.0.2:8470"], "has 2 hosts (10.0.0.1:8470, 10.0.0.2:8470)"),
        (named(), ["192.0.2.1:8470"], "is at 192.0.2.1:8470, another machine"),
        (named(), ["127.0.0.1:9"], "nothing answers at 127.0.0.1:9"),
    ],
)
def test_a_named_tpu_that_cannot_be_used_is_refused(
    system: StandInSystem, monkeypatch: pytest.MonkeyPatch, spec: AcceleratorSpec, workers: list[str], words: str
) -> None:
    monkeypatch.setattr(StandInResolver, "workers", workers)
    with pytest.raises(AcceleratorError) as refused:
        tpu_strategy(spec)
    assert words in str(refused.value)
    assert "accelerator.tpu = my-tpu" in str(refused.value)
    assert system.calls == []


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        ({"zone": None}, "say accelerator.zone"),
        ({"project": None}, "say accelerator.project"),
        ({"zone": None, "project": None}, "say accelerator.zone and accelerator.project"),
    ],
)
def test_nothing_waits_on_a_metadata_server_that_is_not_there(
    system: StandInSystem, monkeypatch: pytest.MonkeyPatch, listening: str, left_out: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(tpu, "metadata_address", lambda: None)
    monkeypatch.setattr(StandInResolver, "workers", [listening])
    with pytest.raises(AcceleratorError) as refused:
        tpu_strategy(named(**left_out))
    assert str(refused.value).endswith(words)
    assert StandInResolver.made == []
    monkeypatch.setattr(tpu, "metadata_address", lambda: "169.254.169.254")
    tpu_strategy(named(**left_out))
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
def test_every_failure_says_what_was_tried(
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
def test_devices_that_cannot_be_listed_do_not_hide_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("first")

    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", fail)
    monkeypatch.setattr(tf.config, "list_logical_devices", fail)
    with pytest.raises(AcceleratorError, match=r"RuntimeError: first.*logical devices: not to be had \(RuntimeError\)"):
        tpu_strategy(LOCAL)


@pytest.mark.parametrize("spec", [LOCAL, named()])
def test_packages_come_before_any_call(
    system: StandInSystem, monkeypatch: pytest.MonkeyPatch, spec: AcceleratorSpec
) -> None:
    monkeypatch.setattr(tpu_environment, "tensorflow_distributions", lambda: ("tensorflow-cpu",))
    with pytest.raises(AcceleratorError, match="tensorflow-cpu cannot use a TPU"):
        tpu_strategy(spec)
    assert (StandInResolver.made, system.calls) == ([], [])


def test_one_process_keeps_to_one_named_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "_taken", [])
    monkeypatch.setattr(strategy, "_set_up", lambda *_: None)
    monkeypatch.setattr(strategy, "tpu_strategy", lambda _spec, **_: SimpleNamespace(num_replicas_in_sync=8))
    accelerator = acquire(named(), None)
    assert (accelerator.kind, accelerator.replicas, accelerator.hosts) == ("tpu", 8, 1)
    assert accelerator.io_device == "/job:localhost"
    assert acquire(named(), None) is accelerator
    for other in (named(zone="us-east5-a"), LOCAL):
        with pytest.raises(AcceleratorError, match=r"this process runs with .*tpu/p/us-east5-b/my-tpu"):
            acquire(other, None)
    monkeypatch.setattr(strategy, "_taken", [])
    assert acquire(LOCAL, None).io_device is None


@pytest.mark.parametrize(("spec", "asked"), [(LOCAL, 0), (AcceleratorSpec(kind="cpu"), 1)])
def test_tensorflow_is_not_asked_for_what_xla_refuses_on_tpus(
    monkeypatch: pytest.MonkeyPatch, spec: AcceleratorSpec, asked: int
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(strategy, "_taken", [])
    monkeypatch.setattr(strategy, "_set_up", lambda *_: None)
    monkeypatch.setattr(strategy, "tpu_strategy", lambda _spec, **_: SimpleNamespace(num_replicas_in_sync=8))
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: calls.append(True))
    assert acquire(spec, None).environment.deterministic
    assert len(calls) == asked


def test_what_is_lost_is_said_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(accelerator="tpu", replicas=8, intra_op_threads=1, inter_op_threads=1, versions={})
    accelerator = Accelerator(strategy=None, environment=environment)
    taken = strategy._Taken(("tpu", 1, 1, 1), accelerator)
    monkeypatch.setattr(strategy, "_taken", [taken])
    with pytest.raises(AcceleratorLost) as lost, may_be_lost(accelerator):
        raise tf.errors.UnavailableError(None, None, "Socket\nclosed")
    assert "(tpu, 8 replicas) was lost: UnavailableError: Socket closed. What is committed stays" in str(lost.value)
    assert (lost.value.exit_code, lost.value.retryable, taken.lost) == (3, True, True)


def test_a_cpu_is_never_lost() -> None:
    accelerator = acquire(AcceleratorSpec(kind="cpu"), None)
    with pytest.raises(tf.errors.CancelledError), may_be_lost(accelerator):
        raise tf.errors.CancelledError(None, None, "called off")
    assert acquire(AcceleratorSpec(kind="cpu"), None) is accelerator


def test_a_lost_gpu_needs_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = strategy._Taken(("gpu", 1, 2, 3), acquire(AcceleratorSpec(kind="cpu"), None), lost=True)
    monkeypatch.setattr(strategy, "_taken", [taken])
    spec = AcceleratorSpec(kind="gpu", intra_op_threads=2, inter_op_threads=3)
    with pytest.raises(AcceleratorLost, match="lost its accelerator gpu; run the same command again"):
        acquire(spec, None)


def test_a_tpu_that_stays_lost_is_no_bad_input(system: StandInSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_resolver: Any) -> None:
        raise tf.errors.UnavailableError(None, None, "still down")

    taken = strategy._Taken(("tpu", 1, 2, 3), acquire(AcceleratorSpec(kind="cpu"), None), lost=True)
    monkeypatch.setattr(strategy, "_taken", [taken])
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", fail)
    spec = AcceleratorSpec(kind="tpu", intra_op_threads=2, inter_op_threads=3)
    with pytest.raises(AcceleratorLost, match=r"lost its accelerator tpu, .*UnavailableError: still down.*"):
        acquire(spec, None)
    assert (system.calls, taken.lost) == (["shut down"], True)


class _Flaky:
    """The compiled loop; one call of it finds the TPU gone."""

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
    """The digits through all stages on a TPU that is none: straight, and with the TPU lost in the second segment."""
    look_like_a_tpu_vm(Path(folder) / "dev")
    system = StandInSystem()
    system.install()
    from flows.goal import Goal
    from flows.relay import relay, storage_of
    from flows.without_prefect import PLAIN
    from tasks.foundation.contracts.run_file import load_run_file
    from tasks.foundation.runlog.log import RunLog
    from tasks.foundation.telemetry.events import Note
    from tasks.train_segment import trainer
    from tests.support.shipped_runs import SHORT, run_file

    loses = [0]
    make_loop = trainer.make_loop
    trainer.make_loop = lambda *arguments: _Flaky(make_loop(*arguments), loses)
    told: dict[str, Any] = {"digests": []}
    common = ["train.steps=16", "train.segment_steps=6", "train.log_every_steps=4", "evaluate.every_steps=16"]
    for name in ("straight", "lost"):
        kept = [setting for setting in SHORT["digits"] if not setting.startswith(("train.", "evaluate."))]
        # 20 examples are 10 a replica, which a TPU would fill up to 16.
        settings = [*kept, *common, f"run={name}", f"storage={folder}/runs", "train.global_batch_size=20"]
        run = load_run_file(run_file("digits"), [*settings, "accelerator.kind=auto"])
        heard = Heard()
        try:
            # The first inner loop of a segment is one step long; the loss comes after the first segment's commit.
            loses[0] = 6 if name == "lost" else 0
            result = relay(run, Goal.of(run.spec), PLAIN, telemetry=heard)
        except AcceleratorLost as fault:
            head = RunLog(storage_of(run).at(name)).require_head()
            told["loss"] = {"said": str(fault), "at": None if head.tip is None else head.tip.step}
            told["calls before"] = list(system.calls)
            result = relay(run, Goal.of(run.spec), PLAIN, telemetry=heard)
        told["digests"].append(result.state_digest)
        told[name] = [event.text for event in heard.events if isinstance(event, Note)]
    environment = RunLog(storage_of(run).at("straight")).require_head().environment
    told["environment"] = environment.model_dump()
    told["calls"] = system.calls
    return told


@pytest.mark.slow
def test_the_digits_train_on_a_stand_in_and_survive_its_loss(tmp_path: Path) -> None:
    told = in_fresh_process(train_on_stand_in, folder=str(tmp_path))
    assert told["digests"][0] == told["digests"][1]
    assert told["loss"]["at"] == 6
    assert "the accelerator (tpu, 2 replicas) was lost: UnavailableError: Socket closed" in told["loss"]["said"]
    assert told["calls before"] == ["initialize", "strategy"]
    assert told["calls"] == ["initialize", "strategy", "shut down", "initialize", "strategy"]
    assert (told["environment"]["accelerator"], told["environment"]["replicas"]) == ("tpu", 2)
    assert told["environment"]["hosts"] == 1
    notes = "\n".join(told["straight"])
    assert "accelerator: a TPU, for this machine has its device files" in notes
    assert "variables: " in notes
    assert "on each of CPU:0, CPU:1" in notes
    assert (
        "10 examples a replica are filled up to 16, so 38% of the work is padding: let a replica have 8 or 16" in notes
    )
