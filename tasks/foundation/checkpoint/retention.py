"""Which checkpoints are kept, the deletion of the others, and the ways back from a damaged or diverged tip.

Policies are values, like `max_to_keep` and `keep_checkpoint_every_n_hours` of `tf.train.CheckpointManager`. They count
in steps, because clocks differ between machines. Damaged checkpoints are quarantined up to the newest whole one; after
a blow-up the run goes back to a segment border. Both are said in the log.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from baton.tasks.foundation.checkpoint.verify import PREFETCHED_CHECKPOINT, find_damage
from baton.tasks.foundation.contracts.checkpoint import base_in_folder_name
from baton.tasks.foundation.contracts.identity import recorded_callbacks
from baton.tasks.foundation.contracts.log_entry import Body, Head, Retained, Retire, Rewind
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import BlowUp, NothingToRestore, RunLogError, StorageError
from baton.tasks.foundation.log.appends import evaluates_beside, overdue_evaluation, quarantine, rewind
from baton.tasks.foundation.log.history import kept_for_good
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage, best_effort, discard, is_postponed
from baton.tasks.foundation.storage.transfers import parallel_map
from baton.tasks.foundation.telemetry.events import Note, Sink
from baton.tasks.foundation.text import listed

_COMMITS_BEFORE_DELETING = 2
_LISTING_SECONDS = 10.0


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
    """Keeps checkpoints at multiples of `steps`, for good."""

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
class KeepBestOfCallbacks:
    """Keeps the best of the evaluated checkpoints if the run's callbacks ask for it, as ModelCheckpoint does."""

    def keeps(self, head: Head) -> set[str]:
        """Path of the best checkpoint, if any was evaluated."""
        if head.best is None or recorded_callbacks(head.identity).keep_best is None:
            return set()
        return {head.best.checkpoint.path}


@dataclass(frozen=True, slots=True)
class KeepBorders:
    """Keeps the two newest on segment borders. A rewind needs them, even if many commits lie between them."""

    def keeps(self, head: Head) -> set[str]:
        """Paths of the newest checkpoints on segment borders."""
        return set(head.borders[-2:])


@dataclass(frozen=True, slots=True)
class KeepVerified:
    """Keeps the newest that was restored, or read whole again. Those after it may be damaged, and nobody knows."""

    def keeps(self, head: Head) -> set[str]:
        """Path of that checkpoint, if one was read whole after its commit."""
        return set(head.read[-1:])


@dataclass(frozen=True, slots=True)
class KeepOverdue:
    """Keeps the checkpoint that another process still evaluates, or has to evaluate after a kill."""

    spec: RunSpec

    def keeps(self, head: Head) -> set[str]:
        """Path of that checkpoint, if there is one."""
        overdue = overdue_evaluation(head, self.spec)
        return set() if overdue is None else {overdue.path}


def retention_policies(spec: RunSpec) -> tuple[RetentionPolicy, ...]:
    """The policies of a run file. All of them together always keep the tip."""
    policies: list[RetentionPolicy] = [KeepLast(spec.checkpoint.keep_last), KeepVerified()]
    if spec.checkpoint.keep_every_steps is not None:
        policies.append(KeepEvery(spec.checkpoint.keep_every_steps))
    if spec.checkpoint.keep_best is not None:
        policies.append(KeepBestEvaluated())
    elif spec.train.callbacks is not None:
        policies.append(KeepBestOfCallbacks())
    if spec.train.on_blowup == "rewind":
        policies.append(KeepBorders())
    if evaluates_beside(spec):
        policies.append(KeepOverdue(spec))
    return tuple(policies)


def kept_for_good_now(head: Head, policies: Sequence[RetentionPolicy]) -> tuple[Retained, ...]:
    """The checkpoints that leave the head: they are kept for good, and no other policy has to decide about them.

    One that a rewind may drop stays: a rewind goes back to one of the two borders that `KeepBorders` keeps.
    """
    for_good = set().union(*(policy.keeps(head) for policy in policies if isinstance(policy, KeepEvery)))
    others = set().union(*(policy.keeps(head) for policy in policies if not isinstance(policy, KeepEvery)))
    others |= KeepBestEvaluated().keeps(head)  # a later evaluation is compared with it
    borders = set().union(*(policy.keeps(head) for policy in policies if isinstance(policy, KeepBorders)))
    found = []
    for each in head.checkpoints:
        if each.ref.path in borders:
            break
        if each.ref.path in for_good - others:
            found.append(each)
    return tuple(found)


