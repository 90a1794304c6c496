"""The stage checkpoint-to-GCS: staged checkpoint -> verified and committed; older ones retired.

The room bears its full name from the start; on a home that is a local folder it does the same.
"""

from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Commit, Entry
from tasks.foundation.contracts.segment import SegmentRequest, SegmentResult
from tasks.foundation.errors import DamagedCheckpoint
from tasks.foundation.runlog.committing import commit
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.retention import clear_away, policies_of
from tasks.foundation.runlog.verifying import check
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Committed, Sink


def checkpoint_to_gcs(request: SegmentRequest, result: SegmentResult, *, storage: Storage, telemetry: Sink) -> Entry:
    """Verify what was staged against its manifest, commit it, and clear away what is no longer needed.

    Returns:
        The entry as it stands in the log; the same one if this commit was made before.

    Raises:
        StaleWriter: another writer moved the tip first.
        DamagedCheckpoint: the store has other bytes than the manifest says; nothing is committed.
    """
    home = storage.at(request.spec.run)
    body = Commit(
        checkpoint=result.staged,
        parent=request.start.path,
        exit_reason=result.exit_reason,
        history=result.history,
        examples=result.examples,
        seconds=result.seconds,
    )
    log = RunLog(home)
    _verify(log, result.staged)
    entry = commit(log, body)
    telemetry.emit(
        Committed(
            step=result.staged.step,
            path=result.staged.path,
            size=result.staged.size,
            metrics=result.history[-1].metrics if result.history else {},
        )
    )
    clear_away(log, policies_of(request.spec.checkpoint), attempt=result.staged.attempt)
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
