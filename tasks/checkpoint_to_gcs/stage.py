"""The stage checkpoint-to-GCS: staged checkpoint -> verified and committed; older ones retired.

The room bears its full name from the start; on a home that is a local folder it does the same.
"""

from tasks.foundation.checkpoint.commit_staged import commit_staged
from tasks.foundation.contracts.log_entry import Commit, Entry
from tasks.foundation.contracts.segment import SegmentRequest, SegmentResult
from tasks.foundation.stops.uninterrupted import run_uninterrupted
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Phase, Sink


def checkpoint_to_gcs(request: SegmentRequest, result: SegmentResult, *, storage: Storage, telemetry: Sink) -> Entry:
    """Verify what was staged against its manifest, commit it, and clear away what is no longer needed.

    Args:
        request: what the segment was asked for.
        result: what came out; something must be staged.
        storage: the storage root.
        telemetry: is told of the commit.

    Returns:
        The entry as it stands in the log; the same one if this commit was made before.

    Raises:
        StaleWriter: another writer moved the tip first.
        DamagedCheckpoint: the store has other bytes than the manifest says; nothing is committed.
    """
    body = Commit.of(result)
    telemetry.emit(Phase(cause="commit"))
    # A signal in between would lose the segment that is staged; it is heeded as soon as the commit is made.
    return run_uninterrupted(
        lambda _: commit_staged(storage.at(request.spec.run), body, spec=request.spec, telemetry=telemetry),
        request.spec.stop,
    )
