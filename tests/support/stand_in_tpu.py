"""A machine that looks as if it had a TPU, as far as that can be without one."""

import os
from pathlib import Path
from typing import Any

DEVICE_FILE = "accel0"
TOLD = ("PJRT_DEVICE", "NEXT_PLUGGABLE_DEVICE_USE_C_API", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH")


def look_like_a_tpu_vm(folder: Path, *, set_attribute: Any = setattr, told: bool = True) -> Path:
    """Device file, packages and libtpu as on a TPU VM.

    Args:
        folder: takes the place of /dev.
        set_attribute: setattr, or pytest's monkeypatch.setattr.
        told: whether TensorFlow has been told of it, as `announce_tpu` does before it is imported.

    Returns:
        The device file.
    """
    from tasks.foundation.accelerator import tpu_environment

    folder.mkdir(exist_ok=True)
    file = folder / DEVICE_FILE
    file.touch()
    set_attribute(tpu_environment, "_DEVICES", folder)
    set_attribute(tpu_environment, "tensorflow_distributions", lambda: ("tensorflow-tpu",))
    set_attribute(tpu_environment, "library_path", lambda: "/opt/libtpu.so")
    for name in (*TOLD, "TPU_WORKER_HOSTNAMES", "MEGASCALE_NUM_SLICES"):
        os.environ.pop(name, None)
    if told:
        os.environ.update(dict(zip(TOLD, ("TPU", "true", "/opt/libtpu.so"), strict=True)))
    return file


class StandInResolver:
    """What `TPUClusterResolver` is asked for.

    Attributes:
        made: the arguments of each one made.
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
    """TensorFlow's calls for a TPU, recorded in order; the strategy is one over logical CPUs."""

    def __init__(self, replicas: int = 2) -> None:
        self.calls: list[str] = []
        self._replicas = replicas
        self._strategy: Any = None

    def install(self, set_attribute: Any = setattr) -> None:
        import tensorflow as tf

        set_attribute(tf.distribute.cluster_resolver, "TPUClusterResolver", StandInResolver)
        set_attribute(tf.config, "experimental_connect_to_cluster", lambda _: self.calls.append("connect"))
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
            # One for the process: a second MirroredStrategy would end it, which a second TPUStrategy does not.
            self._strategy = tf.distribute.MirroredStrategy(devices)
        return self._strategy
