"""Compares a run file and environment with the run's log: refuses changes, or logs them."""

from collections.abc import Callable, Sequence
from typing import Any

from tasks.foundation.checkpoint.verify import read_manifest
from tasks.foundation.contracts.checkpoint import CarriedState, CheckpointRef
from tasks.foundation.contracts.identity import Difference, difference_words, differences, require_same_identity
from tasks.foundation.contracts.log_entry import Body, Change, Environment, Head
from tasks.foundation.model.batch_checks import batch_dependent_parts, describe_dependence
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.state.train_state import TrainState, carry, is_same_tree
from tasks.foundation.telemetry.events import Note, Sink

_DETERMINISTIC = (
    "from here on TensorFlow uses deterministic operations only (train.deterministic: true; set it to false to "
    "continue as before)"
)
_NOT_DETERMINISTIC = "from here on TensorFlow may use non-deterministic operations (train.deterministic: false)"
# Adam divides by 1 - beta**iterations to correct for averages that begin at 0; late in a run it no longer does.
_LARGER_UPDATES = (
    "; the first updates with fresh velocities are larger than usual, because the iterations go on: a lower learning "
    "rate for a while helps"
)


def accepted_changes(
    log: RunLog, head: Head, *, identity: dict[str, Any], state: TrainState, accept: Sequence[str]
) -> tuple[Difference, ...]:
    """Return the accepted differences between a run file and its log; for the arguments see `record_changes`.

    Raises:
        IdentityChanged: a key differs and was not accepted.
        StateMismatch: an accepted change has other weights than the tip.
    """
    if accept and head.tip is not None and differences(head.identity, identity):
        _carried(log, head.tip, state)
    return require_same_identity(head.identity, identity, home=log.home.uri, accept=accept)


def record_changes(
    log: RunLog,
    head: Head,
    accepted: Sequence[Difference],
    *,
    identity: dict[str, Any],
    environment: Environment,
    state: TrainState,
    save_code: Callable[[], dict[str, str]],
    accept: Sequence[str],
    attempt: str,
    telemetry: Sink,
) -> Head:
    """Append one entry with accepted identity changes and any environment changes; nothing if there are none.

    Args:
        log: the run's log.
        head: the log's head.
        accepted: of `accepted_changes`.
        identity: identity of the run file.
        environment: environment of this process.
        state: the state that the run file builds.
        save_code: saves the run file and its code in the home, and returns what the identity records of it; called only
            for an accepted difference.
        accept: identity keys that may differ.
        attempt: id of this attempt.
        telemetry: receives a note for each change.

    Returns:
        The head; identity and environment agree with it.

    Raises:
        IdentityChanged: another process has logged another identity meanwhile.
    """
    if not accepted and head.environment == environment:
        return head
    carried = None if head.tip is None or not accepted else _carried(log, head.tip, state)
    if accepted:
        step = 0 if head.tip is None else head.tip.step
        identity = identity | save_code()
        telemetry.emit(Note(text=f"from step {step} on, as accepted: {difference_words(accepted)}"))
        if carried is not None:
            larger = step > 0 and any(path.endswith("_velocity") for path in carried.fresh)
            words = f"variables of the checkpoint {carried.words} (each in baton log --json)"
            telemetry.emit(Note(text=f"{words}{_LARGER_UPDATES if larger else ''}"))
    if head.environment != environment:
        telemetry.emit(Note(text=_environment_words(head.environment, environment, state), warning=True))

    def decide(newest: Head | None) -> Body | None:
        if newest is None:
            return None
        # Compare with the newest entry: another process may have logged the same, or accepted another change.
        found = require_same_identity(newest.identity, identity, home=log.home.uri, accept=accept)
        if not found and newest.environment == environment:
            return None
        keys = tuple(dict.fromkeys(each.of for each in found))
        if not keys:
            return Change(environment=environment)
        return Change(environment=environment, identity=identity, accepted=keys, variables=carried)

    entry = log.append(decide, attempt=attempt)
    return log.require_head() if entry is None else entry.head


def _carried(log: RunLog, tip: CheckpointRef, state: TrainState) -> CarriedState | None:
    """What becomes of the tip's variables; None if the model has the same."""
    manifest = read_manifest(log.home, tip)
    if is_same_tree(manifest, state.tree):
        return None
    return carry(manifest, state.tree, where=f"{log.home.uri}/{tip.path}", home=log.home.uri)


def _environment_words(before: Environment, now: Environment, state: TrainState) -> str:
    """Describe changes of devices, threads, versions, processor or variables, which can change the bits."""
    changes = {key: f"{key}: {old} -> {new}" for key, (old, new) in before.changes_to(now).items()}
    if now.deterministic != before.deterministic:
        changes["deterministic"] = _DETERMINISTIC if now.deterministic else _NOT_DETERMINISTIC
    changed = "; ".join(changes.values())
    words = f"the environment changed, so the bits may differ from an uninterrupted run: {changed}"
    if before.replicas == now.replicas:
        return words
    return f"{words}. {before.replicas} replicas became {now.replicas}: " + describe_dependence(
        batch_dependent_parts(state.model)
    )
