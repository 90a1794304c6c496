"""The accelerator of a process: one `tf.distribute.Strategy` and what it runs on.

TensorFlow fixes devices and threads at first use, and a second MirroredStrategy in one process crashes. So the first
`acquire` decides for the process; a call with other settings is refused. `kind: auto` is a TPU, else GPUs, else CPU.
With `kind: multi_worker` the processes of several hosts share the strategy (`hosts.py`).
"""

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from baton.tasks.foundation.contracts.log_entry import Environment, KerasConfig
from baton.tasks.foundation.contracts.placement import AcceleratorSpec
from baton.tasks.foundation.errors import AcceleratorError, AcceleratorLost
from baton.tasks.foundation.keras_config import keep_keras_config
from baton.tasks.foundation.machine.cluster import Cluster, cluster_of
from baton.tasks.foundation.machine.collectives import differences_between_hosts, refuse_difference
from baton.tasks.foundation.machine.environment import (
    deciding_variables,
    installed_versions,
    processor,
    thread_counts,
    use_xla_cache,
)
from baton.tasks.foundation.machine.host_link import HostLink
from baton.tasks.foundation.machine.tpu import (
    IO_DEVICE,
    device_files,
    is_declined,
    require_one_host,
    require_packages,
    servers_of,
    tensorflow_distributions,
    tpu_strategy,
)

_DEVICES = Path("/dev")
_DEVICE_FILES = "nvidia[0-9]*"
_STRIDE = 1 << 17
# TensorFlow raises these when a device or another host is gone, or when a step was cancelled.
DEVICE_LOST_ERRORS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.UnavailableError,
)
# What gRPC makes of a call or an answer that arrived garbled, by its words: other internal errors are of operations.
_GARBLED = ("Unable to parse request", "could not parse rpc response")
_LONGEST_TEXT = 300


def worker_strategy(cluster: Cluster) -> Any:
    """Connect to the other workers; waits until all of them have connected.

    Raises:
        AcceleratorError: the connection failed, or the workers have different numbers of devices.
    """
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(cluster.tf_config()["cluster"]),
                task_type="worker",
                task_id=cluster.host,
                num_accelerators={"GPU": len(gpus())},
            )
        )
    except (tf.errors.OpError, RuntimeError, ValueError) as fault:
        raise AcceleratorError(
            f"worker {cluster.host} of {', '.join(cluster.addresses)} could not connect to the others "
            f"({type(fault).__name__}: {str(fault).splitlines()[0]}); check that all of them run the same command and "
            f"that the addresses in {cluster.source} are reachable"
        ) from fault
    _restore_sigterm_handler()
    if strategy.num_replicas_in_sync % len(cluster.addresses):
        raise AcceleratorError(
            f"{strategy.num_replicas_in_sync} replicas on {len(cluster.addresses)} workers; give every worker the "
            "same number of devices"
        )
    return strategy


class Exchange:
    """Sends numbers of every host to all hosts. A collective: all hosts call it in the same order."""

    def __init__(self, strategy: Any, hosts: int) -> None:
        """Define the collective; nothing is sent yet."""
        self._replicas_of_host = strategy.num_replicas_in_sync // hosts

        def gather(values: Any) -> Any:
            def on_replica(mine: Any) -> Any:
                return tf.distribute.get_replica_context().all_gather(mine[tf.newaxis], axis=0)

            return strategy.experimental_local_results(strategy.run(on_replica, args=(values,)))[0]

        self._gather = tf.function(gather, jit_compile=False)

    def numbers(self, mine: Sequence[float]) -> npt.NDArray[np.float64]:
        """Numbers of every host.

        Args:
            mine: this host's numbers, equally many on every host. Integers are exact below 2**53.

        Returns:
            float64 [hosts, len(mine)].
        """
        of_replicas = self._gather(tf.constant(list(mine), tf.float64)).numpy()
        return np.asarray(of_replicas[:: self._replicas_of_host], np.float64)


def _restore_sigterm_handler() -> None:
    """Restore Python's SIGTERM handler: TensorFlow's coordination service replaces it and drops the signal (2.19)."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def gpus() -> list[Any]:
    """TensorFlow's physical GPUs, without those hidden by CUDA_VISIBLE_DEVICES."""
    return list(tf.config.list_physical_devices("GPU"))


def gpu_files() -> tuple[str, ...]:
    """Paths of the device files of GPUs, sorted, whether or not TensorFlow can use them."""
    return tuple(sorted(str(path) for path in _DEVICES.glob(_DEVICE_FILES)))


