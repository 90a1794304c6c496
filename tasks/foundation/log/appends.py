"""The appends that move the tip (commit, quarantine, rewind), the one that ends a run, and what is due at a tip.

Each decides on the newest state, so that it is void if another writer moved the tip first. Several hosts share one log:
only the chief appends, and broadcasts the numbers of its entries.
"""

from collections.abc import Sequence

from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import (
    Body,
    Commit,
    Entry,
    Finish,
    Head,
    LoggedValues,
    Quarantine,
    Retained,
    Rewind,
)
from baton.tasks.foundation.contracts.run_spec import RunSpec, callbacks_act_at_evaluations, evaluations
from baton.tasks.foundation.errors import BlowUp, StaleWriter
from baton.tasks.foundation.log.history import evaluation_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.machine.collectives import Hosts


def commit(log: RunLog, body: Commit) -> Entry:
    """Make a staged checkpoint the tip, if nothing has moved the tip since the work on it began.

    Idempotent: a commit that is in the log already is returned as it is there.

    Args:
        body: the entry to append; it names the checkpoint. What this process has read whole is added; metadata that
            the log has already is left out.

    Returns:
        The entry in the log.

    Raises:
        StaleWriter: another writer moved the tip first.
    """
    staged = body.checkpoint

    def decide(head: Head | None) -> Body:
        if head is None or head.base != staged.base:
            raise stale_writer(log, head, step=staged.step, base=staged.base)
        newest = log.newest_seen()
        known = None if newest is None or newest.totals is None else newest.totals.metadata
        metadata = None if body.metadata == known else body.metadata
        return body.model_copy(update={"read": log.reads_to_log(head, body.read), "metadata": metadata})

    try:
        entry = log.append(decide, attempt=staged.attempt)
    except StaleWriter:
        # This commit itself may have moved the tip, in an earlier try whose response was lost.
        entry = _own_earlier_commit(log, log.head(), staged)
        if entry is None:
            raise
    if entry is None:
        raise AssertionError("`decide` returned no body for a commit")
    return entry


def log_values(log: RunLog, checkpoint: CheckpointRef, logged: Sequence[LoggedValues], *, attempt: str) -> None:
    """Log what callbacks added to the logs of an evaluation, where no commit follows: its entry is repeated with it.

    Args:
        checkpoint: which was evaluated.
        logged: the values; none at all appends nothing, nor do those that it has.
        attempt: the writer, a uuid4.
    """
    values = {name: value for each in logged for name, value in each.values.items()}

    def decide(head: Head | None) -> Body | None:
        known = None if head is None else evaluation_of(log, head, checkpoint.path)
        if known is None or known.logged == values:
            return None
        return known.model_copy(update={"logged": values, "read": ()})

    if values:
        log.append(decide, attempt=attempt)


def stale_writer(log: RunLog, head: Head | None, *, step: int, base: int) -> StaleWriter:
    """The error of a writer whose base is no longer current.

    Args:
        step: what the writer wanted to commit.
        base: number of the log entry that its work started from.
    """
    return StaleWriter(
        f"{log.home.uri}: step {step} was trained on top of log entry {base}, but the tip has moved "
        f"since{_mover(log, head)}; this work is not committed. Another process trains the same run: stop one of "
        "them, or run again to continue from the newest commit"
    )


def quarantine(log: RunLog, tip: CheckpointRef, reason: str, *, attempt: str, adopted: Retained | None = None) -> None:
    """Take a damaged tip out of use; append nothing if it is no longer the tip.

    Args:
        tip: the damaged checkpoint.
        reason: what is wrong with it.
        attempt: the writer, a uuid4.
        adopted: one that was kept for good, which becomes the tip; None: the one before it in the head does.
    """

    def decide(head: Head | None) -> Body | None:
        if head is None or head.tip != tip:
            return None
        return Quarantine(path=tip.path, reason=reason, adopted=adopted)

    log.append(decide, attempt=attempt)


def quarantine_older(log: RunLog, ref: CheckpointRef, reason: str, *, attempt: str) -> bool:
    """Take a damaged checkpoint other than the tip out of use, which disturbs no work on the tip.

    Returns:
        Whether it is out of use now; False if it is the tip, or was retired meanwhile.
    """

    def decide(head: Head | None) -> Body | None:
        if head is None or head.tip == ref or ref not in head.retained:
            return None
        return Quarantine(path=ref.path, reason=reason)

    return log.append(decide, attempt=attempt) is not None


