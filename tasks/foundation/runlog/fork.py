"""A new run from a committed checkpoint of another: always a copy, with its lineage in the log.

Half-made homes, and what is done about them: see forked.py.
"""

from dataclasses import replace

from tasks.foundation.checkpoint.selection import retired_meanwhile
from tasks.foundation.checkpoint.verify import check, damage, manifest_digest
from tasks.foundation.contracts.checkpoint import (
    CheckpointManifest,
    CheckpointRef,
    base_in_folder_name,
    checkpoint_folder,
)
from tasks.foundation.contracts.log_entry import Body, Commit, Head, Lineage, Origin
from tasks.foundation.errors import DamagedCheckpoint, FileMissing, InvalidInput, RunLogError, StaleWriter
from tasks.foundation.messages import message
from tasks.foundation.runlog.commits import commit
from tasks.foundation.runlog.fork_status import Fork, look, same_fork, standing
from tasks.foundation.runlog.log import UNFINISHED_FORK, RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.best_effort_delete import discard
from tasks.foundation.storage.download import side_by_side


def fork(root: Storage, name: str, new: str, *, at_step: int | None, attempt: str) -> Fork:
    """Begin the run `new` from a checkpoint that the run `name` retains. Saying it twice is harmless.

    What else the run was at that checkpoint comes along: identity, environment and the batches skipped, as recorded
    when it last stood there. So the data order goes on as in the other run, which is only read.

    Args:
        root: the storage root of both.
        name: the run to fork.
        new: a run name that is not taken.
        at_step: step of the checkpoint; None for the tip, also where that moves meanwhile.
        attempt: who works; a uuid4 of this process.

    Raises:
        InvalidInput: no retained checkpoint has that step, also because it was retired meanwhile, or `new` is taken;
            nothing is written.
        DamagedCheckpoint: the checkpoint's bytes differ from its manifest; nothing is written.
    """
    source, target = RunLog(root.at(name)), RunLog(root.at(new))
    while True:
        head = source.head()
        ref = None if head is None else _retained(head, at_step)
        if head is None or ref is None:
            made = _without_its_source(source, target, at_step)
            if made is None:
                raise _no_such_step(source, head, at_step)
            return made
        try:
            return _fork(root, (name, new), head, ref, attempt=attempt)
        except (DamagedCheckpoint, FileMissing) as fault:
            head = source.require_head()
            if ref in head.retained:
                raise
            if at_step is not None:
                raise retired_meanwhile(source.home, head, ref, error=InvalidInput) from fault


def _fork(root: Storage, names: tuple[str, str], head: Head, ref: CheckpointRef, *, attempt: str) -> Fork:
    """Fork a checkpoint that `head` retains.

    Raises:
        InvalidInput: the name is taken.
        DamagedCheckpoint, FileMissing: its files are not what they were, or gone; nothing of the fork is left.
    """
    source, target = (RunLog(root.at(name)) for name in names)
    origin, lineage = _origin(source, head, ref)
    there, made_from = look(target)
    made = same_fork(target, there, made_from, lineage) or _finish(target, there, lineage)
    if made is not None:
        return made
    manifest = check(source.home, ref)
    base = 0 if there is None else there.base  # of the origin, if it is still to be written
    folder = checkpoint_folder(step=ref.step, base=base, attempt=attempt)
    if there is None:
        target.home.write(UNFINISHED_FORK, lineage.to_json())

    def decide(newest: Head | None) -> Body | None:
        return origin if newest is None else None

    try:
        staged = _copy(root, names, ref, manifest, folder=folder, base=base, attempt=attempt)
        target.append(decide, attempt=attempt)
        made = same_fork(target, *look(target), lineage)
        if made is None:
            # The base of a head that has no tip: who commits first wins.
            entry = commit(target, _commit(staged))
            made = Fork(lineage=lineage, head=entry.head, already_there=False)
        elif made.head.tip == staged:  # another process has committed this copy
            made = replace(made, already_there=False)
    except (StaleWriter, FileMissing, DamagedCheckpoint):
        # Perhaps another process made the same fork, trained on, and swept our copy up.
        made = same_fork(target, *look(target), lineage)
        if made is None:
            _withdraw(target, folder)
            raise
    except InvalidInput:  # another process has taken the name
        _withdraw(target, folder)
        raise
    discard(target.home, UNFINISHED_FORK)
    return made


