"""Training processes whose run lives on gs://, and a copy of what is there to look at."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fakes.gcs.fake_gcs import FakeGcs
from tests.support import forked
from tests.support.run_stoppable import RESUMABLE
from tests.support.shipped_runs import run_file, settings

STOPPABLE = Path(__file__).with_name("run_stoppable.py")
HOMES = {"digits": "digits-cnn", "text": "stdlib-transformer"}
_PATIENCE_SECONDS = 300.0


class CloudChild:
    """A process on a shipped run file, with a disk of its own: nothing but the store is shared."""

    def __init__(
        self, server: FakeGcs, name: str, *options: str, root: str, disk: Path, extra: Sequence[str] = ()
    ) -> None:
        """Start it.

        Args:
            server: the store.
            name: of the run file.
            options: for the driver.
            root: the storage root below gs://bucket.
            disk: a folder that is made for it; its home folder and its temporary files are there.
            extra: settings besides the usual ones.
        """
        disk.mkdir(parents=True)
        self._server, self._prefix = server, f"{root}/{HOMES[name]}/"
        self._said = [disk / "out", disk / "err"]
        words = settings(name, f"gs://bucket/{root}", extra=extra)
        with self._said[0].open("wb") as out, self._said[1].open("wb") as err:
            self.process = forked.Popen(
                [sys.executable, "-W", "ignore", str(STOPPABLE), str(run_file(name)), *words, *options],
                stdout=out,
                stderr=err,
                env={
                    **os.environ,
                    "STORAGE_EMULATOR_HOST": server.url,
                    "BATON_STORAGE_STALL_SECONDS": "5",
                    "TMPDIR": str(disk),
                    "HOME": str(disk),
                },
            )

    @property
    def stderr(self) -> str:
        return self._said[1].read_text(errors="replace")

    def until_entries(self, count: int) -> bool:
        """Wait until the log holds so many entries; False if the process ended first."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while entries_in(self._server, self._prefix) < count:
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.process.kill()
                raise TimeoutError(self.stderr[-2000:])
            time.sleep(0.02)
        return self.process.poll() is None

    def finish(self, *codes: int) -> dict[str, Any]:
        """Wait for its end; the result."""
        self.process.wait(_PATIENCE_SECONDS)
        assert self.process.returncode in (codes or (0, RESUMABLE)), self.stderr[-3000:]
        lines = self._said[0].read_text().splitlines()
        return dict(json.loads(lines[-1])) if lines else {}


def entries_in(server: FakeGcs, home: str) -> int:
    return sum(name.startswith(f"{home}log/0") for name in server.store.names("bucket"))


def copied(server: FakeGcs, root: str, folder: Path) -> Path:
    """Everything below a root, as a local folder; the layout is the same."""
    for name in server.store.names("bucket"):
        if name.startswith(f"{root}/"):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(server.store.bytes("bucket", name))
    return folder / root


def left_on(disk: Path) -> list[str]:
    """What a process left on its disk, but for what it said, a home folder's dot files, and Python's compiled code."""
    known = {"out", "err", "__pycache__"}  # AutoGraph imports what it writes into the temporary folder
    return [path.name for path in disk.iterdir() if path.name not in known and not path.name.startswith(".")]
