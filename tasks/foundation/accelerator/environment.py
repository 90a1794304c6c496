"""TensorFlow's environment variables, package versions and thread counts."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.version import baton_version

_PACKAGES = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "libtpu", "keras", "numpy")


def quiet_tensorflow() -> None:
    """Hide TensorFlow's start-up messages. Call before importing it; variables that the user has set are kept."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute, by package name."""
    versions = {"python": platform.python_version()}
    if (own := baton_version()) is not None:
        versions["baton"] = own
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def thread_counts(spec: AcceleratorSpec, recorded: Environment | None) -> tuple[int, int]:
    """Threads within an operation, and operations at a time.

    The run file decides, then the recorded environment, then the number of CPUs. The bits of a sum depend on the
    number of threads that share it, so a run keeps the counts that it began with.
    """
    cpus = len(os.sched_getaffinity(0))
    intra = spec.intra_op_threads or (recorded.intra_op_threads if recorded else cpus)
    inter = spec.inter_op_threads or (recorded.inter_op_threads if recorded else cpus)
    return intra, inter
