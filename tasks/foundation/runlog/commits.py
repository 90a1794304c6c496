"""The appends that move the tip: commit, quarantine and rewind; and the one that says that it moves no more."""

from tasks.foundation.checkpoint.verify import damage
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Body, Commit, Entry, Finish, Head, Quarantine, Rewind
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import BlowUp, NothingToRestore, StaleWriter
from tasks.foundation.messages import listed
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.telemetry.events import Note, Sink


def commit(log: RunLog, body: Commit) -> Entry:
    """Make a staged checkpoint the tip, if nothing moved the tip since the work on it began.

    Saying it twice is harmless: a commit that is in the log already is returned as it stands there.

    Raises:
        StaleWriter: another writer moved the tip first.
    """
    staged = body.checkpoint

    def decide(head: Head | None) -> Body:
        if head is None or head.base != staged.base:
            raise stale_writer(log, head, step=staged.step, base=staged.base)
        return body

    try:
        entry = log.append(decide, attempt=staged.attempt)
    except StaleWriter:
        # Perhaps it was this very commit that moved the tip, and its answer got lost.
        entry = _own_earlier_commit(log, log.head(), staged)
        if entry is None:
            raise
    if entry is None:
        raise AssertionError("a commit always has something to say")
    return entry


def stale_writer(log: RunLog, head: Head | None, *, step: int, base: int) -> StaleWriter:
    """What the loser is told: work on `step` began at log entry `base`, and `head` is not on it any more."""
    return StaleWriter(
        f"{log.home.uri}: step {step} was trained on top of log entry {base}, but the tip has moved "
        f"since{_by_whom(log, head)}; this work is not committed. Another process trains the same run: stop one of "
        "them, or run again to continue from the newest commit"
    )


def sound_tip(log: RunLog, *, attempt: str, telemetry: Sink, suspicious: bool = False) -> Head | None:
    """The head, once its tip was found whole; damaged tips are quarantined on the way.

    Only where an older one is whole: if all are damaged, none is quarantined, so that a backup of their files is all
    that is needed to go on.

    Raises:
        NothingToRestore: every retained checkpoint is damaged, and training had gone beyond step 0.
    """
    while True:
        head = log.head()
        if head is None or head.tip is None:
            return head
        reason = damage(log.home, head.tip, read=suspicious)
        if reason is None:
            return head
        older = reversed(head.retained[:-1])
        trained = any(ref.step > 0 for ref in (*head.retained, *head.quarantined))
        if trained and all(damage(log.home, ref, read=suspicious) is not None for ref in older):
            raise NothingToRestore(
                f"{log.home.uri}: every retained checkpoint is damaged: "
                f"{listed([ref.path for ref in head.retained])}. Restore their files from a backup, or start a run "
                f"of another name ({reason})"
            )
        telemetry.emit(Note(text=f"checkpoint {head.tip.path} is damaged and quarantined: {reason}", warning=True))
        quarantine(log, head.tip, reason, attempt=attempt)


def quarantine(log: RunLog, tip: CheckpointRef, reason: str, *, attempt: str) -> None:
    """Take a damaged tip out of use; nothing happens if it is the tip no longer."""

    def decide(head: Head | None) -> Body | None:
        if head is None or head.tip != tip:
            return None
        return Quarantine(path=tip.path, reason=reason)

    log.append(decide, attempt=attempt)


def rewind(log: RunLog, fault: BlowUp, *, base: int, spec: RunSpec, attempt: str) -> Entry:
    """Go back to a commit on a segment border from before a blow-up, and skip the batches that led to it.

    Those between the border and the blow-up are skipped, and `train.rewind_skip_batches` from there on. Each further
    try that has not got past the blow-up goes one border further back, as far as they are retained. After the restarts
    of PaLM (Chowdhery et al., 2022, section 5.1).

    Args:
        log: the run's.
        fault: what happened, and at which step.
        base: number of the log entry that the work started from.
        spec: the run file.
        attempt: who works.

    Raises:
        BlowUp: `fault`, with what was tried, when `train.rewind_tries` are used up or no border is left.
        StaleWriter: another writer moved the tip first.
    """

    def decide(head: Head | None) -> Body:
        if head is None or head.base != base:
            raise stale_writer(log, head, step=fault.step, base=base)
        if head.rewinds >= spec.train.rewind_tries:
            tried = f"{head.rewinds} rewinds in a row have not got past it (train.rewind_tries)"
            raise type(fault)(f"{fault}; {tried}", step=fault.step)
        borders = [ref for ref in head.retained if ref.path in head.borders and ref.step < fault.step]
        if not borders:
            raise type(fault)(f"{fault}; no checkpoint on a segment border before it is retained", step=fault.step)
        to = borders[-1] if head.rewinds == 0 else borders[-2:][0]
        return Rewind(
            to=to,
            blown_up_at=fault.step,
            reason=str(fault),
            skip_batches=fault.step - to.step + spec.train.rewind_skip_batches,
        )

    entry = log.append(decide, attempt=attempt)
    if entry is None:
        raise AssertionError("a rewind always has something to say")
    return entry


def finish(log: RunLog, tip: CheckpointRef, *, base: int, reason: str, attempt: str) -> None:
    """End a run with its tip, before its target; nothing happens if that is in the log already.

    Args:
        log: the run's.
        tip: the tip.
        base: number of the log entry that the work started from.
        reason: who decided it, and when.
        attempt: who works.

    Raises:
        StaleWriter: another writer moved the tip first.
    """

    def decide(head: Head | None) -> Body | None:
        if head is None or head.base != base:
            raise stale_writer(log, head, step=tip.step, base=base)
        return Finish(checkpoint=tip, reason=reason) if head.finished is None else None

    log.append(decide, attempt=attempt)


def evaluation_due(head: Head, spec: RunSpec) -> bool:
    """Whether the tip is to be evaluated: at absolute steps and at the end, once."""
    tip = head.tip
    if tip is None or tip.step == 0 or spec.data.validation_fraction == 0 or tip.path in head.evaluated:
        return False
    every = spec.evaluate.every_steps
    at_the_end = tip.step == spec.train.steps or head.finished is not None
    return at_the_end or (every is not None and tip.step % every == 0)


def _own_earlier_commit(log: RunLog, head: Head | None, staged: CheckpointRef) -> Entry | None:
    """Our own commit from an earlier try whose answer got lost: same attempt, base, path and manifest digest."""
    newest = -1 if head is None else head.number
    for number in range(staged.base + 1, newest + 1):
        entry = log.entry(number)
        if isinstance(entry.body, Commit) and entry.body.checkpoint == staged:
            return entry
        if entry.head.base == number:
            break  # somebody else moved the tip away from our base; ours cannot come later
    return None


def _by_whom(log: RunLog, head: Head | None) -> str:
    if head is None or head.base == 0:
        return ""
    mover = log.entry(head.base)
    return f" (entry {mover.number}, {mover.body.kind}, attempt {mover.attempt[:8]}, {mover.time})"
