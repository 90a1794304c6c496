"""What decides the bits of a process besides the run file: TensorFlow's variables, the processor, versions, threads."""

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.masking import masked
from tasks.foundation.version import baton_version

_PACKAGES = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "libtpu", "keras", "numpy")
_BACKEND = "KERAS_BACKEND"
_TENSORFLOW = "tensorflow"
_PROCESSOR = Path("/proc/cpuinfo")
_NUMBERS = {
    "family": "cpu family",
    "model": "model",
    "stepping": "stepping",
    "implementer": "cpu implementer",
    "part": "cpu part",
    "variant": "cpu variant",
}
# Instruction sets by which oneDNN, Eigen and XLA choose their kernels, on Intel's and AMD's processors and on ARM's.
_FEATURES = re.compile(r"sse4_[12]|fma|f16c|avx\w*|amx_\w+|asimd\w*|sve\w*|sme\w*|bf16|i8mm|neon")
# Variables by which TensorFlow and its libraries choose their kernels.
_DECIDING = re.compile(
    r"TF_ENABLE_ONEDNN_OPTS|TF_ONEDNN_\w+|(?:ONEDNN|DNNL)_\w+|TF_XLA_FLAGS|XLA_FLAGS|LIBTPU_INIT_ARGS"
    r"|TF_DETERMINISTIC_OPS|TF_CUDNN_\w+|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE|MKL_CBWR|MKL_ENABLE_INSTRUCTIONS"
    r"|OPENBLAS_CORETYPE|NPY_DISABLE_CPU_FEATURES|NPY_ENABLE_CPU_FEATURES"
)
# Of those, what only reports or caches: variables, and flags within a variable.
_REPORTING = re.compile(r"VERBOSE|DUMP|PROFILE|CACHE_CAPACITY|LOGGING|_LOG_|LOGINFO|LOGDEST", re.IGNORECASE)
_REPORTING_FLAG = re.compile(r"--\w*(?:dump|profil|cache_dir|persistent_cache|verbos|vmodule|logging)\w*(?:=|$)")
_LONGEST = 400

# Another backend that a variable named before Baton set it; at most one element.
_other_backend: list[str] = []


def quiet_tensorflow() -> None:
    """Hide TensorFlow's start-up messages, and let Keras use TensorFlow. Call it before either is imported.

    A log level that the user has set is kept. KERAS_BACKEND takes precedence over `backend` in keras.json.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    chosen = os.environ.get(_BACKEND)
    if chosen not in {None, "", _TENSORFLOW}:
        _other_backend[:] = [str(chosen)]
    os.environ[_BACKEND] = _TENSORFLOW


def backend_note() -> str:
    """A note if the user's KERAS_BACKEND names another backend, which is not used; else empty."""
    if not _other_backend:
        return ""
    return f"{_BACKEND} = {_other_backend[0]} is ignored: Baton trains with Keras's backend tensorflow"


def processor(file: Path = _PROCESSOR) -> tuple[str | None, str | None]:
    """The processor's name, and the instruction sets by which libraries choose their kernels.

    Args:
        file: the kernel's description of the processor.

    Returns:
        None for what the file does not say.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:  # another kernel
        return None, None
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    numbers = [f"{label} {fields[key]}" for label, key in _NUMBERS.items() if key in fields]
    name = fields.get("model name", "")
    found = f"{name} ({', '.join(numbers)})".strip() if numbers else name
    flags = fields.get("flags", fields.get("features", "")).split()
    return found or None, " ".join(sorted(filter(_FEATURES.fullmatch, flags))) or None


def deciding_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables by which TensorFlow and its libraries choose kernels; without flags that only report.

    Args:
        environ: the variables of this process.
    """
    found = {}
    for name in sorted(filter(_DECIDING.fullmatch, environ)):
        value = environ[name].strip()
        if name.endswith("XLA_FLAGS"):
            value = " ".join(flag for flag in value.split() if not _REPORTING_FLAG.match(flag))
        if value and not _REPORTING.search(name):
            found[name] = _short(masked(value))
    return found


def _short(value: str) -> str:
    if len(value) <= _LONGEST:
        return value
    return f"{value[:_LONGEST]}... (sha256 {hashlib.sha256(value.encode()).hexdigest()[:16]})"


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
