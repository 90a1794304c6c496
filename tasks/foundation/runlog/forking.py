"""A new run from a committed checkpoint of another: always a copy, with its lineage in the log.

The origin, which names the lineage, is the first thing that is written. So a home that a crash left half-made is known
for a fork: init-or-restore does not begin it at step 0, and the same command said again finishes it.
"""

import shlex
from dataclasses import dataclass

from tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, checkpoint_folder
from tasks.foundation.contracts.log_entry import Body, Commit, Head, Lineage, Origin
from tasks.foundation.errors import DamagedCheckpoint, FileMissing, InvalidInput, RunLogError, StaleWriter
from tasks.foundation.runlog.committing import commit
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.verifying import check, manifest_digest
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.copying import side_by_side


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A fork that stands: where from, the state of its log, and whether it had been there before."""

    lineage: Lineage
    head: Head
    already_there: bool


def fork(root: Storage, name: str, new: str, *, at_step: int | None, attempt: str) -> Fork:
    """Begin the run `new` from a checkpoint that the run `name` retains. Saying it twice is harmless.

    What else the run was at that checkpoint comes along: identity, environment and the batches skipped, as recorded
    when it last stood there. So the data order goes on as in the other run, which is only read.

    Args:
        root: the storage root of both.
        name: the run to fork.
        new: a run name that is not taken.
        at_step: step of the checkpoint; None for the tip.
        attempt: who works; a uuid4 of this process.

    Raises:
        InvalidInput: no retained checkpoint has that step, or `new` is taken; nothing is written.
        DamagedCheckpoint: the checkpoint's bytes differ from its manifest; nothing is written.
    """
    source, target = RunLog(root.at(name)), RunLog(root.at(new))
    head = source.head()
    ref = None if head is None else _retained(head, at_step)
    there, made_from = _look(target)
    if head is None or ref is None:
        made = _standing(there, made_from)
        if made is not None and (made.lineage.home, made.lineage.step) == (source.home.uri, at_step):
            return made  # the other run has retired it since
        raise _no_such_step(source, head, at_step)
    origin, lineage = _origin(source, head, ref)
    made = _same_fork(target, there, made_from, lineage)
    if made is not None:
        return made
    manifest = check(source.home, ref)

    def decide(newest: Head | None) -> Body | None:
        return origin if newest is None else None

    target.append(decide, attempt=attempt)
    there, made_from = _look(target)
    made = _same_fork(target, there, made_from, lineage)
    if made is not None:
        return made
    if there is None:
        raise RunLogError(f"{target.home.uri}: the log was there and is gone; see whether its disk is still mounted")
    try:
        # The base of the head that was seen to have no tip: who commits first wins.
        staged = _copy(root, (name, new), ref, manifest, base=there.base, attempt=attempt)
        entry = commit(target, Commit(checkpoint=staged, parent=None, exit_reason="forked"))
    except (StaleWriter, FileMissing, DamagedCheckpoint):
        # Perhaps another process made the same fork, trained on, and swept our copy up.
        made = _same_fork(target, *_look(target), lineage)
        if made is None:
            raise
        return made
    return Fork(lineage=lineage, head=entry.head, already_there=False)


def refuse_unfinished_fork(log: RunLog) -> None:
    """A run without a tip begins at step 0, but not if it was to begin from another run's checkpoint.

    Raises:
        InvalidInput: it was, naming the command that finishes it.
    """
    _, lineage = _look(log)
    if lineage is not None:
        raise InvalidInput(
            f"{log.home.uri} is a fork that has no checkpoint yet, or none that is whole; copy it again: "
            f"{_command(log, lineage)}"
        )


def _same_fork(log: RunLog, head: Head | None, there: Lineage | None, wanted: Lineage) -> Fork | None:
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
    return _standing(head, there)


def _standing(head: Head | None, lineage: Lineage | None) -> Fork | None:
    if head is None or head.tip is None or lineage is None:
        return None
    return Fork(lineage=lineage, head=head, already_there=True)


def _copy(
    root: Storage,
    names: tuple[str, str],
    ref: CheckpointRef,
    manifest: CheckpointManifest,
    *,
    base: int,
    attempt: str,
) -> CheckpointRef:
    """Files, then the manifest, which says whose they are now; read again before anybody relies on them."""
    name, new = names
    folder = checkpoint_folder(step=ref.step, base=base, attempt=attempt)
    side_by_side(
        lambda file: root.copy(f"{name}/{ref.path}/{file.name}", f"{new}/{folder}/{file.name}"),
        manifest.files,
        workers=root.transfers,
    )
    data = manifest.model_copy(update={"base": base, "attempt": attempt}).to_json()
    root.create(f"{new}/{folder}/manifest.json", data)
    copy = CheckpointRef(
        path=folder,
        step=ref.step,
        base=base,
        attempt=attempt,
        state_digest=ref.state_digest,
        manifest_digest=manifest_digest(data),
        size=sum(file.size for file in manifest.files) + len(data),
    )
    check(root.at(new), copy)
    return copy


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


def _look(log: RunLog) -> tuple[Head | None, Lineage | None]:
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
