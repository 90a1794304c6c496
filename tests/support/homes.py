"""Looking at a run's home from outside, while and after things happen to it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tasks.foundation.checkpoint.verify import damage
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Commit, Entry, Head
from tasks.foundation.errors import BatonError
from tasks.foundation.runlog.history import history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.local import LocalStorage


def log_of(home: Path) -> RunLog:
    return RunLog(LocalStorage(home))


def head_of(home: Path) -> Head | None:
    return log_of(home).head()


def tip_of(home: Path) -> CheckpointRef:
    head = head_of(home)
    if head is None or head.tip is None:
        raise AssertionError(f"{home} has no tip")
    return head.tip


def commits_of(home: Path) -> int:
    """How many commits the log holds; 0 while it is not there, or not to be read."""
    try:
        head = head_of(home)
    except BatonError:
        return 0
    return 0 if head is None else head.commits


def entries_of(home: Path) -> list[Entry]:
    return list(log_of(home).entries())


def commits_in(entries: Iterable[Entry]) -> list[CheckpointRef]:
    return [entry.body.checkpoint for entry in entries if isinstance(entry.body, Commit)]


def told_by(home: Path) -> tuple[Any, Any]:
    """Training rows and evaluations along the lineage of the tip, each by step."""
    history = history_of(entries_of(home))
    rows = [(row.step, row.metrics) for row in history.rows]
    return rows, [(item.checkpoint.step, item.metrics) for item in history.evaluations]


def log_bytes(home: Path) -> dict[str, bytes]:
    """The entries as they are on disk."""
    return {path.name: path.read_bytes() for path in sorted((home / "log").glob("[0-9]*.json"))}


def committed_bytes(home: Path) -> dict[str, bytes]:
    """Every entry, and every file of every retained checkpoint."""
    found = {f"log/{name}": data for name, data in log_bytes(home).items()}
    head = head_of(home)
    for ref in head.retained if head else ():
        for path in sorted((home / ref.path).iterdir()):
            found[f"{ref.path}/{path.name}"] = path.read_bytes()
    return found


def damaged(home: Path) -> set[str]:
    """Paths of the retained checkpoints that do not agree with their manifests."""
    head = head_of(home)
    return {ref.path for ref in (head.retained if head else ()) if damage(LocalStorage(home), ref)}


def folders_of(home: Path) -> set[str]:
    """Checkpoint folders on disk."""
    return {f"checkpoints/{path.name}" for path in (home / "checkpoints").glob("*-*-*")}


def temporary_files(home: Path) -> list[str]:
    return [str(path.relative_to(home)) for path in home.rglob(".unfinished-*")]
