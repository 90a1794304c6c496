"""What this machine shows of a TPU without TensorFlow, and what TensorFlow has to be told of it before it is imported.

Only device files, the environment and installed packages are looked at: nothing here waits on a network name.
"""

import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from tasks.foundation.errors import AcceleratorError

_DEVICES = Path("/dev")
# TPU v2 to v4, and v5e and later. /dev/accel/ belongs to other makers' chips, /dev/vfio/vfio is on many machines.
_DEVICE_FILES: Final = ("accel[0-9]*", "vfio/[0-9]*")
_DISTRIBUTIONS: Final = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-tpu", "tf-nightly")
_PJRT, _C_API, _LIBRARY = "PJRT_DEVICE", "NEXT_PLUGGABLE_DEVICE_USE_C_API", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH"
# Of a slice: the names of all its hosts, separated by commas; and of a job over several slices.
_HOSTNAMES, _SLICES = "TPU_WORKER_HOSTNAMES", "MEGASCALE_NUM_SLICES"
_TOLD: Final = (_PJRT, _C_API, _LIBRARY)
REMEDY: Final = "in an environment of its own: pip install '.[tpu]' in the checkout"


def device_files() -> tuple[str, ...]:
    """Paths of the files of TPU chips, sorted; empty where there are none."""
    return tuple(sorted(str(path) for pattern in _DEVICE_FILES for path in _DEVICES.glob(pattern)))


def tensorflow_distributions() -> tuple[str, ...]:
    """Installed packages that bring `tensorflow`. More than one and they have overwritten each other's files."""
    found = []
    for name in _DISTRIBUTIONS:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        found.append(name)
    return tuple(found)


def library_path() -> str | None:
    """Where libtpu is installed; None where it is not."""
    try:
        path = importlib.import_module("libtpu").get_library_path()
    except (ImportError, AttributeError):
        return None
    return str(path)


def announce_tpu() -> None:
    """Tell TensorFlow of this machine's TPU, if it has one. Call before it is imported; what a user has set holds.

    Where something is missing, or TensorFlow is there already, nothing is done: `require_local_tpu` says so in time.
    """
    if "tensorflow" in sys.modules or not device_files() or tensorflow_distributions() != ("tensorflow-tpu",):
        return
    library = library_path()
    if library is None:
        return
    for name, value in ((_PJRT, "TPU"), (_C_API, "true"), (_LIBRARY, library)):
        os.environ.setdefault(name, value)


def is_declined() -> bool:
    """Whether a user has set PJRT_DEVICE to something else than a TPU."""
    return os.environ.get(_PJRT, "TPU").upper() != "TPU"


def looked_at() -> str:
    """Everything that was looked at for a TPU, and what was there."""
    patterns = ", ".join(str(_DEVICES / pattern) for pattern in _DEVICE_FILES)
    variables = ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in (*_TOLD, _HOSTNAMES))
    return (
        f"looked at device files {patterns}: {', '.join(device_files()) or 'none'}; environment: {variables}; "
        f"libtpu: {library_path() or 'not installed'}; TensorFlow: {', '.join(tensorflow_distributions()) or 'none'}"
    )


def require_local_tpu() -> None:
    """See that this machine's one TPU can be used, before TensorFlow is asked.

    Raises:
        AcceleratorError: it has none, what is installed cannot use it, it is one host of several, or TensorFlow was
            imported before it was told of it.
    """
    if not device_files():
        raise AcceleratorError(
            f"accelerator.kind = tpu, and this machine has no TPU; {looked_at()}. Run on a TPU VM, or use kind: auto"
        )
    _require_one_host()
    require_packages()
    if is_declined():
        raise AcceleratorError(
            f"accelerator.kind = tpu, and {_PJRT} = {os.environ[_PJRT]} is set in the environment; unset it"
        )
    missing = [name for name in _TOLD if name not in os.environ]
    if missing:
        raise AcceleratorError(
            f"TensorFlow was imported before it was told of this machine's TPU ({', '.join(missing)} not set); call "
            "tasks.foundation.accelerator.tpu_environment.announce_tpu() before importing it, or start the run with "
            "baton run"
        )


def require_packages() -> None:
    """See that what is installed can use a TPU.

    Raises:
        AcceleratorError: not exactly one TensorFlow is installed, and that tensorflow-tpu; or no libtpu.
    """
    found = tensorflow_distributions()
    if len(found) > 1:
        raise AcceleratorError(
            f"{' and '.join(found)} are both installed and have overwritten each other's files; a TPU needs "
            f"tensorflow-tpu alone, {REMEDY}"
        )
    if found != ("tensorflow-tpu",):
        raise AcceleratorError(f"{found[0] if found else 'this TensorFlow'} cannot use a TPU; {REMEDY}")
    if library_path() is None:
        raise AcceleratorError(f"libtpu is not installed, without which TensorFlow finds no TPU; {REMEDY}")


def _require_one_host() -> None:
    hosts = [name for name in os.environ.get(_HOSTNAMES, "").split(",") if name.strip()]
    slices = os.environ.get(_SLICES, "1")
    if len(hosts) > 1 or slices != "1":
        found = f"{_HOSTNAMES} names {len(hosts)} hosts" if len(hosts) > 1 else f"{_SLICES} = {slices}"
        raise AcceleratorError(
            f"accelerator.tpu = local is the TPU of one host, and this machine is one of several ({found}); training "
            "over the hosts of a slice is not supported by this version: take a slice of one host, such as v5litepod-8"
        )
