"""The one strategy of a process.

TensorFlow fixes devices and threads at first use, and a second MirroredStrategy in one process dies; so the first
caller decides, and who asks for something else is told to start another process.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks.foundation.accelerator.cluster import cluster_of
from tasks.foundation.accelerator.environment import installed_versions, thread_counts
from tasks.foundation.accelerator.gpu import gpu_files, gpu_strategy, gpus, grow_memory, why_no_gpu
from tasks.foundation.accelerator.multi_worker import Exchange, worker_strategy
from tasks.foundation.accelerator.tpu import IO_DEVICE, tpu_strategy
from tasks.foundation.accelerator.tpu_environment import device_files, is_declined, require_packages
from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.errors import AcceleratorError, AcceleratorLost

# What TensorFlow raises when a device or the process that holds it is gone, or a step was called off.
OUTER_CAUSES = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.UnavailableError,
)

_LONGEST_TEXT = 300


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A strategy and what it runs on.

    Attributes:
        strategy: the `tf.distribute.Strategy` of this process.
        environment: what is recorded of it.
        host: this machine's number among those that feed the replicas, from 0.
        exchange: how the hosts tell each other something; None where there is one.
        said: for `auto`: what was chosen and why; else empty.
        io_device: where checkpoints are written and read; None where the devices are this process's own.
    """

    strategy: Any
    environment: Environment
    host: int = 0
    exchange: Exchange | None = None
    said: str = ""
    io_device: str | None = None

    @property
    def kind(self) -> str:
        """What it is: cpu, gpu, tpu or multi_worker, never auto."""
        return self.environment.accelerator

    @property
    def hosts(self) -> int:
        """Machines that feed the replicas."""
        return self.environment.hosts

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the log; of one host it always does."""
        return self.host == 0

    @property
    def replicas(self) -> int:
        """Number of model copies."""
        return self.environment.replicas

    @property
    def local_replicas(self) -> range:
        """Numbers of the replicas that this host feeds."""
        count = self.replicas // self.hosts
        return range(self.host * count, (self.host + 1) * count)

    def of_all_hosts(self, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        """What every host says, float64 [hosts, len(numbers)]. All of them call it, in the same order."""
        if self.exchange is None:
            return np.asarray([numbers], np.float64)
        return self.exchange.numbers(numbers)

    def of_chief(self, number: int) -> int:
        """The chief's number, on every host; it waits for the chief."""
        return int(self.of_all_hosts([number])[0, 0])

    def all_agree(self, yes: bool) -> bool:
        """Whether all hosts say yes."""
        return bool(self.of_all_hosts([yes]).all())


@dataclass(slots=True)
class _Taken:
    """What the first call asked for, and got."""

    settings: tuple[str, int, int, int]
    accelerator: Accelerator
    lost: bool = False
    deterministic: bool = True


_taken: list[_Taken] = []


def acquire(spec: AcceleratorSpec, recorded: Environment | None, *, deterministic: bool = True) -> Accelerator:
    """The process's accelerator; made by the first call, and made anew after a TPU was lost.

    Args:
        spec: what the run file asks for.
        recorded: the environment that the run began with, whose thread counts are kept.
        deterministic: `train.deterministic`; TensorFlow is told once, before anything is built.

    Raises:
        AcceleratorError: the devices are not there, or the process has another accelerator or setting already.
        AcceleratorLost: they were there, and have gone.
    """
    kind, said = _choose() if spec.kind == "auto" else (spec.kind, "")
    intra, inter = thread_counts(spec, recorded)
    settings = (_name(kind, spec), spec.replicas, intra, inter)
    if not _taken:
        _set_up(kind, spec.replicas, intra, inter)
        # A TPU runs XLA's programs, which repeat as they are; with this, XLA would refuse some of them (the gradient of
        # max pooling), whose kernels TensorFlow takes for a GPU's.
        if deterministic and kind != "tpu":
            tf.config.experimental.enable_op_determinism()
        made = _make(kind, spec, intra, inter, deterministic=deterministic, said=said)
        _taken.append(_Taken(settings, made, deterministic=deterministic))
    taken = _taken[0]
    if taken.settings != settings:
        raise AcceleratorError(
            f"this process runs with accelerator, replicas and threads {taken.settings}; {settings} needs a process of "
            "its own"
        )
    if taken.deterministic != deterministic:
        raise AcceleratorError(
            f"this process runs with train.deterministic = {str(taken.deterministic).lower()}; "
            f"{str(deterministic).lower()} needs a process of its own"
        )
    if taken.lost:
        gone = f"this process has lost its accelerator {settings[0]}"
        if kind != "tpu":
            raise AcceleratorLost(f"{gone}; run the same command again")
        try:
            taken.accelerator = _make(kind, spec, intra, inter, deterministic=deterministic, said=said, again=True)
            taken.lost = False
        except AcceleratorError as fault:
            # It was there: nothing is wrong with the run file.
            raise AcceleratorLost(f"{gone}, and could not begin with it again: {fault}") from fault
    return taken.accelerator


