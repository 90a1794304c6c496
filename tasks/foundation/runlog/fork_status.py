"""What a home is a fork of, and whether the fork stands.

A note of the lineage is the first thing that a fork writes, then the copy, the origin, and the commit. So a home that
a crash left half-made is known for a fork, and init-or-restore does not begin it at step 0. Without an origin any fork
may be made there. With one, the copy is there too: the same command said again commits it, even if the other run has
retired the checkpoint.
"""

import shlex
from dataclasses import dataclass

from tasks.foundation.contracts.log_entry import Head, Lineage, Origin
from tasks.foundation.errors import FileMissing, InvalidInput, RunLogError
from tasks.foundation.runlog.log import UNFINISHED_FORK, RunLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A fork that stands: where from, the state of its log, and whether it had been there before."""

    lineage: Lineage
    head: Head
    already_there: bool


def refuse_unfinished_fork(log: RunLog) -> None:
    """A run without a tip begins at step 0, but not if it was to begin from another run's checkpoint.

    Raises:
        InvalidInput: it was, naming the command that finishes it.
    """
    head = log.head()
    lineage = _noted(log) if head is None else look(log)[1]
    if lineage is not None:
        raise InvalidInput(
            f"{log.home.uri} is a fork that has no checkpoint yet, or none that is whole; copy it again: "
            f"{_command(log, lineage)}"
        )


def _noted(log: RunLog) -> Lineage | None:
    """What a home without a log is to be a fork of."""
    try:
        data = log.home.read(UNFINISHED_FORK)
    except FileMissing:
        return None
    return Lineage.from_json(data, where=f"{log.home.uri}/{UNFINISHED_FORK}", error=RunLogError)


def same_fork(log: RunLog, head: Head | None, there: Lineage | None, wanted: Lineage) -> Fork | None:
    """The fork that is wanted, if it stands already; None if it is still to be made.

    Raises:
        InvalidInput: the name is taken.
    """
    if head is None:
        return None
    if there is None:
        raise InvalidInput(
            f"--as: {log.home.uri} holds a run already, at step {head.tip.step if head.tip else 0}; take another name"
        )
    # Where it came from counts, not where that lies now.
    if (there.path, there.state_digest, there.entry) != (wanted.path, wanted.state_digest, wanted.entry):
        unfinished = "" if head.tip else f", not finished ({_command(log, there)})"
        raise InvalidInput(
            f"--as: {log.home.uri} holds a fork of {there.home} at step {there.step} already{unfinished}; this one "
            f"would be of {wanted.home} at step {wanted.step} ({wanted.path}). Take another name"
        )
    return standing(head, there)


def standing(head: Head | None, lineage: Lineage | None) -> Fork | None:
    """The fork that a head and a lineage show, if there is a checkpoint."""
    if head is None or head.tip is None or lineage is None:
        return None
    return Fork(lineage=lineage, head=head, already_there=True)


def look(log: RunLog) -> tuple[Head | None, Lineage | None]:
    """The head, and where the run was forked from.

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
