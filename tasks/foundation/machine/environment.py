"""What decides the bits of a process besides the run file: TensorFlow's variables, the processor, versions, threads.

The same things name the folder of the programs that XLA has compiled, so that later processes do not compile them
again. TensorFlow's own key there has the number of the traced function, and a process that begins a run traces more
functions than one that resumes it; `devices.align_function_numbers` lets both trace the step under one number.
TensorFlow writes into a temporary file and renames it, and uses a program only for the very same computation. Nothing
is written unless XLA compiles something, as with `compile(jit_compile=True)`.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baton.tasks.foundation.contracts.base import baton_version
from baton.tasks.foundation.contracts.log_entry import Environment
from baton.tasks.foundation.contracts.placement import AcceleratorSpec
from baton.tasks.foundation.masking import masked

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
_VARIABLE = "BATON_XLA_CACHE"
_FLAGS = "TF_XLA_FLAGS"
_FLAG = "--tf_xla_persistent_cache_directory="
_OURS = re.compile(rf"{_FLAG}.*/baton-[0-9a-f]{{16}}$")
_CPU_FIELDS = {"model name", "flags", "features"}
_DIGITS = 16
# Of a field of a protocol buffer: its kind in the file, and the longest number and length.
_WITH_LENGTH, _LONGEST_HEAD = 2, 11


def quiet_tensorflow() -> None:
    """Hide TensorFlow's start-up messages, and let Keras use TensorFlow. Call it before either is imported.

    A log level that the user has set is kept. KERAS_BACKEND takes precedence over `backend` in keras.json.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    chosen = os.environ.get(_BACKEND)
    if chosen not in {None, "", _TENSORFLOW}:
        _other_backend[:] = [str(chosen)]
    os.environ[_BACKEND] = _TENSORFLOW


@contextmanager
def kept_environment(imports: Callable[[], object]) -> Iterator[None]:
    """Import TensorFlow and Keras quietly, and put back all environment variables after the block.

    Args:
        imports: imports them. What they set themselves stays, as they would have set it for anybody.
    """
    wanted = dict(os.environ)
    try:
        quiet_tensorflow()
        quiet = dict(os.environ)
        imports()
        wanted |= {name: value for name, value in os.environ.items() if quiet.get(name) != value}
        yield
    finally:
        for name in os.environ.keys() - wanted.keys():
            del os.environ[name]
        os.environ.update(wanted)


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Discard what libraries write to standard error, whatever their log level: XLA, converters."""
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


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
    """The environment variables by which TensorFlow and its libraries choose kernels; no flags that only report."""
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


def use_xla_cache(
    environ: MutableMapping[str, str], *, intra: int, inter: int, deterministic: bool, processor: Path = _PROCESSOR
) -> None:
    """Tell TensorFlow where its cache of XLA programs is. Call it before TensorFlow uses a device.

    Args:
        environ: the process's environment. BATON_XLA_CACHE names the folder; empty: no cache. The default is baton/xla
            in the user's cache folder. A folder in TF_XLA_FLAGS that is not Baton's is kept.
        intra: threads within an operation.
        inter: operations at a time.
        deterministic: whether operations are deterministic.
        processor: file that describes the processor.
    """
    root = _root(environ)
    # A process that started this one may have set its own folder.
    others = [flag for flag in environ.get(_FLAGS, "").split() if not _OURS.match(flag)]
    if any(flag.startswith(_FLAG) or not flag.startswith("-") for flag in others):
        return  # the user has chosen a folder, or names a file with flags
    if root is not None and _can_be_written(root):
        settings = [intra, inter, deterministic, environ.get("XLA_FLAGS", ""), others]
        folder = root / f"baton-{_digest([*_machine(processor), settings])}"
        _delete_torn(folder)
        others = [*others, f"{_FLAG}{folder}"]
    if others:
        environ[_FLAGS] = " ".join(others)
    else:
        environ.pop(_FLAGS, None)


def _root(environ: MutableMapping[str, str]) -> Path | None:
    chosen = environ.get(_VARIABLE)
    if chosen is None:
        home = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else "")
        chosen = f"{home}/baton/xla" if home else ""
    # Spaces would end the flag.
    return Path(chosen).absolute() if chosen and not any(letter.isspace() for letter in chosen) else None


def _can_be_written(folder: Path) -> bool:
    """Whether TensorFlow can make the folder and write into it; if not, it would refuse to compile."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _delete_torn(folder: Path) -> None:
    """Delete programs that a power failure has cut short: TensorFlow would fail on them."""
    for file in folder.glob("*.pb"):
        with suppress(OSError):
            if not _is_whole(file):
                file.unlink()


def _is_whole(file: Path) -> bool:
    """Whether a protocol buffer's fields, which all have a length, end where the file does."""
    size, end = file.stat().st_size, 0
    with file.open("rb") as stream:
        while end < size:
            stream.seek(end)
            head = stream.read(_LONGEST_HEAD)
            if not head or head[0] & 7 != _WITH_LENGTH or head[0] >> 3 == 0:
                return False
            length = shift = 0
            for used, byte in enumerate(head[1:], start=2):
                length |= (byte & 127) << shift
                shift += 7
                if byte < 128:  # noqa: PLR2004 - the last byte of a number
                    end += used + length
                    break
            else:
                return False
    return end == size > 0


def _machine(processor: Path) -> list[str]:
    """What compiled code depends on besides the computation: TensorFlow's version and the processor's features."""
    found = []
    for package in ("tensorflow", "tensorflow-cpu", "tensorflow-tpu"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    features: set[str] = set()
    with suppress(OSError):
        lines = processor.read_text(encoding="utf-8", errors="replace").splitlines()
        features = {line for line in lines if line.partition(":")[0].strip().lower() in _CPU_FIELDS}
    return [*found, platform.machine(), *sorted(features)]


def _digest(values: list[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:_DIGITS]
