"""Which fork a home holds, and whether it is complete.

A fork writes its lineage into `fork.json` first, then the copied checkpoint, the origin entry, and the commit. So a
home that a crash left incomplete is recognized as a fork, and init-or-restore does not begin a new run there. Without
an origin entry, any fork may be made there. With one, the copy is there too: the same command commits it, even if the
source run has retired the checkpoint.
"""

import shlex
from dataclasses import dataclass

from tasks.foundation.contracts.log_entry import Head, Lineage, Origin
from tasks.foundation.errors import FileMissing, InvalidInput, RunLogError
from tasks.foundation.runlog.completeness import UNFINISHED_FORK
from tasks.foundation.runlog.log import RunLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A complete fork.

    Attributes:
        lineage: the run and the checkpoint that it was copied from.
        head: the newest head of its log.
        already_there: whether it was complete before this command.
    """

    lineage: Lineage
    head: Head
    already_there: bool


def refuse_unfinished_fork(log: RunLog) -> None:
    """Refuse to begin a new run in a home that holds an unfinished fork.

    Raises:
        InvalidInput: it holds one; names the command that finishes it.
    """
    head = log.head()
    lineage = _planned_lineage(log) if head is None else read_head_and_lineage(log)[1]
    if lineage is not None:
        raise InvalidInput(
            f"{log.home.uri} is a fork without a whole checkpoint; copy it again: {_command(log, lineage)}"
        )


def _planned_lineage(log: RunLog) -> Lineage | None:
    """The lineage in `fork.json`, of a home that has no log yet."""
    try:
        data = log.home.read(UNFINISHED_FORK)
    except FileMissing:
        return None
    return Lineage.from_json(data, where=f"{log.home.uri}/{UNFINISHED_FORK}", error=RunLogError)


def find_same_fork(log: RunLog, head: Head | None, existing: Lineage | None, wanted: Lineage) -> Fork | None:
    """The wanted fork, if it is complete; None if it must still be made.

    Args:
        log: the new run's.
        head: its newest head; None if there is no run.
        existing: the lineage in its log.
        wanted: the lineage of the fork to make.

    Raises:
        InvalidInput: the name is taken by another run.
    """
    if head is None:
        return None
    if existing is None:
        raise InvalidInput(
            f"--as: {log.home.uri} holds a run already, at step {head.tip.step if head.tip else 0}; take another name"
        )
    # The address of the source does not count: its home may have moved.
    if (existing.path, existing.state_digest, existing.entry) != (wanted.path, wanted.state_digest, wanted.entry):
        unfinished = "" if head.tip else f", not finished ({_command(log, existing)})"
        raise InvalidInput(
            f"--as: {log.home.uri} holds a fork of {existing.home} at step {existing.step} already{unfinished}; this "
            f"one would be of {wanted.home} at step {wanted.step} ({wanted.path}). Take another name"
        )
    return complete_fork(head, existing)


def complete_fork(head: Head | None, lineage: Lineage | None) -> Fork | None:
    """The fork that a head and a lineage describe, if it has a checkpoint."""
    if head is None or head.tip is None or lineage is None:
        return None
    return Fork(lineage=lineage, head=head, already_there=True)


def read_head_and_lineage(log: RunLog) -> tuple[Head | None, Lineage | None]:
    """The newest head, and the lineage if the run is a fork.

    Raises:
        RunLogError: the log has lost an entry.
    """
    head = log.head()
    if head is None:
        log.require_whole()
        return None, None
    origin = log.entry(0).body
    return head, origin.forked_from if isinstance(origin, Origin) else None


def _command(log: RunLog, lineage: Lineage) -> str:
    name = log.home.uri.rsplit("/", 1)[-1]
    return f"baton fork {shlex.quote(lineage.home)} --at-step {lineage.step} --as {name}"
