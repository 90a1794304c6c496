"""What differs from the run as its log records it: refused, or said aloud and logged."""

from collections.abc import Sequence
from typing import Any

from tasks.foundation.checkpoint.verify import read_manifest
from tasks.foundation.contracts.identity import differences, in_words, require_same_identity
from tasks.foundation.contracts.log_entry import Body, Change, Environment, Head
from tasks.foundation.errors import StateMismatch
from tasks.foundation.messages import HINT
from tasks.foundation.model.batch_dependence import batch_dependent_parts, dependence_words
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.state.layout import require_same_signature
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.telemetry.events import Note, Sink

_ON = (
    "TensorFlow uses deterministic operations only from here on, which it did not before (train.deterministic: true; "
    "false goes on as before)"
)
_OFF = "TensorFlow may use operations that are not deterministic from here on (train.deterministic: false)"


def note_changes(
    log: RunLog,
    head: Head,
    *,
    identity: dict[str, Any],
    environment: Environment,
    state: TrainState,
    accept: Sequence[str],
    attempt: str,
    telemetry: Sink,
) -> Head:
    """Log, in one entry, accepted changes of the identity and any of the environment; nothing where nothing differs.

    Args:
        log: the run's.
        head: its folded state.
        identity: of the run file.
        environment: of this process.
        state: as the run file builds it.
        accept: identity keys that may differ.
        attempt: who works.
        telemetry: is told what differs.

    Returns:
        The head, in which nothing differs any more.

    Raises:
        IdentityChanged: something differs that was not accepted.
        StateMismatch: a change was accepted with which the tip could not be restored. Nothing is logged.
    """
    if accept and head.tip is not None and differences(head.identity, identity):
        _require_same_variables(log, head, state)
    accepted = require_same_identity(head.identity, identity, home=log.home.uri, accept=accept)
    if not accepted and head.environment == environment:
        return head
    if accepted:
        step = 0 if head.tip is None else head.tip.step
        telemetry.emit(Note(text=f"from step {step} on, as accepted: {in_words(accepted)}"))
    if head.environment != environment:
        telemetry.emit(Note(text=_environment_words(head.environment, environment, state), warning=True))

    def decide(newest: Head | None) -> Body | None:
        if newest is None:
            return None
        # Asked again of the newest entry: a rival may have logged the same, or have accepted something else.
        found = require_same_identity(newest.identity, identity, home=log.home.uri, accept=accept)
        if not found and newest.environment == environment:
            return None
        keys = tuple(dict.fromkeys(each.of for each in found))
        return Change(environment=environment, identity=identity if keys else None, accepted=keys)

    entry = log.append(decide, attempt=attempt)
    return log.require_head() if entry is None else entry.head


def _require_same_variables(log: RunLog, head: Head, state: TrainState) -> None:
    if head.tip is None:
        return
    manifest = read_manifest(log.home, head.tip)
    try:
        require_same_signature(manifest.signature, state.signature, where=f"{log.home.uri}/{head.tip.path}")
    except StateMismatch as fault:
        raise StateMismatch(
            f"{fault}\n{HINT}a change of variables cannot be accepted, since the checkpoint does not hold them"
        ) from fault


def _environment_words(before: Environment, now: Environment, state: TrainState) -> str:
    """A change of devices, threads or versions can change the bits."""
    old, new = before.model_dump(), now.model_dump()
    told = {key: f"{key}: {old[key]} -> {new[key]}" for key in new if new[key] != old[key]}
    if now.deterministic != before.deterministic:
        told["deterministic"] = _ON if now.deterministic else _OFF
    changed = "; ".join(told.values())
    words = f"the environment changed, so the bits may differ from an uninterrupted run: {changed}"
    if before.replicas == now.replicas:
        return words
    return f"{words}. {before.replicas} replicas became {now.replicas}: " + dependence_words(
        batch_dependent_parts(state.model)
    )
