"""The kind of accelerator that `kind: auto` chooses: a TPU, else GPUs, else the CPU."""

from tasks.foundation.accelerator.gpu import gpu_files, gpus, why_no_gpu
from tasks.foundation.accelerator.tpu_environment import device_files, is_declined, require_packages
from tasks.foundation.errors import AcceleratorError


def choose_kind() -> tuple[str, str]:
    """The kind, and a line that says why. It reads only device files and TensorFlow's devices, so it never waits.

    Raises:
        AcceleratorError: there is a TPU, but the installed packages cannot use it.
    """
    files = device_files()
    if files and not is_declined():
        try:
            require_packages()
        except AcceleratorError as fault:
            raise AcceleratorError(
                f"accelerator.kind = auto found a TPU ({files[0]}), but {fault}; or use kind: cpu, or gpu, to train "
                "without it"
            ) from fault
        return "tpu", f"accelerator: TPU ({', '.join(files)})"
    no_tpu = "PJRT_DEVICE excludes the TPU" if files else "no TPU found"
    found = gpus()
    if found:
        names = ", ".join(gpu.name.removeprefix("/physical_device:") for gpu in found)
        return "gpu", f"accelerator: {len(found)} GPU{'s' * (len(found) > 1)}, {names} ({no_tpu})"
    if gpu_files():  # TensorFlow cannot use the GPU: report everything that helps to find the cause
        return "cpu", f"accelerator: CPU ({no_tpu}; {why_no_gpu()})"
    return "cpu", "accelerator: CPU (" + (f"{no_tpu}, no GPU found)" if files else "no TPU or GPU found)")
