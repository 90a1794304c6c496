"""Commit a staged checkpoint: verify its files, append the log entry, retire older checkpoints.

The stage checkpoint-to-GCS calls this at segment ends, `save.py` everywhere else. It needs no TensorFlow.
"""

from contextlib import suppress

from tasks.foundation.checkpoint.retention import apply_retention, files_to_delete, retention_policies
from tasks.foundation.checkpoint.verify import verify_checkpoint
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Commit, Entry
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import DamagedCheckpoint, StaleWriter, StorageError
from tasks.foundation.runlog.commits import commit
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.transfers import beside
from tasks.foundation.telemetry.events import Committed, Sink


def commit_staged(log: RunLog, body: Commit, *, spec: RunSpec, telemetry: Sink, verified: bool = False) -> Entry:
    """Verify a staged checkpoint against its manifest, commit it, and apply the retention policies.

    Args:
        log: the run's.
        body: the log entry to write; it names the checkpoint.
        spec: the run file.
        telemetry: receives `Committed`.
        verified: whether this process has just written the files, and compared what the store holds with what it sent.

    Returns:
        The entry as it is in the log; the earlier one if this commit was made before.

    Raises:
        StaleWriter: another writer moved the tip first.
        DamagedCheckpoint: the store holds other bytes than the manifest says; nothing is committed.
    """
    staged = body.checkpoint
    if not verified:
        _verify(log, staged)
    before = log.head_seen()
    with beside(lambda: files_to_delete(log.home, before)) as listed:
        try:
            entry = commit(log, body)
        except StaleWriter:
            with suppress(StorageError):  # the next commit deletes what is left
                log.home.delete(staged.path)
            raise
        telemetry.emit(
            Committed(
                step=staged.step,
                path=staged.path,
                size=staged.size,
                metrics=body.history[-1].metrics if body.history else {},
            )
        )
        apply_retention(log, retention_policies(spec), attempt=staged.attempt, listed=listed.result())
    return entry


def _verify(log: RunLog, staged: CheckpointRef) -> None:
    try:
        verify_checkpoint(log.home, staged)
    except DamagedCheckpoint:
        head = log.head()
        if head is None or head.base == staged.base:
            raise
        # No damage: another writer moved the tip and deleted these files, or this commit was made long ago and has
        # been retired since. The append distinguishes the two; on a base that has moved, nothing new can be committed.
