"""Whether a log has all its entries, and the errors for those that are missing or damaged."""

from collections.abc import Sequence

from tasks.foundation.contracts.base import is_json
from tasks.foundation.contracts.checkpoint import base_in_folder_name
from tasks.foundation.errors import RunLogError
from tasks.foundation.runlog.entry_paths import entry_number, entry_path
from tasks.foundation.storage.base import Storage

# Describes the fork that a home without a log is about to become; see checkpoint/fork.py.
UNFINISHED_FORK = "fork.json"


def require_whole(home: Storage) -> None:
    """Check that no entry of the log in `home` is missing.

    Raises:
        RunLogError: an entry is missing, or the whole log of a run that has checkpoints.
    """
    listed = _listed(home)
    if not listed:
        _require_no_checkpoints(home)
    for number in range(max(listed, default=0)):
        # A listing may lag behind, so check a missing name directly.
        if number not in listed and not home.exists(entry_path(number)):
            raise missing_entry(f"{home.uri}/{entry_path(number)}")


def require_entry(home: Storage, number: int) -> None:
    """Check that an entry exists, without reading it.

    Raises:
        RunLogError: it does not.
    """
    if not home.exists(entry_path(number)):
        raise missing_entry(f"{home.uri}/{entry_path(number)}")


def missing_entry(where: str) -> RunLogError:
    """The error for a file that must be there."""
    return RunLogError(
        f"{where} is missing: the log has lost an entry; restore it from a backup, or check that its disk is still "
        "mounted"
    )


def _require_no_checkpoints(home: Storage) -> None:
    """Refuse a home with checkpoints but without a log: the origin is written before any checkpoint.

    The log is looked at again after the checkpoints, because another process may have begun the run meanwhile.
    """
    staged = sorted(home.folders("checkpoints"))
    # The order matters: a fork in progress writes its origin first, and only then deletes its note.
    if not staged or _is_unfinished_fork(home, staged) or home.exists(entry_path(0)):
        return
    if any(home.folders("checkpoints")):
        raise RunLogError(
            f"{home.uri} has checkpoints ({staged[0]}) but no log; restore log/ from a backup, or move the folder "
            "away to start a new run"
        )


def _is_unfinished_fork(home: Storage, staged: Sequence[str]) -> bool:
    """Whether a fork is in progress: all checkpoints are copies (base 0), and there is no origin yet."""
    return all(base_in_folder_name(folder) == 0 for folder in staged) and home.exists(UNFINISHED_FORK)


def _listed(home: Storage) -> set[int]:
    return {number for path in home.files("log") if (number := entry_number(path)) is not None}


def disappeared_log(home: Storage) -> RunLogError:
    """The error for a log that this process has read before, and that is gone."""
    return RunLogError(f"{home.uri}: the log has disappeared; check that its disk is still mounted")


def unreadable_entry(home: Storage, number: int, data: bytes, error: RunLogError) -> RunLogError:
    """The error for an entry that cannot be read, with the remedy.

    Args:
        home: the run's home.
        number: of the entry.
        data: the content of its file.
        error: why it cannot be read.
    """
    remedy = "restore the file from a backup"
    if is_json(data):  # complete, so another version may be able to read it
        remedy += ", or use the version of Baton that wrote it"
    elif not home.exists(entry_path(number + 1)):
        remedy += "; without a backup, stop all processes of this run and delete the file: only this entry is lost"
    return RunLogError(f"{error}; {remedy}")
