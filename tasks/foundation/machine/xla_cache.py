"""Where XLA keeps the programs that it has compiled, so that later processes do not compile them again.

TensorFlow's key has the number of the traced function, and a process that begins a run traces more functions than one
that resumes it; `align_function_numbers` lets both trace the step under one number. TensorFlow writes into a temporary
file and renames it, and uses a program only for the very same computation. What else a program depends on is in the
name of the folder: TensorFlow's version, processor, thread counts and XLA's flags. Nothing is written unless XLA
compiles something, as with `compile(jit_compile=True)`.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import MutableMapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_VARIABLE = "BATON_XLA_CACHE"
_FLAGS = "TF_XLA_FLAGS"
_FLAG = "--tf_xla_persistent_cache_directory="
_OURS = re.compile(rf"{_FLAG}.*/baton-[0-9a-f]{{16}}$")
_PROCESSOR = Path("/proc/cpuinfo")
_FEATURES = {"model name", "flags", "features"}
_DIGITS = 16
_STRIDE = 1 << 17
# Of a field of a protocol buffer: its kind in the file, and the longest number and length.
_WITH_LENGTH, _LONGEST_HEAD = 2, 11


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


def align_function_numbers() -> None:
    """Let the next function that is traced have the same number in every process that has traced fewer than `_STRIDE`.

    TensorFlow counts all that it names, and the number cannot be set; counting up takes some milliseconds.
    """
    from tensorflow.python.framework import ops  # no public function counts

    while ops.uid() % _STRIDE:
        pass


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
        features = {line for line in lines if line.partition(":")[0].strip().lower() in _FEATURES}
    return [*found, platform.machine(), *sorted(features)]


def _digest(values: list[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:_DIGITS]