def rewind(log: RunLog, fault: BlowUp, *, base: int, spec: RunSpec, attempt: str) -> Entry:
    """Go back to a commit on a segment border before a blow-up, and skip the batches that led to it.

    The batches between the border and the blow-up are skipped, and `train.rewind_skip_batches` after it. If training
    does not get past the blow-up, each further try goes back one more border, as far as they are retained. After the
    restarts of PaLM (Chowdhery et al., 2022, section 5.1).

    Args:
        base: number of the log entry that the work started from.
        attempt: the writer, a uuid4.

    Returns:
        The entry in the log.

    Raises:
        BlowUp: `fault` and what was tried, if `train.rewind_tries` are used up or no border is left.
        StaleWriter: another writer moved the tip first.
    """

    def decide(head: Head | None) -> Body:
        if head is None or head.base != base:
            raise stale_writer(log, head, step=fault.step, base=base)
        if head.rewinds >= spec.train.rewind_tries:
            rewinds = "1 rewind has" if head.rewinds == 1 else f"{head.rewinds} rewinds in a row have"
            tried = f"{rewinds} not got past it (train.rewind_tries)"
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
        raise AssertionError("`decide` returned no body for a rewind")
    return entry


def finish(log: RunLog, tip: CheckpointRef, *, base: int, reason: str, attempt: str) -> None:
    """End a run at its tip, before its target; append nothing if the log already has this end.

    Args:
        base: number of the log entry that the work started from.
        reason: what ended it, and when.
        attempt: the writer, a uuid4.

    Raises:
        StaleWriter: another writer moved the tip first.
    """

    def decide(head: Head | None) -> Body | None:
        if head is None or head.base != base:
            raise stale_writer(log, head, step=tip.step, base=base)
        return Finish(checkpoint=tip, reason=reason) if head.finished is None else None

    log.append(decide, attempt=attempt)


def evaluation_due(head: Head, spec: RunSpec) -> bool:
    """Whether the tip must be evaluated: once at each of its absolute steps, and once at the end."""
    tip = head.tip
    if tip is None or tip.step == 0 or not spec.data.has_validation or tip.path in head.evaluated:
        return False
    period = evaluations(spec)
    return _at_the_end(head, spec) or (period is not None and period.ends_at(tip.step))


def is_test_due(head: Head, spec: RunSpec) -> bool:
    """Whether the tip must be evaluated on the test set: once, at the end of the run."""
    tip = head.tip
    if tip is None or tip.step == 0 or spec.data.test is None or tip.path in head.tested:
        return False
    return _at_the_end(head, spec)


def _at_the_end(head: Head, spec: RunSpec) -> bool:
    """Whether the run ends at its tip: at its target, or earlier because of its callbacks."""
    return head.finished is not None or (head.tip is not None and head.tip.step == spec.train.target)


def overdue_evaluation(head: Head, spec: RunSpec) -> CheckpointRef | None:
    """The checkpoint before the tip whose evaluation beside the training has not been logged; None if there is none.

    Evaluations are logged in the order of steps, so it is the newest one that was due before the tip.
    """
    period = evaluations(spec)
    if head.tip is None or period is None or not evaluates_beside(spec):
        return None
    tip = head.tip
    due = [ref for ref in head.retained if 0 < ref.step < tip.step and period.ends_at(ref.step)]
    return due[-1] if due and due[-1].path not in head.evaluated else None


def evaluates_beside(spec: RunSpec) -> bool:
    """Whether training goes on while another process evaluates. Callbacks, which need the metrics, wait for them."""
    needs_none = spec.train.callbacks is None or not callbacks_act_at_evaluations(spec)
    return spec.data.has_validation and spec.stages.evaluate.deployment is not None and needs_none


def _own_earlier_commit(log: RunLog, head: Head | None, staged: CheckpointRef) -> Entry | None:
    """This writer's own commit, from a try whose response was lost: same attempt, base, path and manifest digest."""
    newest = -1 if head is None else head.number
    for number in range(staged.base + 1, newest + 1):
        entry = log.entry(number)
        if isinstance(entry.body, Commit) and entry.body.checkpoint == staged:
            return entry
        if entry.head.base == number:
            break  # another writer moved the tip off this base, so no later entry can be ours
    return None


def _mover(log: RunLog, head: Head | None) -> str:
    """Which entry moved the tip, for a message."""
    if head is None or head.base == 0:
        return ""
    entry = log.entry(head.base)
    return f" (entry {entry.number}, {entry.body.kind}, attempt {entry.attempt[:8]}, {entry.time})"


def broadcast_head(log: RunLog, head: Head | None, hosts: Hosts) -> Head | None:
    """Return the chief's head on every host. A collective: all hosts must call it in the same order.

    Args:
        head: the head to broadcast; ignored on hosts other than the chief.
    """
    number = hosts.broadcast_from_chief(-1 if head is None else head.number)
    if hosts.is_chief:
        return head
    return None if number < 0 else log.entry(number).head


def require_broadcast_head(log: RunLog, head: Head | None, hosts: Hosts) -> Head:
    """Return `broadcast_head` of a run that has started."""
    found = broadcast_head(log, head, hosts)
    if found is None:
        raise AssertionError("the chief must have started the run")
    return found
