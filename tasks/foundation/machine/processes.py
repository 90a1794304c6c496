"""What the Linux kernel reports of processes: their start, end, hash seed, and the memory that this one may use."""

import os
import sys
import time
from pathlib import Path

HASH_SEED = "PYTHONHASHSEED"
_PROC = Path("/proc")
_PARTS = 4
_STATE, _START_TICKS = 0, 19  # fields 3 and 22 of proc(5)'s stat, counted after the program's name
_DEAD = {"Z", "X", "x"}
_ROOT = Path("/")
# Besides the copy itself: what a save in flight needs for blocks, requests and the index.
_MARGIN_BYTES = 256 << 20


def age_seconds() -> float:
    """Return the seconds since this process started, to 0.01 s; 0 if the kernel does not report it."""
    try:
        ticks = int(_stat(os.getpid())[_START_TICKS])
        # Both count from the boot of the machine, so changing the wall clock has no effect.
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
    return max(age, 0.0)


def resident_bytes() -> int | None:
    """Return the memory of this process that is in RAM; None if the kernel does not report it."""
    try:
        return int((_PROC / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def hash_seed() -> int | None:
    """Return the seed of this process's hashes, on which the order of sets depends; None if Python has drawn it."""
    if not sys.flags.hash_randomization:
        return 0
    text = "" if sys.flags.ignore_environment else _started_with(HASH_SEED)
    return int(text) if text.isdecimal() else None


def _started_with(variable: str) -> str:
    """The value of an environment variable when this process started, as what was set later had no effect on Python."""
    try:
        found = (_PROC / "self" / "environ").read_bytes().split(b"\0")
    except OSError:  # another kernel
        return os.environ.get(variable, "")
    return next((each.partition(b"=")[2].decode() for each in found if each.startswith(f"{variable}=".encode())), "")


def process_name() -> str:
    """Return a globally unique name of this process: boot id, PID namespace, PID and start time.

    Returns:
        The empty string if the kernel does not report them.
    """
    try:
        return "/".join((*_boot_and_namespace(), str(os.getpid()), _stat(os.getpid())[_START_TICKS]))
    except (OSError, ValueError, IndexError):
        return ""


def is_gone(name: str) -> bool:
    """Return whether the named process is known to have ended; False if this machine or container cannot know."""
    parts = name.split("/")
    try:
        if len(parts) != _PARTS or tuple(parts[:2]) != _boot_and_namespace():
            return False
        pid, started = int(parts[2]), parts[3]
        os.kill(pid, 0)
        # A later process may have the same PID, and a zombie has ended.
        fields = _stat(pid)
        return fields[_START_TICKS] != started or fields[_STATE] in _DEAD
    except ProcessLookupError:
        return True
    except (OSError, ValueError, IndexError, OverflowError):
        return False


def is_running(name: str) -> bool:
    """Return whether the named process is known to run; False if this machine or container cannot know."""
    parts = name.split("/")
    try:
        if len(parts) != _PARTS or tuple(parts[:2]) != _boot_and_namespace():
            return False
        fields = _stat(int(parts[2]))
    except (OSError, ValueError):
        return False
    return len(fields) > _START_TICKS and fields[_START_TICKS] == parts[3] and fields[_STATE] not in _DEAD


def _boot_and_namespace() -> tuple[str, str]:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot, str((_PROC / "self/ns/pid").stat().st_ino)


def _stat(pid: int) -> list[str]:
    # The program's name, in parentheses, can itself contain spaces and parentheses.
    return (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def enough_memory_for_snapshot(size: int, *, root: Path = _ROOT) -> bool:
    """Whether a copy of the train state fits into memory, so that it can be saved beside the training.

    Args:
        size: of the copy, in bytes.
        root: where the system's files are.
    """
    available = available_bytes(root)
    return available is None or size + _MARGIN_BYTES <= available


def available_bytes(root: Path = _ROOT) -> int | None:
    """Memory that can be used without swapping, in bytes; None if the system does not say."""
    limits = [_of_machine(root), _of_container(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _of_machine(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _of_container(root: Path) -> int | None:
    """What is left of the limit of this process's control group and of those above it."""
    left: list[int] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        folder, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            folder /= "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        own = folder / group.strip("/")
        # In a container the group's own folder may be mounted as the root.
        for place in (own, *own.parents[: len(own.relative_to(folder).parts)]):
            left += _left_of(place, *files)
    return min(left, default=None)


def _left_of(place: Path, limit_file: str, used_file: str, cached_key: str) -> list[int]:
    limit, used = _text(place / limit_file).strip(), _text(place / used_file).strip()
    if not limit.isdecimal() or not used.isdecimal():
        return []
    statistics = dict(line.split() for line in _text(place / "memory.stat").splitlines())
    # Files that were read and are not in use count as used, and are dropped when memory is needed.
    return [max(0, int(limit) - int(used) + int(statistics.get(cached_key, 0)))]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