def files_to_delete(home: Storage, head: Head | None) -> dict[str, tuple[str, ...]]:
    """List the files that `apply_retention` deletes once one more commit is there. Best effort.

    Call it beside that commit: in a remote store, deletion then needs no listing of its own.

    Args:
        head: before the commit.

    Returns:
        For each retired checkpoint, all files that it still has. A local store deletes without a list, so it gets none.
    """
    if head is None or home.transfers == 1:
        return {}
    now = head.commits + 1
    ripe = [old.path for old in head.retired if now - old.at_commit >= _COMMITS_BEFORE_DELETING]
    paths = [path for path in ripe if not is_postponed(home, path, now=now)]
    quick = home.with_deadline(_LISTING_SECONDS)

    def files_of(path: str) -> tuple[str, ...] | None:
        try:
            return tuple(quick.files(path))
        except StorageError:
            return None  # deletion lists them, or reports why it cannot

    found = zip(paths, parallel_map(files_of, paths, workers=home.transfers), strict=True)
    return {path: files for path, files in found if files is not None}


def apply_retention(
    log: RunLog,
    policies: Sequence[RetentionPolicy],
    *,
    attempt: str,
    listed: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Retire what no policy keeps, and delete what was retired two commits ago, and garbage.

    Retiring is logged before anything is deleted, and deleting waits for two commits, so that readers notice in time.
    Deletions run beside the entry that retires, so the entry after the next commit says that they are done: by then,
    nothing is left, or is deleted first. So the next call finishes what a crash left. A checkpoint that cannot be
    deleted stays in the list of retired ones, and later calls try again.

    Args:
        policies: a checkpoint is retained if one of them keeps it.
        attempt: the writer, a uuid4.
        listed: see `files_to_delete`; what is missing is listed when it is deleted.
    """
    head = log.head_seen()
    if head is None:
        return
    ages = {old.path: head.commits - old.at_commit for old in head.retired}
    due = [path for path, age in ages.items() if age == _COMMITS_BEFORE_DELETING]
    overdue = [path for path, age in ages.items() if age > _COMMITS_BEFORE_DELETING]

    def delete(path: str) -> bool:
        return discard(log.home, path, files=listed.get(path), now=head.commits)

    gone = parallel_map(delete, overdue, workers=log.home.transfers)
    deleted = tuple(path for path, is_gone in zip(overdue, gone, strict=True) if is_gone)

    def decide(newest: Head | None) -> Body | None:
        if newest is None:
            return None
        kept = set().union(*(policy.keeps(newest) for policy in policies))
        paths = tuple(ref.path for ref in newest.retained if ref.path not in kept)
        still_listed = {old.path for old in newest.retired}
        gone = tuple(path for path in deleted if path in still_listed)
        good = kept_for_good_now(newest, policies)
        return Retire(paths=paths, deleted=gone, kept=good) if paths or gone or good else None

    steps: list[Callable[[], object]] = [lambda: log.write_hint(head.number)]
    if decide(head) is not None:
        # If the entry is not created after all, HINT points past the end, which costs a reader time.
        steps = [lambda: log.append(decide, attempt=attempt), lambda: log.write_hint(head.number + 1)]
    steps += [lambda path=path: delete(path) for path in due]  # type: ignore[misc]
    if not log.is_swept:
        steps.append(lambda: _sweep(log))
    parallel_map(lambda step: step(), steps, workers=log.home.transfers)


def _sweep(log: RunLog) -> None:
    with best_effort(
        log.home, "unused folders in checkpoints/ could not be looked for", then="they stay until a later start"
    ):
        try:
            log.is_swept = _delete_garbage(log)
        except RunLogError:  # a damaged entry stays damaged, and each try would read the whole history
            log.is_swept = True
            raise


def _delete_garbage(log: RunLog) -> bool:
    """Delete folders that no entry names and whose base is no longer current: their writers can never commit.

    A process looks for them until it finds none that may become garbage later, and then no more: every listing takes
    longer, the more checkpoints are kept. What comes afterwards is deleted by the next process.

    Returns:
        Whether nothing is left that an earlier attempt has staged.
    """
    # Listed before the head is read: everything listed was staged on a base no newer than the head's.
    quick = RunLog(log.home.with_deadline(_LISTING_SECONDS))  # a store that fails here must not hold up the next save
    folders = set(quick.home.folders("checkpoints"))
    head = log.head()
    if head is None:
        return False
    named = {ref.path for ref in (*head.retained, *head.quarantined)} | {old.path for old in head.retired}
    staged = [folder for folder in folders - named if base_in_folder_name(folder) is not None]
    if staged:
        kept = {each.ref.path for each in kept_for_good(quick, head, blocks="written")}
        staged = [folder for folder in staged if folder not in kept]
    garbage = [folder for folder in staged if base_in_folder_name(folder) != head.base]
    deleted = [discard(log.home, folder, now=head.commits) for folder in garbage]
    return len(staged) == sum(deleted)


def quarantine_damaged_tips(log: RunLog, *, attempt: str, telemetry: Sink, verify_bytes: bool = False) -> Head | None:
    """Quarantine the tip while it is damaged, and return the head.

    A checkpoint that this process reads ahead is not asked about: `restore` compares all its bytes with the manifest.

    If every retained checkpoint is damaged, also of those that are kept for good, none is quarantined. So the run can
    continue once the files are restored from a backup.

    Args:
        attempt: the writer, a uuid4.
        telemetry: receives a warning for each quarantined checkpoint.
        verify_bytes: whether to read all bytes, instead of asking the store for sizes and checksums.

    Returns:
        The head, whose tip is whole or about to be restored and verified; None if there is no run.

    Raises:
        NothingToRestore: every retained checkpoint is damaged, and training had gone beyond step 0.
    """
    while True:
        head = log.head()
        if head is None or head.tip is None:
            return head
        if not verify_bytes and PREFETCHED_CHECKPOINT.looks_whole(log.home, head.tip):
            return head
        reason = find_damage(log.home, head.tip, read_bytes=verify_bytes)
        if reason is None:
            return head
        kept = {each.ref.path: each for each in kept_for_good(log, head)}
        older = sorted((*head.retained[:-1], *(each.ref for each in kept.values())), key=lambda ref: ref.base)
        whole = (ref for ref in reversed(older) if find_damage(log.home, ref, read_bytes=verify_bytes) is None)
        newest_whole = next(whole, None)
        trained = any(ref.step > 0 for ref in (*older, head.tip, *head.quarantined))
        if trained and newest_whole is None:
            raise NothingToRestore(
                f"{log.home.uri}: every retained checkpoint is damaged: "
                f"{listed([ref.path for ref in (*older, head.tip)])}. Restore their files from a backup, or start a "
                f"run of another name ({reason})"
            )
        telemetry.emit(Note(text=f"checkpoint {head.tip.path} is damaged and quarantined: {reason}", warning=True))
        adopted = None if newest_whole is None else kept.get(newest_whole.path)
        if adopted is not None and any(ref.base > adopted.ref.base for ref in head.retained[:-1]):
            adopted = None  # a damaged one comes before it, and is quarantined next
        quarantine(log, head.tip, reason, attempt=attempt, adopted=adopted)


def rewind_run(log: RunLog, fault: BlowUp, *, base: int, spec: RunSpec, telemetry: Sink) -> None:
    """Log a rewind, see `log.appends.rewind`. Only the chief calls it.

    Args:
        base: number of the log entry that the work started from.
        telemetry: receives a note.

    Raises:
        BlowUp: no rewind is left, see `train.rewind_tries`, or no border.
        StaleWriter: another writer moved the tip first.
    """
    entry = rewind(log, fault, base=base, spec=spec, attempt=uuid.uuid4().hex)
    if isinstance(entry.body, Rewind):
        telemetry.emit(
            Note(
                text=f"{fault}. Rewound to step {entry.body.to.step}, skipping {entry.body.skip_batches} global "
                f"batches (rewind {entry.head.rewinds} of at most {spec.train.rewind_tries} in a row)",
                warning=True,
            )
        )
