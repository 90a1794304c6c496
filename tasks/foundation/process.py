"""What the kernel knows of a process: when it started, and whether it is still there. Linux; elsewhere: not known."""

import os
import time
from pathlib import Path

_PROC = Path("/proc")
_PARTS = 4
_STATE, _START_TICKS = 0, 19  # fields 3 and 22 of proc(5)'s stat, counted after the program's name
_DEAD = {"Z", "X", "x"}


def age_seconds() -> float:
    """Seconds since this process started, to a hundredth; 0 where the kernel does not tell."""
    try:
        ticks = int(_stat(os.getpid())[_START_TICKS])
        # Both count from the machine's start, so a wall clock that is set meanwhile disturbs nothing.
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
    return max(age, 0.0)


def process_name() -> str:
    """Names this process among all that ever run: start of the machine, container, number, start of the process.

    Returns:
        The empty string where the kernel does not tell.
    """
    try:
        return "/".join((*_place(), str(os.getpid()), _stat(os.getpid())[_START_TICKS]))
    except (OSError, ValueError, IndexError):
        return ""


def is_gone(name: str) -> bool:
    """Whether the process of that name is known to have ended; False where that cannot be told from here."""
    parts = name.split("/")
    try:
        if len(parts) != _PARTS or tuple(parts[:2]) != _place():
            return False
        pid, started = int(parts[2]), parts[3]
        os.kill(pid, 0)
        # The number may belong to a later process by now, and a zombie is a process that has ended.
        fields = _stat(pid)
        return fields[_START_TICKS] != started or fields[_STATE] in _DEAD
    except ProcessLookupError:
        return True
    except (OSError, ValueError, IndexError, OverflowError):
        return False


def is_here(name: str) -> bool:
    """Whether the process of that name is known to run, on this machine; False where that cannot be told from here."""
    parts = name.split("/")
    try:
        if len(parts) != _PARTS or tuple(parts[:2]) != _place():
            return False
        fields = _stat(int(parts[2]))
    except (OSError, ValueError):
        return False
    return len(fields) > _START_TICKS and fields[_START_TICKS] == parts[3] and fields[_STATE] not in _DEAD


def _place() -> tuple[str, str]:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot, str((_PROC / "self/ns/pid").stat().st_ino)


def _stat(pid: int) -> list[str]:
    # The program's name, in parentheses, may hold spaces and parentheses itself.
    return (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
