"""Whether a log has all its entries, and the errors for those that are missing or damaged."""

from collections.abc import Sequence

from tasks.foundation.contracts.checkpoint import base_in_folder_name
from tasks.foundation.contracts.log_entry import Entry, Head
from tasks.foundation.errors import RunLogError
from tasks.foundation.messages import message
from tasks.foundation.runlog.entry_paths import entry_number, entry_path
from tasks.foundation.runlog.folding import unexpected_keys
from tasks.foundation.storage.base import Storage

# Describes the fork that a home without a log is about to become; see checkpoint/fork.py.
UNFINISHED_FORK = "fork.json"


def require_whole(home: Storage) -> None:
    """Check that no entry of the log in `home` is missing, and that nothing else stands where an entry belongs.

    Raises:
        RunLogError: an entry is missing, or the whole log of a run that has checkpoints.
    """
    for path in folders_in_log(home):
        raise folder_as_entry(home, path)
    listed = _listed(home)
    if not listed:
        _require_no_checkpoints(home)
    for number in range(max(listed, default=0)):
        # A listing may lag behind, so check a missing name directly.
        if number not in listed and not home.exists(entry_path(number)):
            raise missing_entry(f"{home.uri}/{entry_path(number)}")


def folders_in_log(home: Storage) -> list[str]:
    """Paths of the folders that stand where an entry belongs. Object stores can have both."""
    if home.transfers > 1:
        return []
    return sorted(path for path in home.folders("log") if entry_number(path) is not None)


def folder_as_entry(home: Storage, path: str) -> RunLogError:
    """The error for a folder that stands where an entry belongs, so that the log seems to end before it."""
    return RunLogError(
        message(
            f"{home.uri}/{path} is a folder, where an entry of the log belongs",
            hints=["move it away, and restore the file from a backup if the entry has been written"],
        )
    )


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


def unreadable_entry(home: Storage, number: int, error: RunLogError) -> RunLogError:
    """The error for an entry that cannot be read or believed, with the remedy.

    Args:
        home: the run's home.
        number: of the entry.
        error: why it cannot be read.
    """
    hints = ["restore the file from a backup"]
    if home.exists(entry_path(number + 1)):
        hints.append(f"without a backup, start a run of another name with init.weights: {home.uri}")
    elif number == 0:
        hints.append(f"without a backup, move {home.uri} away and start the run again: nothing was committed")
    else:
        hints.append(without_newest(home, number))
    return RunLogError(message(str(error), hints=hints))


def require_follows(home: Storage, before: Head | None, entry: Entry) -> None:
    """Check that the state in an entry follows from the state before it.

    Raises:
        RunLogError: it does not follow, or a page that it names cannot be read.
    """
    where, number = f"{home.uri}/{entry_path(entry.number)}", entry.number
    try:
        keys = unexpected_keys(before, entry)
    except RunLogError as fault:
        raise RunLogError(f"{where} does not follow from the entries before it: {fault}") from fault
    if keys:
        hints = [f"one of the two files was changed: restore {entry_path(number)} or the one before it from a backup"]
        if number and not home.exists(entry_path(number + 1)):
            hints.append(without_newest(home, number))
        problem = f"{where} records a state that does not follow from the entries before it ({', '.join(keys)})"
        raise RunLogError(message(problem, hints=hints))


def without_newest(home: Storage, number: int) -> str:
    """How a run goes on if its newest entry is lost.

    The entry before it has a whole state. What the lost one retired still has its files, because they are deleted two
    commits later, and work that is lost with it is done again.
    """
    return (
        f"without a backup, stop all processes of this run and move {entry_path(number)} out of {home.uri}/log: only "
        f"this entry is lost, and the run continues from entry {number - 1}"
    )