def _withdraw(target: RunLog, folder: str) -> None:
    discard(target.home, folder)
    discard(target.home, UNFINISHED_FORK)


def _without_its_source(source: RunLog, target: RunLog, at_step: int | None) -> Fork | None:
    """The fork that was made, or begun, of a step that the other run has retired since."""
    there, made_from = look(target)
    if made_from is None or (made_from.home, made_from.step) != (source.home.uri, at_step):
        return None
    made = standing(there, made_from) or _finish(target, there, made_from)
    if made is None:
        raise InvalidInput(
            message(
                f"{target.home.uri} holds no whole copy of step {at_step}, which {source.home.uri} has retired since",
                hints=[f"take another name and a step that is kept, or remove {target.home.uri}: nothing was trained"],
            )
        )
    return made


def _finish(log: RunLog, head: Head | None, lineage: Lineage) -> Fork | None:
    """Commit the copy that whoever died after writing the origin has left, if it is whole."""
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
        except (FileMissing, DamagedCheckpoint):
            continue
        staged = _ref(folder, manifest, data)
        if (staged.step, staged.state_digest) != (lineage.step, lineage.state_digest) or damage(log.home, staged):
            continue
        try:
            entry = commit(log, _commit(staged))
        except StaleWriter:
            return same_fork(log, *look(log), lineage)
        discard(log.home, UNFINISHED_FORK)
        # Its maker may still be at work, and is the one that says that it made it.
        return Fork(lineage=lineage, head=entry.head, already_there=True)
    return None


def _copy(
    root: Storage,
    names: tuple[str, str],
    ref: CheckpointRef,
    manifest: CheckpointManifest,
    *,
    folder: str,
    base: int,
    attempt: str,
) -> CheckpointRef:
    """Files, then the manifest, which says whose they are now; read again before anybody relies on them."""
    name, new = names
    side_by_side(
        lambda file: root.copy(f"{name}/{ref.path}/{file.name}", f"{new}/{folder}/{file.name}"),
        manifest.files,
        workers=root.transfers,
    )
    mine = manifest.model_copy(update={"base": base, "attempt": attempt})
    data = mine.to_json()
    root.create(f"{new}/{folder}/manifest.json", data)
    copy = _ref(folder, mine, data)
    check(root.at(new), copy)
    return copy


def _ref(folder: str, manifest: CheckpointManifest, data: bytes) -> CheckpointRef:
    return CheckpointRef(
        path=folder,
        step=manifest.step,
        base=manifest.base,
        attempt=manifest.attempt,
        state_digest=manifest.state_digest,
        manifest_digest=manifest_digest(data),
        size=sum(file.size for file in manifest.files) + len(data),
    )


def _commit(staged: CheckpointRef) -> Commit:
    return Commit(checkpoint=staged, parent=None, exit_reason="forked")


def _origin(source: RunLog, head: Head, ref: CheckpointRef) -> tuple[Origin, Lineage]:
    """The run as it was when it last stood at a checkpoint: a rewind to it, say, skips batches from there on."""
    standing: Head | None = None
    for number in range(head.number, -1, -1):
        entry = source.entry(number)
        if standing is None and entry.head.tip == ref:
            standing = entry.head
        if standing is not None and isinstance(entry.body, Commit) and entry.body.checkpoint == ref:
            lineage = Lineage(
                home=source.home.uri, path=ref.path, step=ref.step, state_digest=ref.state_digest, entry=number
            )
            origin = Origin(
                forked_from=lineage,
                skipped_batches=standing.skipped_batches,
                identity=standing.identity,
                environment=standing.environment,
            )
            return origin, lineage
    raise RunLogError(f"{source.home.uri}: no entry of the log committed {ref.path}, though it is retained")


def _retained(head: Head, at_step: int | None) -> CheckpointRef | None:
    if at_step is None:
        return head.tip
    return next((ref for ref in reversed(head.retained) if ref.step == at_step), None)


def _no_such_step(source: RunLog, head: Head | None, at_step: int | None) -> InvalidInput:
    steps = ", ".join(str(step) for step in sorted({ref.step for ref in head.retained})) if head else ""
    if not steps:
        return InvalidInput(f"{source.home.uri} has no checkpoint to fork; train it first")
    return InvalidInput(
        f"--at-step {at_step}: {source.home.uri} keeps no checkpoint of that step; it keeps those of steps {steps}"
    )
