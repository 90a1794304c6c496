"""Which checkpoints stay, and the clearing away of the others.

Policies are values in the manner of `tf.train.CheckpointManager`'s `max_to_keep` and
`keep_checkpoint_every_n_hours`, counted in steps because clocks differ between machines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.foundation.contracts.checkpoint import base_in_folder_name
from tasks.foundation.contracts.log_entry import Body, Head, Retire
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.best_effort_delete import discard

_COMMITS_BETWEEN_RETIRING_AND_DELETING = 2


class Policy(Protocol):
    """Says which checkpoints stay."""

    def keeps(self, head: Head) -> set[str]:
        """Paths that must stay."""


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The newest `count`, the tip among them."""

    count: int

    def keeps(self, head: Head) -> set[str]:
        """Paths of the newest checkpoints."""
        return {ref.path for ref in head.retained[-self.count :]}


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Those at multiples of `steps`."""

    steps: int

    def keeps(self, head: Head) -> set[str]:
        """Paths of checkpoints at absolute steps."""
        return {ref.path for ref in head.retained if ref.step % self.steps == 0}


@dataclass(frozen=True, slots=True)
class KeepBestEvaluated:
    """The best evaluated one."""

    def keeps(self, head: Head) -> set[str]:
        """Path of the best checkpoint, if any was evaluated."""
        return set() if head.best is None else {head.best.checkpoint.path}


@dataclass(frozen=True, slots=True)
class KeepBorders:
    """The two newest on segment borders: commits between them must not push out what a rewind goes back to."""

    def keeps(self, head: Head) -> set[str]:
        """Paths of the newest checkpoints on segment borders."""
        return set(head.borders[-2:])


def policies_of(spec: RunSpec) -> tuple[Policy, ...]:
    """The policies that a run file asks for. The tip is always among the last."""
    policies: list[Policy] = [KeepLast(spec.checkpoint.keep_last)]
    if spec.checkpoint.keep_every_steps is not None:
        policies.append(KeepEvery(spec.checkpoint.keep_every_steps))
    if spec.checkpoint.keep_best is not None:
        policies.append(KeepBestEvaluated())
    if spec.train.on_blowup == "rewind":
        policies.append(KeepBorders())
    return tuple(policies)


def clear_away(log: RunLog, policies: Sequence[Policy], *, attempt: str) -> None:
    """Delete what was retired two commits ago, retire what no policy keeps, and sweep up garbage.

    Idempotent; what a crash leaves is finished by the next call. Retiring is logged before anything is deleted, and
    deleting waits for two commits, so that a reader has time to notice. What cannot be deleted stays among the retired,
    and is tried again after later commits.
    """
    head = log.head()
    if head is None:
        return
    due = [old.path for old in head.retired if head.commits - old.at_commit >= _COMMITS_BETWEEN_RETIRING_AND_DELETING]
    deleted = tuple(path for path in due if discard(log.home, path, now=head.commits))

    def decide(newest: Head | None) -> Body | None:
        if newest is None:
            return None
        kept = set().union(*(policy.keeps(newest) for policy in policies))
        paths = tuple(ref.path for ref in newest.retained if ref.path not in kept)
        still_listed = {old.path for old in newest.retired}
        gone = tuple(path for path in deleted if path in still_listed)
        return Retire(paths=paths, deleted=gone) if paths or gone else None

    log.append(decide, attempt=attempt)
    _sweep(log)


def _sweep(log: RunLog) -> None:
    """Delete folders that no entry names and whose base is no longer current: their writers can never commit.

    The listing is taken before the head is read: whatever it shows was staged on a base no newer than that head's.
    """
    folders = set(log.home.folders("checkpoints"))
    head = log.head()
    if head is None:
        return
    named = {ref.path for ref in (*head.retained, *head.quarantined)} | {old.path for old in head.retired}
    for folder in folders - named:
        base = base_in_folder_name(folder)
        if base is not None and base != head.base:
            discard(log.home, folder, now=head.commits)