def why_no_gpu() -> str:
    """The GPUs in TensorFlow and in /dev, for messages."""
    return (
        f"{', '.join(tensorflow_distributions()) or 'TensorFlow'} sees no GPU (device files "
        f"{_DEVICES / _DEVICE_FILES}: {', '.join(gpu_files()) or 'none'}; CUDA_VISIBLE_DEVICES="
        f"{os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')})"
    )


def grow_memory() -> None:
    """Let TensorFlow allocate GPU memory on demand. Call before TensorFlow uses the GPUs.

    Raises:
        AcceleratorError: there is no GPU.
        RuntimeError: TensorFlow has already used them.
    """
    found = gpus()
    if not found:
        raise AcceleratorError(
            f"accelerator.kind = gpu, but tf.config.list_physical_devices('GPU') is empty: {why_no_gpu()}. Install the "
            "driver, and TensorFlow for GPU in a separate environment: pip install '.[gpu]' in the checkout; or use "
            "kind: auto"
        )
    for gpu in found:
        tf.config.experimental.set_memory_growth(gpu, True)


def gpu_strategy() -> Any:
    """MirroredStrategy over all GPUs; for a single GPU, TensorFlow's default strategy.

    The default strategy places everything on the GPU. A MirroredStrategy of one device would refuse what Keras can do
    on one replica, such as gradient accumulation.
    """
    count = len(gpus())
    if count == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"GPU:{index}" for index in range(count)])


