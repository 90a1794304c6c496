"""Fork a run: copy a committed checkpoint of one run into a new run, with its lineage in the log.

A fork writes its lineage into `fork.json` first, then the copied checkpoint, the origin entry, and the commit. So a
home that a crash left incomplete is recognized as a fork, and init-or-restore does not begin a new run there. Without
an origin entry, any fork may be made there. With one, the copy is there too: the same command commits it, even if the
source run has retired the checkpoint.
"""

import shlex
from contextlib import suppress
from dataclasses import dataclass, replace

from baton.tasks.foundation.checkpoint.selection import retired_while_read
from baton.tasks.foundation.checkpoint.verify import find_damage, read_manifest, verify_checkpoint
from baton.tasks.foundation.contracts.checkpoint import (
    CheckpointManifest,
    CheckpointRef,
    base_in_folder_name,
    checkpoint_folder,
)
from baton.tasks.foundation.contracts.home_files import SAVED_CODE, is_saved_code
from baton.tasks.foundation.contracts.log_entry import Body, Commit, Head, Lineage, Origin, UnfinishedFork
from baton.tasks.foundation.errors import (
    BatonError,
    DamagedCheckpoint,
    FileAlreadyThere,
    FileMissing,
    FileTooLarge,
    ForeignFile,
    InvalidInput,
    RunLogError,
    StaleWriter,
)
from baton.tasks.foundation.log.appends import commit
from baton.tasks.foundation.log.files import UNFINISHED_FORK, entry_path
from baton.tasks.foundation.log.history import restorable
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.model.code_changes import read_saved_code
from baton.tasks.foundation.storage.interface import Storage, discard
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.transfers import parallel_map
from baton.tasks.foundation.text import message


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
    return UnfinishedFork.from_json(data, where=f"{log.home.uri}/{UNFINISHED_FORK}", error=RunLogError).lineage


