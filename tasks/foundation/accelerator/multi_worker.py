"""Several hosts, each a process of its own that runs the same command: MultiWorkerMirroredStrategy from `TF_CONFIG`.

Every worker does every step, builds every model and restores every checkpoint, in the same order, since all of that
has collectives in it. Worker 0, the chief, alone writes to the run's home; the others learn from its log.
"""

import signal
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks.foundation.accelerator.cluster import Cluster
from tasks.foundation.errors import AcceleratorError


def worker_strategy(cluster: Cluster) -> Any:
    """Meet the other workers; waits until all of them are there.

    Raises:
        AcceleratorError: they could not be met.
    """
    # Read by TensorFlow too; a chief of its own and worker 0 mean the same here.
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    except (tf.errors.OpError, RuntimeError, ValueError) as fault:
        raise AcceleratorError(
            f"worker {cluster.host} of {', '.join(cluster.addresses)} could not meet the others "
            f"({type(fault).__name__}: {str(fault).splitlines()[0]}); see that all of them run the same command, and "
            "that the addresses in TF_CONFIG can be reached"
        ) from fault
    _take_signals_back()
    if strategy.num_replicas_in_sync % len(cluster.addresses):
        raise AcceleratorError(
            f"{strategy.num_replicas_in_sync} replicas on {len(cluster.addresses)} workers: each needs as many devices "
            "as the others"
        )
    return strategy


class Exchange:
    """Tells every host what each of them says. A collective: all hosts call it, in the same order."""

    def __init__(self, strategy: Any, hosts: int) -> None:
        """Nothing is exchanged yet."""
        self._replicas_of_host = strategy.num_replicas_in_sync // hosts

        @tf.function(jit_compile=False)  # type: ignore[untyped-decorator]
        def gather(values: Any) -> Any:
            def on_replica(mine: Any) -> Any:
                return tf.distribute.get_replica_context().all_gather(mine[tf.newaxis], axis=0)

            return strategy.experimental_local_results(strategy.run(on_replica, args=(values,)))[0]

        self._gather = gather

    def numbers(self, mine: Sequence[float]) -> npt.NDArray[np.float64]:
        """Numbers of every host.

        Args:
            mine: this host's; as many on every host. Whole numbers are exact below 2**53.

        Returns:
            float64 [hosts, len(mine)].
        """
        of_replicas = self._gather(tf.constant(list(mine), tf.float64)).numpy()
        return np.asarray(of_replicas[:: self._replicas_of_host], np.float64)


def _take_signals_back() -> None:
    """TensorFlow's coordination service puts its own handler on SIGTERM, which would swallow it (seen with 2.19)."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
