"""Stand-ins for a TPU VM and for TensorFlow's TPU functions, on a machine without a TPU."""

import os
from pathlib import Path
from typing import Any

DEVICE_FILE = "accel0"
OF_A_SLICE = (
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
    "TPU_ACCELERATOR_TYPE",
    "MEGASCALE_NUM_SLICES",
    "TPU_WORKER_ID",
)
ANNOUNCED = ("PJRT_DEVICE", "NEXT_PLUGGABLE_DEVICE_USE_C_API", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH")


def look_like_a_tpu_vm(folder: Path, *, set_attribute: Any = setattr, announced: bool = True) -> Path:
    """Make this machine look like a TPU VM: device file, packages and libtpu.

    Args:
        folder: used instead of /dev.
        set_attribute: setattr, or pytest's monkeypatch.setattr.
        announced: set the environment variables that `announce_tpu` sets before TensorFlow is imported.

    Returns:
        The device file.
    """
    from baton.tasks.foundation.machine import tpu

    folder.mkdir(exist_ok=True)
    file = folder / DEVICE_FILE
    file.touch()
    set_attribute(tpu, "_DEVICES", folder)
    set_attribute(tpu, "tensorflow_distributions", lambda: ("tensorflow-tpu",))
    set_attribute(tpu, "library_path", lambda: "/opt/libtpu.so")
    for name in (*ANNOUNCED, *OF_A_SLICE):
        os.environ.pop(name, None)
    if announced:
        os.environ.update(dict(zip(ANNOUNCED, ("TPU", "true", "/opt/libtpu.so"), strict=True)))
    return file


class StandInResolver:
    """Replaces `TPUClusterResolver`.

    Attributes:
        made: the arguments of each resolver.
        workers: addresses of the hosts of a named TPU.
    """

    made: list[dict[str, Any]] = []  # noqa: RUF012 - one list for a test
    workers: list[str] = []  # noqa: RUF012
    task_type = "worker"

    def __init__(self, **arguments: Any) -> None:
        self.made.append(arguments)

    def cluster_spec(self) -> Any:
        import tensorflow as tf

        return tf.train.ClusterSpec({"worker": list(self.workers)})


class StandInSystem:
    """Replaces TensorFlow's TPU functions.

    Attributes:
        calls: the names of the calls, in order.

    Args:
        replicas: number of logical CPUs of the strategy.
    """

    def __init__(self, replicas: int = 2) -> None:
        self.calls: list[str] = []
        self._replicas = replicas
        self._strategy: Any = None

    def install(self, set_attribute: Any = setattr) -> None:
        import tensorflow as tf

        set_attribute(tf.distribute.cluster_resolver, "TPUClusterResolver", StandInResolver)
        set_attribute(tf.config, "experimental_connect_to_cluster", lambda _, **__: self.calls.append("connect"))
        set_attribute(tf.tpu.experimental, "initialize_tpu_system", self._initialize)
        set_attribute(tf.tpu.experimental, "shutdown_tpu_system", lambda _: self.calls.append("shut down"))
        set_attribute(tf.distribute, "TPUStrategy", self._make_strategy)

    def _initialize(self, _resolver: Any) -> None:
        self.calls.append("initialize")

    def _make_strategy(self, _resolver: Any) -> Any:
        import tensorflow as tf

        self.calls.append("strategy")
        if self._strategy is None:
            cpu = tf.config.list_physical_devices("CPU")[0]
            logical = [tf.config.LogicalDeviceConfiguration()] * self._replicas
            tf.config.set_logical_device_configuration(cpu, logical)
            devices = [f"CPU:{index}" for index in range(self._replicas)]
            # One for the process, because a second MirroredStrategy would end it. A second TPUStrategy does not.
            self._strategy = tf.distribute.MirroredStrategy(devices)
        return self._strategy
