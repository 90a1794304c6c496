"""How a staged checkpoint lands, at a segment's end and within it: verified, committed, and older ones retired."""

from contextlib import suppress

from tasks.foundation.checkpoint.retention import clear_away, policies_of
from tasks.foundation.checkpoint.verify import check
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Commit, Entry
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import DamagedCheckpoint, StaleWriter, StorageError
from tasks.foundation.runlog.commits import commit
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Committed, Sink


def commit_staged(home: Storage, body: Commit, *, spec: RunSpec, telemetry: Sink) -> Entry:
    """Verify what was staged against its manifest, commit it, and clear away what is no longer needed.

    Returns:
        The entry as it stands in the log; the same one if this commit was made before.

    Raises:
        StaleWriter: another writer moved the tip first.
        DamagedCheckpoint: the store has other bytes than the manifest says; nothing is committed.
    """
    staged = body.checkpoint
    log = RunLog(home)
    _verify(log, staged)
    try:
        entry = commit(log, body)
    except StaleWriter:
        with suppress(StorageError):  # garbage that whoever commits next sweeps up, if not we
            home.delete(staged.path)
        raise
    telemetry.emit(
        Committed(
            step=staged.step,
            path=staged.path,
            size=staged.size,
            metrics=body.history[-1].metrics if body.history else {},
        )
    )
    clear_away(log, policies_of(spec), attempt=staged.attempt)
    return entry


def _verify(log: RunLog, staged: CheckpointRef) -> None:
    try:
        check(log.home, staged)
    except DamagedCheckpoint:
        head = log.head()
        if head is None or head.base == staged.base:
            raise
        # No damage: what lost to another writer is swept up, and what was committed long ago is deleted. The log
        # tells which; once its base has moved, nothing new can be committed on this one.
