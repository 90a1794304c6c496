"""The words for the machine that the figures come from; no names of hosts or folders."""

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.support.checkout import CHECKOUT

_PACKAGES = ("tensorflow-cpu", "tensorflow", "keras", "prefect", "numpy", "gcsfs")


def machine_words() -> str:
    """Cores, processor, memory, operating system and versions, and the commit that was measured."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return (
        f"{cores} cores of {_value(Path('/proc/cpuinfo'), 'model name', ':')}, {memory:.0f} GiB of memory, "
        f"{_value(Path('/etc/os-release'), 'PRETTY_NAME', '=')}, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}, {', '.join(_versions())}; commit {_commit()}; "
        f"load average at the start {load:.1f}."
    )


def busy_cores(seconds: float) -> float:
    """How many cores work, for anybody, over some seconds: while no arm runs, that is other load."""
    before = _busy_seconds()
    time.sleep(seconds)
    return (_busy_seconds() - before) / seconds


def _busy_seconds() -> float:
    """Processor seconds of all cores since the start that were neither idle nor waited for a disk."""
    first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    user, nice, system, _idle, _wait, interrupts, soft, stolen, *_ = map(int, first.split()[1:])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _versions() -> list[str]:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found


def _value(file: Path, key: str, sign: str) -> str:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    line = next((line for line in lines if line.startswith(key)), f"{key}{sign}unknown")
    return line.split(sign, 1)[1].strip().strip('"')


def _commit() -> str:
    command = ("git", "describe", "--always", "--dirty")
    found = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
