"""A training process to interrupt: start it, watch its log, send signals, read its result."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support import forked
from tests.support.homes import commit_count
from tests.support.save_marks import VARIABLE, save_in_flight
from tests.support.shipped_runs import DRIVER, Finished, run_file, settings

_WITHOUT_ROOT_RIGHTS = Path(__file__).with_name("run_without_root_rights.py")
_LONGEST_SECONDS = 300
_POLL_SECONDS = 0.02


class Child:
    """A process that trains a shipped run file; its output goes to files."""

    def __init__(
        self,
        name: str,
        storage: Path,
        *options: str,
        extra: Sequence[str] = (),
        notes: Path,
        env: dict[str, str] | None = None,
        without_root_rights: bool = False,
        file_bytes: int | None = None,
        driver: Path = DRIVER,
        file: Path | None = None,
    ) -> None:
        """Start it.

        Args:
            name: `digits` or `text`.
            storage: the storage root.
            options: options of the driver.
            extra: more settings, as key=value.
            notes: an existing folder for its output.
            env: more environment variables.
            without_root_rights: file permissions apply to it, even if root runs the tests. It takes no other driver.
            file_bytes: the size limit of files that it writes.
            driver: the program.
            file: another run file than the shipped one.
        """
        if without_root_rights:
            driver = _WITHOUT_ROOT_RIGHTS
        settled = settings(name, storage, extra=extra)
        command = [sys.executable, str(driver), str(file or run_file(name)), *settled, *options]
        self.home = storage / {"digits": "digits-cnn", "text": "stdlib-transformer"}[name]
        self._output = [notes / f"{time.monotonic_ns()}.{stream}" for stream in ("out", "err")]
        self._marks = notes / f"{time.monotonic_ns()}.marks"
        with self._output[0].open("wb") as out, self._output[1].open("wb") as err:
            self.process = forked.Popen(
                command,
                stdout=out,
                stderr=err,
                env={**os.environ, VARIABLE: str(self._marks), **(env or {})},
            )
        if file_bytes is not None:
            self.limit_files(file_bytes)

    @property
    def stderr(self) -> str:
        """Its standard error so far."""
        return self._output[1].read_text(errors="replace")

    @property
    def alive(self) -> bool:
        """Whether the process still exists, running or stopped."""
        return self.process.poll() is None

    @property
    def save_in_flight(self) -> bool:
        """Whether it has a save in flight, or had one when it was killed; only `run_stoppable.py` tells."""
        return save_in_flight(self._marks)

    def until(self, condition: Callable[[], bool], *, poll_seconds: float = _POLL_SECONDS) -> bool:
        """Wait for a condition; False if the process ends first."""
        deadline = time.monotonic() + _LONGEST_SECONDS
        while not condition():
            if not self.alive:
                return False
            if time.monotonic() > deadline:
                self.process.kill()
                raise TimeoutError(f"the condition never became true; {self.stderr[-2000:]}")
            time.sleep(poll_seconds)
        return self.alive

    def until_commits(self, count: int) -> bool:
        """Wait until the log has `count` commits."""
        return self.until(lambda: commit_count(self.home) >= count)

    def until_save_in_flight(self) -> bool:
        """Wait until it has a save in flight."""
        return self.until(lambda: self.save_in_flight, poll_seconds=0.001)

    def until_printed(self, text: str) -> bool:
        """Wait until standard error contains a text."""
        return self.until(lambda: text in self.stderr)

    def stop(self) -> bool:
        """Send SIGSTOP and wait until the process is stopped; False if it has ended."""
        if not self.alive:
            return False
        self.process.send_signal(signal.SIGSTOP)
        return self.until(lambda: self._state() == "T")

    def resume(self) -> None:
        """Send SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def limit_files(self, size: int) -> None:
        """Limit the size of files that the running process writes, in bytes."""
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, size))

    def kill(self) -> bool:
        """Send SIGKILL; returns whether the signal ended the process."""
        self.process.kill()
        return self.process.wait(60) == -signal.SIGKILL

    def finish(self, code: int | None = None) -> Finished:
        """Wait for the process; a `code` other than None must be its exit code."""
        try:
            self.process.wait(_LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        done = Finished(
            code=self.process.returncode,
            result=self._result(),
            stdout=self._output[0].read_text(errors="replace"),
            stderr=self.stderr,
        )
        if code is not None and done.code != code:
            raise AssertionError(f"exit code {done.code}, not {code}:\n{done.stderr[-3000:]}")
        return done

    def _result(self) -> dict[str, Any]:
        lines = self._output[0].read_text(errors="replace").splitlines()
        return dict(json.loads(lines[-1])) if lines and lines[-1].startswith("{") else {}

    def _state(self) -> str:
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return ""
