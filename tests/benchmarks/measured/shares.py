"""Saves of hosts that train one run together: `shares.py RUN_FILE BUCKET...`, a bucket's address for each host.

It starts a process for each host. The values are the seconds of each save, from the snapshot to the log entry, and the
memory in MB that the last one takes on each host: what the snapshot is copied into, and what the save takes besides.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

_HOST = "BENCHMARK_HOST"


def start_hosts(run_file: str, buckets: list[str]) -> int:
    """Start a process for each host; the exit code is 1 if one fails."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in buckets]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    processes = []
    for index, bucket in enumerate(buckets):
        place = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {"TF_CONFIG": json.dumps(place), "STORAGE_EMULATOR_HOST": bucket, _HOST: str(index)}
        command = [sys.executable, *sys.orig_argv[1 : -1 - len(buckets)], run_file]
        processes.append(subprocess.Popen(command, env={**os.environ, **environment}))
    codes = [process.wait() for process in processes]
    return int(any(codes))


class Saves:
    """Takes the seconds and the memory of the saves of this process."""

    def __init__(self) -> None:
        self._began = 0.0
        self._before = 0

    def watch(self) -> None:
        """Take them from now on."""
        from baton.tasks.foundation.checkpoint import save
        from baton.tasks.train_segment import interval

        take_snapshot, commit = interval.take_snapshot, save.commit

        def watched_snapshot(state: Any, **options: Any) -> Any:
            self._began = time.monotonic()
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
            self._before = _memory("VmRSS") - state.page_buffer.size
            return take_snapshot(state, **options)

        def watched_commit(*arguments: Any) -> Any:
            entry = commit(*arguments)
            if self._began:  # not the checkpoint of step 0
                _print("seconds", time.monotonic() - self._began)
            return entry

        interval.take_snapshot, save.commit = watched_snapshot, watched_commit

    def memory(self) -> float:
        """What the last one took on this host, in MB."""
        return (_memory("VmHWM") - self._before) / 1e6


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 0 if found is None else int(found[1]) * 1024


def _print(name: str, value: float) -> None:
    sys.stdout.write(f"value {name} = {value}\n")
    sys.stdout.flush()


def train(run_file: Path) -> None:
    """Train as one host, and print what its saves took."""
    from baton.flows import result
    from baton.flows.train import main

    saves = Saves()
    saves.watch()
    result.write_report = lambda _home, **_title: None  # it takes memory after the last save
    code = main([str(run_file)])
    if code:
        sys.exit(code)
    _print("memory", saves.memory())


if __name__ == "__main__":
    if _HOST in os.environ:
        train(Path(sys.argv[1]))
    else:
        sys.exit(start_hosts(sys.argv[1], sys.argv[2:]))
