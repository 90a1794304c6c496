"""A run of Weights & Biases in its offline mode, in the home: `wandb/offline-run-*`. Imported only where asked for.

An offline folder can neither be continued nor take anything back. So a process that has something to add writes a new
one with everything, under the same id, and deletes the one before. `wandb/points.json`, written when a folder is
complete, has its points. A kill leaves an incomplete folder, and `points.json` as it was: the next process replaces
the folder.
"""

import json
import shutil
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import wandb
from pydantic_core import from_json

from tasks.foundation.errors import FileTooLarge
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.tracking import Point, PointKey

_POINTS = "wandb/points.json"
_FOLDERS = "wandb/offline-run-*"


class WandbTracker:
    """One offline folder of one W&B run."""

    def __init__(self, *, run: str, name: str, home: Storage, folder: Path, project: str) -> None:
        """Read and write nothing yet.

        Args:
            run: W&B's id of the run, for as long as it lives.
            name: name to show.
            home: the run's home, on a local disk.
            folder: where it is.
            project: name of W&B's project.
        """
        self._run, self._name, self._project = run, name, project
        self._home, self._folder = home, folder
        self._points: list[Point] = []
        self._open: Any = None

    def keys(self) -> Collection[PointKey]:
        """See `Tracker`."""
        self._abandon()
        self._points = []
        with suppress(ValueError, TypeError, FileTooLarge):  # unreadable: written again
            if self._home.exists(_POINTS):
                rows = from_json(self._home.read(_POINTS))["points"]
                self._points = [Point(PointKey(name, step, time), value) for name, step, time, value in rows]
        return {point.key for point in self._points}

    def send(self, points: Sequence[Point]) -> None:
        """See `Tracker`."""
        if self._open is None:
            self._delete_folders()
            self._open = wandb.init(
                project=self._project,
                id=self._run,
                name=self._name,
                dir=self._folder,
                resume="allow",  # the server may have the id, from an earlier upload
                reinit="create_new",  # the user's code may have a run of its own
                settings=wandb.Settings(
                    mode="offline",
                    silent=True,
                    console="off",
                    disable_git=True,
                    disable_code=True,
                    x_disable_stats=True,
                ),
            )
            self._open.define_metric("step")
            self._open.define_metric("*", step_metric="step")
            self._log(self._points)
        self._log(points)
        self._points += points

    def start_over(self) -> None:
        """See `Tracker`."""
        self._home.delete(_POINTS)
        self._abandon()
        self._delete_folders()
        self._points = []

    def close(self) -> None:
        """See `Tracker`."""
        if self._open is not None:
            finishing, self._open = self._open, None
            finishing.finish()
            rows = [[each.key.name, each.key.step, each.key.milliseconds, each.value] for each in self._points]
            self._home.write(_POINTS, json.dumps({"schema_version": 1, "points": rows}).encode())

    def _log(self, points: Iterable[Point]) -> None:
        for (step, time), row in groupby(points, key=lambda point: (point.key.step, point.key.milliseconds)):
            values = {point.key.name: point.value for point in row}
            self._open.log({**values, "step": step, "_timestamp": time / 1000})

    def _abandon(self) -> None:
        """End a folder that something failed in."""
        if self._open is not None:
            finishing, self._open = self._open, None
            finishing.finish()

    def _delete_folders(self) -> None:
        for folder in self._folder.glob(_FOLDERS):
            shutil.rmtree(folder)