def choose_kind() -> tuple[str, str]:
    """The kind, and a line that says why. It reads only device files and TensorFlow's devices, so it never waits.

    Raises:
        AcceleratorError: there is a TPU, but the installed packages cannot use it, or it is one host's part of a slice.
    """
    require_one_host()
    files = device_files()
    if files and not is_declined():
        try:
            require_packages()
        except AcceleratorError as fault:
            raise AcceleratorError(
                f"accelerator.kind = auto found a TPU ({files[0]}), but {fault}; or use kind: cpu, or gpu, to train "
                "without it"
            ) from fault
        return "tpu", f"accelerator: TPU ({', '.join(files)})"
    no_tpu = "PJRT_DEVICE excludes the TPU" if files else "no TPU found"
    found = gpus()
    if found:
        names = ", ".join(gpu.name.removeprefix("/physical_device:") for gpu in found)
        return "gpu", f"accelerator: {len(found)} GPU{'s' * (len(found) > 1)}, {names} ({no_tpu})"
    if gpu_files():  # TensorFlow cannot use the GPU: report everything that helps to find the cause
        return "cpu", f"accelerator: CPU ({no_tpu}; {why_no_gpu()})"
    return "cpu", "accelerator: CPU (" + (f"{no_tpu}, no GPU found)" if files else "no TPU or GPU found)")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A strategy and what it runs on.

    Attributes:
        strategy: the `tf.distribute.Strategy` of this process.
        environment: devices, threads and versions, as the log records them.
        host: index of this host, from 0.
        exchange: sends numbers between hosts; None for a single host.
        link: carries frames between hosts, from any thread; None for a single host.
        auto_choice: what `kind: auto` chose, and why; empty for other kinds.
    """

    strategy: Any
    environment: Environment
    host: int = 0
    exchange: Exchange | None = None
    link: HostLink | None = None
    auto_choice: str = ""

    @property
    def kind(self) -> str:
        """cpu, gpu, tpu or multi_worker; never auto."""
        return self.environment.accelerator

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.environment.hosts

    @property
    def has_servers(self) -> bool:
        """Whether the replicas belong to TensorFlow servers, whose files these read without Python."""
        return self.environment.servers > 0

    @property
    def io_device(self) -> str | None:
        """The device whose memory belongs to this process, if replicas belong to TensorFlow servers; else None."""
        return IO_DEVICE if self.has_servers else None

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the log, as a single host always does."""
        return self.host == 0

    @property
    def agreed(self) -> str:
        """Digest of what several hosts have agreed on; empty for a single host."""
        return "" if self.link is None else self.link.agreed

    @property
    def replicas(self) -> int:
        """Number of replicas on all hosts."""
        return self.environment.replicas

    @property
    def local_replicas(self) -> range:
        """Indices of this host's replicas."""
        count = self.replicas // self.hosts
        return range(self.host * count, (self.host + 1) * count)

    def gather_from_hosts(self, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        """The numbers of every host, float64 [hosts, len(numbers)]. A collective: all hosts call it in one order."""
        if self.exchange is None:
            return np.asarray([numbers], np.float64)
        return self.exchange.numbers(numbers)

    def broadcast_from_chief(self, number: int) -> int:
        """The chief's number, on every host. Waits for the chief."""
        return int(self.gather_from_hosts([number])[0, 0])

    def all_agree(self, yes: bool) -> bool:
        """Whether `yes` is true on all hosts."""
        return bool(self.gather_from_hosts([yes]).all())

    def require_same(self, values: Mapping[str, Any]) -> None:
        """Refuse to go on, on every host, unless all of them have the same values. A collective.

        Raises:
            InvalidInput: hosts differ; the message is the same on all of them.
        """
        if self.exchange is None:
            return
        found = differences_between_hosts(self, values)
        if found:
            # None leaves before all have the values: what a host sends is lost when its process ends.
            with suppress(*DEVICE_LOST_ERRORS, tf.errors.InternalError):
                self.all_agree(False)
        refuse_difference(found)


@dataclass(slots=True)
class _Acquired:
    """The settings of the first `acquire`, and its accelerator."""

    settings: tuple[str, int, int, int]
    accelerator: Accelerator
    lost: bool = False
    deterministic: bool = True


# A process has one accelerator, because TensorFlow fixes it at first use; at most one element.
_acquired: list[_Acquired] = []


def acquire(
    spec: AcceleratorSpec, recorded: Environment | None, *, deterministic: bool = True, link: HostLink | None = None
) -> Accelerator:
    """The accelerator of this process. The first call creates it; a call after a local TPU was lost creates it again.

    Args:
        spec: `accelerator` of the run file.
        recorded: the run's recorded environment, whose thread counts and Keras configuration are kept; None for a new
            run.
        deterministic: `train.deterministic`; fixed by the first call.
        link: of this host to the others; kept by the first call.

    Raises:
        InvalidInput: Keras already uses another backend in this process.
        AcceleratorError: the devices are missing, or the process already has other settings.
        AcceleratorLost: the process had the devices and lost them.
    """
    of_keras = keep_keras_config(None if recorded is None else recorded.keras)
    intra, inter = thread_counts(spec, recorded)
    if not _acquired and spec.kind != "tpu":  # before TensorFlow lists its devices, as `choose_kind` does
        use_xla_cache(os.environ, intra=intra, inter=inter, deterministic=deterministic)
    kind, auto_choice = choose_kind() if spec.kind == "auto" else (spec.kind, "")
    settings = (_name(kind, spec), spec.replicas, intra, inter)
    if not _acquired:
        _set_up(kind, spec.replicas, intra, inter)
        # XLA's programs for TPUs are deterministic without this. With it, XLA refuses some of them, such as the
        # gradient of max pooling, because TensorFlow checks for GPU kernels.
        if deterministic and kind != "tpu":
            tf.config.experimental.enable_op_determinism()
        made = _make(kind, spec, intra, inter, of_keras, deterministic=deterministic, auto_choice=auto_choice)
        _acquired.append(_Acquired(settings, replace(made, link=link), deterministic=deterministic))
    acquired = _acquired[0]
    if acquired.settings != settings:
        raise AcceleratorError(
            f"this process already uses accelerator, replicas and threads {acquired.settings}; start another process "
            f"for {settings}"
        )
    if acquired.deterministic != deterministic:
        raise AcceleratorError(
            f"this process already uses train.deterministic = {str(acquired.deterministic).lower()}; start another "
            f"process for {str(deterministic).lower()}"
        )
    if acquired.lost:
        gone = f"this process lost its accelerator {settings[0]}"
        if kind != "tpu" or acquired.accelerator.has_servers:  # no process can connect twice
            raise AcceleratorLost(f"{gone}; run the same command again")
        try:
            acquired.accelerator = _make(
                kind, spec, intra, inter, of_keras, deterministic=deterministic, auto_choice=auto_choice, again=True
            )
            acquired.lost = False
        except AcceleratorError as fault:
            # The process had the devices before, so the run file is correct.
            raise AcceleratorLost(f"{gone} and could not initialize it again: {fault}") from fault
    return acquired.accelerator


def thread_override_warning(accelerator: Accelerator) -> str:
    """A warning if the user's code has set TensorFlow's thread counts after `acquire`; else empty.

    Call it after TensorFlow's first operation, which fixes the counts.
    """
    environment, threading = accelerator.environment, tf.config.threading
    recorded = (environment.intra_op_threads, environment.inter_op_threads)
    actual = (threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads())
    if actual == recorded:
        return ""
    return (
        f"the run's code set TensorFlow's threads to {actual[0]} within an operation and {actual[1]} operations at a "
        f"time (0: one per CPU); the log records {recorded[0]} and {recorded[1]}. Set accelerator.intra_op_threads and "
        "accelerator.inter_op_threads in the run file instead"
    )


@contextmanager
def may_be_lost(accelerator: Accelerator) -> Iterator[None]:
    """Turn TensorFlow's errors about lost devices and hosts into `AcceleratorLost`.

    No state on a TPU survives its re-initialization, nor does the strategy; and a group of hosts that has lost one
    cannot accept another. So the work fails, resumable from its last commit. The next `acquire` of this process
    initializes the TPU again and makes a new strategy, for which models are built again.

    Raises:
        AcceleratorLost: a device or a host is gone.
    """
    try:
        yield
    except (*DEVICE_LOST_ERRORS, tf.errors.InternalError) as fault:
        garbled = accelerator.has_servers and any(words in str(fault.message) for words in _GARBLED)
        if accelerator.kind == "cpu" or (isinstance(fault, tf.errors.InternalError) and not garbled):
            raise
        for acquired in _acquired:
            acquired.lost = acquired.lost or acquired.accelerator is accelerator
        if accelerator.link is not None:
            accelerator.link.close()  # so that no thread of any host waits for one that is gone
        if accelerator.hosts > 1:
            raise AcceleratorLost(
                f"another of the {accelerator.hosts} workers is gone ({type(fault).__name__}). Committed checkpoints "
                "are kept; run the same command again on all of them to continue"
            ) from fault
        reason = " ".join(str(fault.message).split())
        raise AcceleratorLost(
            f"the accelerator ({accelerator.kind}, {accelerator.replicas} replicas) was lost: {type(fault).__name__}: "
            f"{reason[:_LONGEST_TEXT]}. Committed checkpoints are kept; run the same command again to continue"
        ) from fault


def _name(kind: str, spec: AcceleratorSpec) -> str:
    """The kind, with the name of a TPU that the run file names."""
    if kind != "tpu" or spec.tpu == "local":
        return kind
    return f"tpu/{spec.tpu}"


def _set_up(kind: str, replicas: int, intra: int, inter: int) -> None:
    """Settings that TensorFlow accepts only before it uses a device."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(intra)
        tf.config.threading.set_inter_op_parallelism_threads(inter)
        if kind == "gpu":
            grow_memory()
        if kind == "cpu":
            # TensorFlow would use a visible GPU or TPU, although the run file selects the CPU.
            for other in ("GPU", "TPU"):
                tf.config.set_visible_devices([], other)
        if replicas > 1:
            cpu = tf.config.list_physical_devices("CPU")[0]
            logical = [tf.config.LogicalDeviceConfiguration()] * replicas
            tf.config.set_logical_device_configuration(cpu, logical)
    except RuntimeError as fault:
        raise AcceleratorError(
            f"TensorFlow was used before the accelerator was set up ({fault}); model.py and data.py must create "
            "tensors only within functions, not when they are imported"
        ) from fault


def _make(
    kind: str,
    spec: AcceleratorSpec,
    intra: int,
    inter: int,
    of_keras: KerasConfig,
    *,
    deterministic: bool,
    auto_choice: str,
    again: bool = False,
) -> Accelerator:
    cluster = cluster_of(os.environ) if kind == "multi_worker" else None
    exchange = None
    if cluster is not None:
        strategy = worker_strategy(cluster)
        exchange = Exchange(strategy, len(cluster.addresses)) if len(cluster.addresses) > 1 else None
    elif kind == "tpu":
        strategy = tpu_strategy(spec, again=again)
    elif kind == "gpu":
        strategy = gpu_strategy()
    elif spec.replicas == 1:
        strategy = tf.distribute.get_strategy()
    else:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(spec.replicas)])
    name, features = processor()
    environment = Environment(
        accelerator=kind,
        replicas=strategy.num_replicas_in_sync,
        hosts=1 if cluster is None else len(cluster.addresses),
        servers=len(servers_of(strategy)) if kind == "tpu" and spec.tpu != "local" else 0,
        intra_op_threads=intra,
        inter_op_threads=inter,
        versions=installed_versions(),
        deterministic=deterministic,
        processor=name,
        cpu_features=features,
        variables=deciding_variables(os.environ),
        keras=of_keras,
    )
    return Accelerator(
        strategy=strategy,
        environment=environment,
        host=0 if cluster is None else cluster.host,
        exchange=exchange,
        auto_choice=auto_choice,
    )


def align_function_numbers() -> None:
    """Let the next function that is traced have the same number in every process that has traced fewer than `_STRIDE`.

    TensorFlow counts all that it names, and the number cannot be set; counting up takes some milliseconds.
    """
    from tensorflow.python.framework import ops  # no public function counts

    while ops.uid() % _STRIDE:
        pass
