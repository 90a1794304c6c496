"""The GPUs of this process, and the strategy over them."""

import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from tasks.foundation.accelerator.tpu_environment import tensorflow_distributions
from tasks.foundation.errors import AcceleratorError

_DEVICES = Path("/dev")
_DEVICE_FILES = "nvidia[0-9]*"


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
