"""The one strategy of a process.

TensorFlow fixes devices and threads at first use, and a second MirroredStrategy in one process dies; so the first
caller decides, and who asks for something else is told to start another process.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks.foundation.accelerator.cluster import cluster_of
from tasks.foundation.accelerator.environment import installed_versions, thread_counts
from tasks.foundation.accelerator.multi_worker import Exchange, lost_workers, worker_strategy
from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.contracts.run_spec import AcceleratorSpec
from tasks.foundation.errors import AcceleratorError

_TPU_DEVICE_FILES = ("/dev/accel0", "/dev/vfio/0")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A strategy and what it runs on.

    Attributes:
        strategy: the `tf.distribute.Strategy` of this process.
        environment: what is recorded of it.
        host: this machine's number among those that feed the replicas, from 0.
        exchange: how the hosts tell each other something; None where there is one.
    """

    strategy: Any
    environment: Environment
    host: int = 0
    exchange: Exchange | None = None

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

    def together(self) -> AbstractContextManager[None]:
        """Around work in which the hosts need each other.

        Raises:
            WorkerLost: one of them is gone.
        """
        return nullcontext() if self.exchange is None else lost_workers(self.strategy)

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


def acquire(spec: AcceleratorSpec, recorded: Environment | None) -> Accelerator:
    """The process's accelerator; made by the first call.

    Args:
        spec: what the run file asks for.
        recorded: the environment that the run began with, whose thread counts are kept.

    Raises:
        AcceleratorError: the devices are not there, or the process has another accelerator already.
    """
    kind = "cpu" if spec.kind == "auto" else spec.kind
    if spec.kind == "auto":
        found = _other_devices()
        if found:
            raise AcceleratorError(
                f"accelerator.kind = auto found {found}, which this version cannot train on; say kind: cpu to train "
                "on the CPU all the same"
            )
    if kind not in {"cpu", "multi_worker"}:
        raise AcceleratorError(f"accelerator.kind = {kind} is not supported by this version; use cpu or auto")
    intra, inter = thread_counts(spec, recorded)
    settings = (kind, spec.replicas, intra, inter)
    if not _taken:
        _taken.append((settings, _make(*settings)))
    first, accelerator = _taken[0]
    if first != settings:
        raise AcceleratorError(
            f"this process runs with accelerator, replicas and threads {first}; {settings} needs a process of its own"
        )
    return accelerator


# What the first call asked for, and got.
_taken: list[tuple[tuple[str, int, int, int], Accelerator]] = []


def _make(kind: str, replicas: int, intra: int, inter: int) -> Accelerator:
    cluster = cluster_of(os.environ) if kind == "multi_worker" else None
    try:
        tf.config.threading.set_intra_op_parallelism_threads(intra)
        tf.config.threading.set_inter_op_parallelism_threads(inter)
        if replicas > 1:
            cpu = tf.config.list_physical_devices("CPU")[0]
            logical = [tf.config.LogicalDeviceConfiguration()] * replicas
            tf.config.set_logical_device_configuration(cpu, logical)
    except RuntimeError as fault:
        raise AcceleratorError(
            f"TensorFlow was in use before the accelerator was set up ({fault}); model.py and data.py must not create "
            "tensors when they are imported, only within their functions"
        ) from fault
    if cluster is not None:
        strategy = worker_strategy(cluster)
    elif replicas == 1:
        strategy = tf.distribute.get_strategy()
    else:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    environment = Environment(
        accelerator=kind,
        replicas=strategy.num_replicas_in_sync,
        hosts=1 if cluster is None else len(cluster.addresses),
        intra_op_threads=intra,
        inter_op_threads=inter,
        versions=installed_versions(),
    )
    if cluster is None or environment.hosts == 1:
        return Accelerator(strategy=strategy, environment=environment)
    exchange = Exchange(strategy, environment.hosts)
    return Accelerator(strategy=strategy, environment=environment, host=cluster.host, exchange=exchange)


def _other_devices() -> str:
    """A TPU or GPU of this machine; looks at device files first, so that nothing waits on a network name."""
    if any(Path(file).exists() for file in _TPU_DEVICE_FILES):
        return "a TPU"
    return "a GPU" if tf.config.list_physical_devices("GPU") else ""
