"""What the kernel tells about a process and its children, and where its processor seconds go."""

import contextlib
import os
import re
import select
import signal
from pathlib import Path

from tests.support.forked import descendants

_UNNAMED = "native threads (TensorFlow's pools, BLAS)"
_END_SECONDS = 10.0
_NUMBER = re.compile(r"[-_ ]?\d+|\(.*\)")


class ThreadProfile:
    """Processor seconds of the threads of a process and of its children, from `begin` on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seconds: dict[int, float] = {}
        self._before: dict[int, float] = {}
        self._children: dict[int, str] = {}

    def begin(self) -> None:
        """Count from here."""
        self.sample()
        self._before = dict(self._seconds)

    def sample(self) -> None:
        """Look at all threads; one that ends counts as it was seen last."""
        self._seconds.update(thread_seconds(self._pid))
        for child in descendants(self._pid):
            self._children.setdefault(child, f"child process {program(child)}")
            self._seconds[child] = sum(thread_seconds(child).values())

    def by_name(self, names: Path) -> dict[str, float]:
        """Seconds by the thread's name, without numbers.

        Args:
            names: the file that `profile_hook` wrote.
        """
        known = {self._pid: "main thread", **self._children}
        with contextlib.suppress(OSError):
            for line in names.read_text(encoding="utf-8").splitlines():
                thread, _, name = line.partition(" ")
                known.setdefault(int(thread), _NUMBER.sub("", name).strip() or name)
        found: dict[str, float] = {}
        for thread, seconds in self._seconds.items():
            name = known.get(thread, _UNNAMED)
            found[name] = found.get(name, 0.0) + seconds - self._before.get(thread, 0.0)
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def thread_seconds(pid: int) -> dict[int, float]:
    """Processor seconds of each thread of a process, by the thread's id."""
    ticks = os.sysconf("SC_CLK_TCK")
    found: dict[int, float] = {}
    with contextlib.suppress(OSError):  # it has ended
        for thread in list(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(OSError):
                text = (thread / "stat").read_text()
                words = text[text.rindex(")") + 2 :].split()
                found[int(thread.name)] = (int(words[11]) + int(words[12])) / ticks
    return found


def program(pid: int) -> str:
    """What a child process is: Prefect's server, or the first word of its command that is no option."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return "?"
    if any("prefect" in word or "uvicorn" in word for word in words):
        return "of Prefect's server"
    return next((Path(word).name for word in words[1:] if word and not word.startswith("-")), "?")


def peak_memory(pid: int) -> int:
    """Peak resident memory in bytes; 0 for a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmHWM")), "")
    return int(line.split()[1]) << 10 if line else 0


def kill(pid: int) -> None:
    """Kill a process, and wait until it has ended, so that it takes nothing from the next arm."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [], _END_SECONDS)
    finally:
        os.close(process)
