"""What has to be said to TensorFlow before it is imported, and what the bits depend on besides the code."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.contracts.placement import AcceleratorSpec

_PACKAGES = ("baton", "tensorflow", "tensorflow-cpu", "tensorflow-tpu", "libtpu", "keras", "numpy")


def quiet_tensorflow() -> None:
    """Keep TensorFlow's start-up messages to itself. Call before it is imported; what a user has set holds."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")


def installed_versions() -> dict[str, str]:
    """Versions of what computes."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def thread_counts(spec: AcceleratorSpec, recorded: Environment | None) -> tuple[int, int]:
    """Threads within an operation, operations at a time: as the run file says, as recorded, or the CPUs here.

    The bits of a sum depend on how many threads share it, so a run keeps the counts that it began with.
    """
    here = len(os.sched_getaffinity(0))
    intra = spec.intra_op_threads or (recorded.intra_op_threads if recorded else here)
    inter = spec.inter_op_threads or (recorded.inter_op_threads if recorded else here)
    return intra, inter
