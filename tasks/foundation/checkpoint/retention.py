"""Which checkpoints are kept, and the deletion of the others.

Policies are values, like `max_to_keep` and `keep_checkpoint_every_n_hours` of `tf.train.CheckpointManager`. They count
in steps, because clocks differ between machines.
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


class RetentionPolicy(Protocol):
    """Says which checkpoints are kept."""

    def keeps(self, head: Head) -> set[str]:
        """Paths of the checkpoints to keep."""


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keeps the newest `count` checkpoints; the tip is one of them."""

    count: int

    def keeps(self, head: Head) -> set[str]:
        """Paths of the newest checkpoints."""
        return {ref.path for ref in head.retained[-self.count :]}


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Keeps checkpoints at multiples of `steps`."""

    steps: int

    def keeps(self, head: Head) -> set[str]:
        """Paths of the checkpoints at these absolute steps."""
        return {ref.path for ref in head.retained if ref.step % self.steps == 0}


@dataclass(frozen=True, slots=True)
class KeepBestEvaluated:
    """Keeps the best of the evaluated checkpoints."""

    def keeps(self, head: Head) -> set[str]:
        """Path of the best checkpoint, if any was evaluated."""
        return set() if head.best is None else {head.best.checkpoint.path}


@dataclass(frozen=True, slots=True)
class KeepBorders:
    """Keeps the two newest on segment borders. A rewind needs them, even if many commits lie between them."""

    def keeps(self, head: Head) -> set[str]:
        """Paths of the newest checkpoints on segment borders."""
        return set(head.borders[-2:])


def retention_policies(spec: RunSpec) -> tuple[RetentionPolicy, ...]:
    """The policies of a run file. All of them together always keep the tip."""
    policies: list[RetentionPolicy] = [KeepLast(spec.checkpoint.keep_last)]
    if spec.checkpoint.keep_every_steps is not None:
        policies.append(KeepEvery(spec.checkpoint.keep_every_steps))
    if spec.checkpoint.keep_best is not None:
        policies.append(KeepBestEvaluated())
    if spec.train.on_blowup == "rewind":
        policies.append(KeepBorders())
    return tuple(policies)


def apply_retention(log: RunLog, policies: Sequence[RetentionPolicy], *, attempt: str) -> None:
    """Delete what was retired two commits ago, retire what no policy keeps, and delete garbage.

    Retiring is logged before anything is deleted, and deleting waits for two commits, so that readers notice in time.
    The next call finishes what a crash left. A checkpoint that cannot be deleted stays in the list of retired ones, and
    later calls try again.

    Args:
        log: the run's.
        policies: a checkpoint is retained if one of them keeps it.
        attempt: the writer, a uuid4.
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
    _delete_garbage(log)


def _delete_garbage(log: RunLog) -> None:
    """Delete folders that no entry names and whose base is no longer current: their writers can never commit."""
    # Listed before the head is read: everything listed was staged on a base no newer than the head's.
    folders = set(log.home.folders("checkpoints"))
    head = log.head()
    if head is None:
        return
    named = {ref.path for ref in (*head.retained, *head.quarantined)} | {old.path for old in head.retired}
    for folder in folders - named:
        base = base_in_folder_name(folder)
        if base is not None and base != head.base:
            discard(log.home, folder, now=head.commits)
