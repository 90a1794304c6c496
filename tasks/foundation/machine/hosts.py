"""Several hosts, each with a process that runs the same command: MultiWorkerMirroredStrategy from `TF_CONFIG`.

Training, building a model and restoring a checkpoint use collectives, so every worker does all of them in the same
order. Only worker 0, the chief, writes to the run's home; the others read its log.
"""

import signal
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks.foundation.errors import AcceleratorError
from tasks.foundation.machine.cluster import Cluster


def worker_strategy(cluster: Cluster) -> Any:
    """Connect to the other workers; waits until all of them have connected.

    Raises:
        AcceleratorError: the connection failed, or the workers have different numbers of devices.
    """
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    except (tf.errors.OpError, RuntimeError, ValueError) as fault:
        raise AcceleratorError(
            f"worker {cluster.host} of {', '.join(cluster.addresses)} could not connect to the others "
            f"({type(fault).__name__}: {str(fault).splitlines()[0]}); check that all of them run the same command and "
            "that the addresses in TF_CONFIG are reachable"
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