def find_same_fork(log: RunLog, head: Head | None, existing: Lineage | None, wanted: Lineage) -> Fork | None:
    """The wanted fork, if it is complete; None if it must still be made.

    Args:
        head: its newest head; None if there is no run.
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


# Each is nested in the one after it, and readers of JSON bound the depth. A run that is forked each night has hundreds.
_MOST_GENERATIONS = 32


def fork(root: Storage, name: str, new: str, *, at_step: int | None, attempt: str) -> Fork:
    """Begin the run `new` from a checkpoint that the run `name` retains. Idempotent.

    Identity, environment and skipped batches come along, as they were when the source run was last at that checkpoint.
    So the data order continues as in the source run. The source run is only read.

    Args:
        root: the storage root of both runs.
        new: a run name that is not taken.
        at_step: step of the checkpoint; None for the tip, even if it moves meanwhile.
        attempt: the writer, a uuid4 of this process.

    Returns:
        The complete fork.

    Raises:
        InvalidInput: no retained checkpoint has that step, or it was retired while it was being copied, or `new` is
            taken; nothing is written.
        DamagedCheckpoint: the checkpoint's bytes differ from its manifest; nothing is written.
    """
    runs = _Runs(root=root, source_name=name, target_name=new)
    while True:
        head = runs.source.head()
        ref = None if head is None else _restorable(runs.source, head, at_step)
        if head is None:
            runs.source.require_whole()
        if head is None or ref is None:
            made = _finish_without_source(runs, head, at_step)
            if made is None:
                raise _no_such_step(runs.source, head, at_step)
            return made
        try:
            return _fork(runs, head, ref, attempt=attempt)
        except (DamagedCheckpoint, FileMissing) as fault:
            source = runs.source
            if ref in restorable(source, source.require_head()):
                raise DamagedCheckpoint(str(fault)) from fault
            if at_step is not None:
                raise retired_while_read(source, ref, error=InvalidInput) from fault


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """The source run, and the target run that becomes its fork. Both are below one storage root."""

    root: Storage
    source_name: str
    target_name: str

    @property
    def source(self) -> RunLog:
        return RunLog(self.root.at(self.source_name))

    @property
    def target(self) -> RunLog:
        return RunLog(self.root.at(self.target_name))


def _fork(runs: _Runs, head: Head, ref: CheckpointRef, *, attempt: str) -> Fork:
    """Fork a checkpoint that `head` retains.

    Raises:
        InvalidInput: the name is taken.
        DamagedCheckpoint, FileMissing: its files are damaged or gone; nothing of the fork is left.
    """
    target = runs.target
    origin, lineage = _origin(runs.source, head, ref)
    newest, existing = read_head_and_lineage(target)
    aim = _target(runs.source, head)
    made = find_same_fork(target, newest, existing, lineage) or _commit_complete_copy(target, newest, lineage, aim)
    if made is not None:
        return made
    manifest = read_manifest(runs.source.home, ref)
    base = 0 if newest is None else newest.base  # 0 is the origin entry, which is written later
    folder = checkpoint_folder(step=ref.step, base=base, attempt=attempt)
    if newest is None:
        target.home.write(UNFINISHED_FORK, UnfinishedFork(lineage=lineage).to_json())

    def decide(newest: Head | None) -> Body | None:
        return origin if newest is None else None

    try:
        staged = _copy(runs, ref, manifest.model_copy(update={"base": base, "attempt": attempt}), folder=folder)
        _copy_code(runs, origin)
        target.append(decide, attempt=attempt)
        made = find_same_fork(target, *read_head_and_lineage(target), lineage)
        if made is None:
            # Several processes may stage on a base without a tip: the first commit wins.
            entry = commit(target, _body(staged, aim))
            made = Fork(lineage=lineage, head=entry.head, already_there=False)
        elif made.head.tip == staged:  # another process committed this copy
            made = replace(made, already_there=False)
    except (StaleWriter, FileMissing, DamagedCheckpoint):
        # Another process may have made the same fork, trained it, and deleted this copy.
        made = find_same_fork(target, *read_head_and_lineage(target), lineage)
        if made is None:
            _withdraw(target, folder)
            raise
    except BatonError as fault:
        # Another process has taken the name, or a disk is full. Once the log has begun, the copy is needed to finish.
        if isinstance(fault, InvalidInput) or not _has_begun(target):
            _withdraw(target, folder)
        raise
    discard(target.home, UNFINISHED_FORK)
    return made


def _has_begun(log: RunLog) -> bool:
    """Whether the log may have an entry, perhaps one whose answer was lost."""
    try:
        return log.home.exists(entry_path(0))
    except BatonError:
        return True


def _withdraw(target: RunLog, folder: str) -> None:
    discard(target.home, folder)
    discard(target.home, UNFINISHED_FORK)
    if isinstance(target.home, LocalStorage):  # other stores have no folders
        target.home.remove_empty_folders()


def _finish_without_source(runs: _Runs, source: Head | None, at_step: int | None) -> Fork | None:
    """The fork that was made or begun, of a checkpoint that the source run has retired since."""
    target = runs.target
    head, lineage = read_head_and_lineage(target)
    if lineage is None or (lineage.home, lineage.step) != (runs.source.home.uri, at_step):
        return None
    aim = None if source is None else _target(runs.source, source)
    made = complete_fork(head, lineage) or _commit_complete_copy(target, head, lineage, aim)
    if made is None:
        raise InvalidInput(
            message(
                f"{target.home.uri} holds no whole copy of step {at_step}, which {runs.source.home.uri} has retired",
                hints=[f"take another name and a retained step, or remove {target.home.uri}; nothing was trained"],
            )
        )
    return made


def _commit_complete_copy(log: RunLog, head: Head | None, lineage: Lineage, aim: int | None) -> Fork | None:
    """Commit a complete copy that a process left when it died after writing the origin entry."""
    if head is None or head.tip is not None:
        return None
    damaged = {ref.path for ref in head.quarantined}
    for folder in sorted(log.home.folders("checkpoints")):
        if folder in damaged or base_in_folder_name(folder) != head.base:
            continue
        where = f"{folder}/manifest.json"
        try:
            data = log.home.read(where)
            manifest = CheckpointManifest.from_json(data, where=f"{log.home.uri}/{where}", error=DamagedCheckpoint)
        except (FileMissing, FileTooLarge, DamagedCheckpoint):
            continue
        staged = CheckpointRef.of(manifest, data)
        if (staged.step, staged.state_digest) != (lineage.step, lineage.state_digest) or find_damage(log.home, staged):
            continue
        try:
            entry = commit(log, _body(staged, aim))
        except StaleWriter:
            return find_same_fork(log, *read_head_and_lineage(log), lineage)
        discard(log.home, UNFINISHED_FORK)
        # The process that copied it may still be running, and reports that it made the fork.
        return Fork(lineage=lineage, head=entry.head, already_there=True)
    return None


def _copy(runs: _Runs, ref: CheckpointRef, manifest: CheckpointManifest, *, folder: str) -> CheckpointRef:
    """Copy the files of `ref` into a folder of the target run, then write their new manifest, then verify all.

    Raises:
        DamagedCheckpoint: files of `ref`, or the copies, differ from the manifest.
    """
    source, target = f"{runs.source_name}/{ref.path}", f"{runs.target_name}/{folder}"
    parallel_map(
        lambda file: runs.root.copy(f"{source}/{file.name}", f"{target}/{file.name}"),
        manifest.files,
        workers=runs.root.transfers,
    )
    data = manifest.to_json()
    runs.root.create(f"{target}/manifest.json", data)
    copy = CheckpointRef.of(manifest, data)
    try:
        # Also on a local disk, where both have the same files: reading them once is what most of a fork takes.
        verify_checkpoint(runs.root.at(runs.target_name), copy)
    except DamagedCheckpoint:
        verify_checkpoint(runs.source.home, ref)  # the error names the file that was damaged before
        raise
    return copy


def _copy_code(runs: _Runs, origin: Origin) -> None:
    """Copy the run file and the code that the origin names, if the source run has them.

    Code of another user stays where it is: the copy would be this user's, and so run unasked. What is damaged is copied
    as it is, with a warning: the fork trains without it.
    """
    path = origin.identity.get(SAVED_CODE)
    if not is_saved_code(path):
        return
    read_saved_code(runs.source.home, path)
    with suppress(FileMissing, FileAlreadyThere):
        try:
            runs.target.home.create(str(path), runs.source.home.read_own(str(path)))
        except ForeignFile:
            if runs.source.home.local_path(str(path)) is None:
                runs.root.copy(f"{runs.source_name}/{path}", f"{runs.target_name}/{path}")


def _target(source: RunLog, head: Head) -> int | None:
    """The step that the source run is trained to, so that the fork's log says one too; None if it is not known."""
    totals = source.entry(head.number).totals
    return None if totals is None else totals.target