def threads_of_others(accelerator: Accelerator) -> str:
    """What to say where code of the user's has set TensorFlow's threads after `acquire`: its numbers hold; else empty.

    After TensorFlow's first operation it refuses to change them, so what it tells then is what holds.
    """
    environment, threading = accelerator.environment, tf.config.threading
    asked = (environment.intra_op_threads, environment.inter_op_threads)
    hold = (threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads())
    if hold == asked:
        return ""
    return (
        f"code of this run set TensorFlow's threads to {hold[0]} within an operation and {hold[1]} operations at a "
        f"time (0: one for each CPU), which holds, and not {asked[0]} and {asked[1]}, which the log records; set "
        "accelerator.intra_op_threads and accelerator.inter_op_threads in the run file instead"
    )


@contextmanager
def may_be_lost(accelerator: Accelerator) -> Iterator[None]:
    """Around work on devices that can go while the process stays, or with hosts that can.

    Nothing that lives on a TPU survives its re-initialization, the strategy included; hosts that have lost one of them
    cannot take in another. So whoever is in here fails, resumable, and what is committed stays. The next `acquire` of
    the process, if it has a next run or a flow's retry, initializes a TPU again and makes another strategy, for which
    models are built anew.

    Raises:
        AcceleratorLost: TensorFlow says that a device or a host is gone.
    """
    try:
        yield
    except OUTER_CAUSES as fault:
        if accelerator.kind == "cpu":
            raise
        for taken in _taken:
            taken.lost = taken.lost or taken.accelerator is accelerator
        if accelerator.hosts > 1:
            raise AcceleratorLost(
                f"another of the {accelerator.hosts} workers is gone ({type(fault).__name__}). What is committed "
                "stays; run the same command on all of them again to go on from there"
            ) from fault
        said = " ".join(str(fault.message).split())
        raise AcceleratorLost(
            f"the accelerator ({accelerator.kind}, {accelerator.replicas} replicas) was lost: {type(fault).__name__}: "
            f"{said[:_LONGEST_TEXT]}. What is committed stays; run the same command again to go on from there"
        ) from fault


def _choose() -> tuple[str, str]:
    """What `auto` stands for, and why. Looks at device files and at TensorFlow's devices; waits for nothing."""
    files = device_files()
    if files and not is_declined():
        try:
            require_packages()
        except AcceleratorError as fault:
            raise AcceleratorError(
                f"accelerator.kind = auto found a TPU ({files[0]}), and {fault}; or say kind: cpu, or gpu, to train "
                "without it all the same"
            ) from fault
        return "tpu", f"accelerator: a TPU, for this machine has its device files ({', '.join(files)})"
    no_tpu = "PJRT_DEVICE declines the TPU" if files else "there is no TPU"
    found = gpus()
    if found:
        names = ", ".join(gpu.name.removeprefix("/physical_device:") for gpu in found)
        return "gpu", f"accelerator: {len(found)} GPU{'s' * (len(found) > 1)} ({names}), for {no_tpu}"
    # Where there is one that cannot be used, all that was looked at helps to find out why.
    no_gpu = why_no_gpu() if gpu_files() else "no GPU"
    return "cpu", f"accelerator: the CPU, for {no_tpu}, and {no_gpu}"


def _name(kind: str, spec: AcceleratorSpec) -> str:
    """The kind, and of a named TPU which one."""
    if kind != "tpu" or spec.tpu == "local":
        return kind
    return "/".join(("tpu", spec.project or "-", spec.zone or "-", spec.tpu))


def _set_up(kind: str, replicas: int, intra: int, inter: int) -> None:
    """What TensorFlow can be told only before it uses a device."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(intra)
        tf.config.threading.set_inter_op_parallelism_threads(inter)
        if kind == "gpu":
            grow_memory()
        if kind == "cpu":
            # Left visible, a GPU or TPU would take what is said to be trained on the CPU.
            for other in ("GPU", "TPU"):
                tf.config.set_visible_devices([], other)
        if replicas > 1:
            cpu = tf.config.list_physical_devices("CPU")[0]
            logical = [tf.config.LogicalDeviceConfiguration()] * replicas
            tf.config.set_logical_device_configuration(cpu, logical)
    except RuntimeError as fault:
        raise AcceleratorError(
            f"TensorFlow was in use before the accelerator was set up ({fault}); model.py and data.py must not create "
            "tensors when they are imported, only within their functions"
        ) from fault


def _make(
    kind: str, spec: AcceleratorSpec, intra: int, inter: int, *, deterministic: bool, said: str, again: bool = False
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
    environment = Environment(
        accelerator=kind,
        replicas=strategy.num_replicas_in_sync,
        hosts=1 if cluster is None else len(cluster.addresses),
        intra_op_threads=intra,
        inter_op_threads=inter,
        versions=installed_versions(),
        deterministic=deterministic,
    )
    return Accelerator(
        strategy=strategy,
        environment=environment,
        host=0 if cluster is None else cluster.host,
        exchange=exchange,
        said=said,
        io_device=IO_DEVICE if kind == "tpu" and spec.tpu != "local" else None,
    )
