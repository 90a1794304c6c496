"""A training process that things happen to: started, watched through its log, hit, and looked at afterwards."""

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
from tests.support.homes import commits_of
from tests.support.shipped_runs import DRIVER, Finished, run_file, settings

# Root may do anything, by two capabilities. Without them it is a user like any other.
_OBEYING = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
_PATIENCE_SECONDS = 300
_LOOK_EVERY_SECONDS = 0.02


class Child:
    """One process on a shipped run file. What it says goes to files beside the storage."""

    def __init__(
        self,
        name: str,
        storage: Path,
        *options: str,
        extra: Sequence[str] = (),
        notes: Path,
        env: dict[str, str] | None = None,
        obedient: bool = False,
        file_bytes: int | None = None,
        driver: Path = DRIVER,
    ) -> None:
        """Start it.

        Args:
            name: of the run file, `digits` or `text`.
            storage: the storage root.
            options: for the driver.
            extra: settings besides the usual ones, as key=value.
            notes: an existing folder for what it says.
            env: environment variables besides this process's.
            obedient: permissions hold for it, also where the tests are run by root.
            file_bytes: no file that it writes may become larger.
            driver: the program.
        """
        command = [sys.executable, str(driver), str(run_file(name)), *settings(name, storage, extra=extra), *options]
        if obedient and os.geteuid() == 0:
            command = [*_OBEYING, *command]
        self.home = storage / {"digits": "digits-cnn", "text": "stdlib-transformer"}[name]
        self._said = [notes / f"{time.monotonic_ns()}.{stream}" for stream in ("out", "err")]
        with self._said[0].open("wb") as out, self._said[1].open("wb") as err:
            self.process = forked.Popen(
                command,
                stdout=out,
                stderr=err,
                env={**os.environ, **(env or {})},
            )
        if file_bytes is not None:
            self.limit_files(file_bytes)

    @property
    def stderr(self) -> str:
        """What it has said so far."""
        return self._said[1].read_text(errors="replace")

    @property
    def alive(self) -> bool:
        """Whether it still runs (or is stopped), by the kernel's word."""
        return self.process.poll() is None

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait for something to become true; False if the process ended first."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            if not self.alive:
                return False
            if time.monotonic() > deadline:
                self.process.kill()
                raise TimeoutError(f"nothing came of waiting; {self.stderr[-2000:]}")
            time.sleep(_LOOK_EVERY_SECONDS)
        return self.alive

    def until_commits(self, count: int) -> bool:
        """Wait until the run's log holds so many commits."""
        return self.until(lambda: commits_of(self.home) >= count)

    def until_said(self, text: str) -> bool:
        """Wait for words on standard error."""
        return self.until(lambda: text in self.stderr)

    def stop(self) -> bool:
        """SIGSTOP, and wait until the kernel has stopped it; False if it had ended."""
        if not self.alive:
            return False
        self.process.send_signal(signal.SIGSTOP)
        return self.until(lambda: self._state() == "T")

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def limit_files(self, size: int) -> None:
        """From now on no file that the running process writes may become larger than so many bytes."""
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, size))

    def kill(self) -> bool:
        """SIGKILL; True if that is what it died of."""
        self.process.kill()
        return self.process.wait(60) == -signal.SIGKILL

    def finish(self, code: int | None = None) -> Finished:
        """Wait for its end."""
        try:
            self.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        done = Finished(
            code=self.process.returncode,
            result=self._result(),
            stdout=self._said[0].read_text(errors="replace"),
            stderr=self.stderr,
        )
        if code is not None and done.code != code:
            raise AssertionError(f"exit code {done.code}, not {code}:\n{done.stderr[-3000:]}")
        return done

    def _result(self) -> dict[str, Any]:
        lines = self._said[0].read_text(errors="replace").splitlines()
        return dict(json.loads(lines[-1])) if lines and lines[-1].startswith("{") else {}

    def _state(self) -> str:
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return ""