def _body(staged: CheckpointRef, target: int | None) -> Commit:
    return Commit(checkpoint=staged, parent=None, exit_reason="forked", target=target)


def _origin(source: RunLog, head: Head, ref: CheckpointRef) -> tuple[Origin, Lineage]:
    """The origin entry and the lineage of a fork of `ref`.

    The run may have been at the checkpoint more than once: after a rewind to it, it skips batches from there on. The
    origin has the newest such state, the lineage the entry that committed the checkpoint.
    """
    last_there: Head | None = None
    for number in range(head.number, -1, -1):
        entry = source.entry(number)
        if last_there is None and entry.head.tip == ref:
            last_there = entry.head
        if last_there is not None and isinstance(entry.body, Commit) and entry.body.checkpoint == ref:
            first = source.entry(0).body
            before = first.forked_from if isinstance(first, Origin) else None
            lineage = Lineage(
                home=source.home.uri,
                path=ref.path,
                step=ref.step,
                state_digest=ref.state_digest,
                entry=number,
                parent=None if before is None else before.nearest(_MOST_GENERATIONS - 1),
            )
            origin = Origin(
                forked_from=lineage,
                skipped_batches=last_there.skipped_batches,
                identity=dict(last_there.identity),
                environment=last_there.environment,
            )
            return origin, lineage
    raise RunLogError(f"{source.home.uri}: no entry of the log committed {ref.path}, although it is retained")


def _restorable(source: RunLog, head: Head, at_step: int | None) -> CheckpointRef | None:
    if at_step is None:
        return head.tip
    of_head = next((ref for ref in reversed(head.retained) if ref.step == at_step), None)
    return of_head or next((ref for ref in reversed(restorable(source, head)) if ref.step == at_step), None)


def _no_such_step(source: RunLog, head: Head | None, at_step: int | None) -> InvalidInput:
    steps = ", ".join(str(step) for step in sorted({ref.step for ref in restorable(source, head)})) if head else ""
    if not steps:
        return InvalidInput(f"{source.home.uri} has no checkpoint to fork; train it first")
    return InvalidInput(
        f"--at-step {at_step}: {source.home.uri} retains no checkpoint of that step; it retains steps {steps}"
    )
