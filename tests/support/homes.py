"""Read a run's home from outside, during and after training."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from baton.tasks.foundation.checkpoint.verify import find_damage
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Head
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage


def log_of(home: Path) -> RunLog:
    return RunLog(LocalStorage(home))


def head_of(home: Path) -> Head | None:
    return log_of(home).head()


def tip_of(home: Path) -> CheckpointRef:
    head = head_of(home)
    if head is None or head.tip is None:
        raise AssertionError(f"{home} has no tip")
    return head.tip


def commit_count(home: Path) -> int:
    """The number of commits in the log; 0 if it is missing or unreadable."""
    try:
        head = head_of(home)
    except BatonError:
        return 0
    return 0 if head is None else head.commits


def entries_of(home: Path) -> list[Entry]:
    return list(log_of(home).entries())


def commits_in(entries: Iterable[Entry]) -> list[CheckpointRef]:
    return [entry.body.checkpoint for entry in entries if isinstance(entry.body, Commit)]


def read_history(home: str | Path) -> tuple[Any, Any]:
    """Return the training rows and the evaluations along the lineage of the tip, each by step."""
    history = history_of(entries_of(Path(home)))
    rows = [(row.step, row.metrics) for row in history.rows]
    return rows, [(item.checkpoint.step, item.metrics) for item in history.evaluations]


def log_bytes(home: Path) -> dict[str, bytes]:
    """The bytes of each entry by file name."""
    return {path.name: path.read_bytes() for path in sorted((home / "log").glob("[0-9]*.json"))}


def committed_bytes(home: Path) -> dict[str, bytes]:
    """The bytes of every entry and of every file of the retained checkpoints."""
    found = {f"log/{name}": data for name, data in log_bytes(home).items()}
    head = head_of(home)
    for ref in head.retained if head else ():
        for path in sorted((home / ref.path).iterdir()):
            found[f"{ref.path}/{path.name}"] = path.read_bytes()
    return found


def damaged(home: Path) -> set[str]:
    """Paths of retained checkpoints that do not match their manifests."""
    head = head_of(home)
    return {ref.path for ref in (head.retained if head else ()) if find_damage(LocalStorage(home), ref)}


def folders_of(home: Path) -> set[str]:
    """Paths of the checkpoint folders on disk."""
    return {f"checkpoints/{path.name}" for path in (home / "checkpoints").glob("*-*-*")}


def unexpected_folders(home: Path, head: Head) -> set[str]:
    """Checkpoint folders that are missing or left over. What was retired two commits ago may be there or not."""
    kept, there = {ref.path for ref in head.retained}, folders_of(home)
    recent = {old.path for old in head.retired if head.commits - old.at_commit < 2}
    return (kept | recent) - there | (there - kept - {old.path for old in head.retired})


def temporary_files(home: Path) -> list[str]:
    return [str(path.relative_to(home)) for path in home.rglob(".unfinished-*")]
