"""Training processes whose run is on gs://, and a local copy of what they wrote."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fakes.gcs.server import FakeGcs
from tests.support import forked
from tests.support.run_stoppable import RESUMABLE
from tests.support.shipped_runs import run_file, settings

STOPPABLE = Path(__file__).with_name("run_stoppable.py")
HOMES = {"digits": "digits-cnn", "text": "stdlib-transformer"}
_LONGEST_SECONDS = 300.0


class CloudChild:
    """A process that trains a shipped run file and shares only the store with others."""

    def __init__(
        self,
        server: FakeGcs,
        name: str,
        *options: str,
        root: str,
        disk: Path,
        extra: Sequence[str] = (),
        own_home: bool = False,
    ) -> None:
        """Start it.

        Args:
            server: the store.
            name: of the run file.
            options: for the driver.
            root: the storage root below gs://bucket.
            disk: is made for its temporary files.
            extra: more settings.
            own_home: its home folder is `disk` too. It is then a fresh interpreter, not a fork.
        """
        disk.mkdir(parents=True)
        self._server, self._prefix = server, f"{root}/{HOMES[name]}/"
        self._output = [disk / "out", disk / "err"]
        words = settings(name, f"gs://bucket/{root}", extra=extra)
        with self._output[0].open("wb") as out, self._output[1].open("wb") as err:
            self.process = forked.Popen(
                [sys.executable, "-W", "ignore", str(STOPPABLE), str(run_file(name)), *words, *options],
                stdout=out,
                stderr=err,
                env={
                    **os.environ,
                    "STORAGE_EMULATOR_HOST": server.url,
                    "BATON_STORAGE_STALL_SECONDS": "5",
                    "TMPDIR": str(disk),
                    **({"HOME": str(disk)} if own_home else {}),
                },
            )

    @property
    def stderr(self) -> str:
        return self._output[1].read_text(errors="replace")

    def until_entries(self, count: int) -> bool:
        """Wait until the log has `count` entries; False if the process ends first."""
        deadline = time.monotonic() + _LONGEST_SECONDS
        while entries_in(self._server, self._prefix) < count:
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.process.kill()
                raise TimeoutError(self.stderr[-2000:])
            time.sleep(0.02)
        return self.process.poll() is None

    def finish(self, *codes: int) -> dict[str, Any]:
        """Wait for the process; returns the result that it printed."""
        self.process.wait(_LONGEST_SECONDS)
        assert self.process.returncode in (codes or (0, RESUMABLE)), self.stderr[-3000:]
        lines = self._output[0].read_text().splitlines()
        return dict(json.loads(lines[-1])) if lines else {}


def entries_in(server: FakeGcs, home: str) -> int:
    return sum(name.startswith(f"{home}log/0") for name in server.store.names("bucket"))


def copied(server: FakeGcs, root: str, folder: Path) -> Path:
    """Copy everything below a root into a local folder; returns the copy of the root."""
    for name in server.store.names("bucket"):
        if name.startswith(f"{root}/"):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(server.store.bytes("bucket", name))
    return folder / root


def left_on(disk: Path) -> list[str]:
    """Names of files that a process left on its disk, without its output, dot files and compiled Python."""
    known = {"out", "err", "__pycache__"}  # AutoGraph imports files from the temporary folder
    return [path.name for path in disk.iterdir() if path.name not in known and not path.name.startswith(".")]
