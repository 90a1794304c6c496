"""The stage checkpoint-to-GCS: verifies a staged checkpoint, commits it, and retires older ones.

A home in a local folder is treated like one in a bucket.
"""

from baton.tasks.foundation.checkpoint.save import commit_staged
from baton.tasks.foundation.contracts.log_entry import Commit, Entry
from baton.tasks.foundation.contracts.stage_calls import CheckpointToGcsCall
from baton.tasks.foundation.machine.threads import run_uninterrupted
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.telemetry.events import Phase


def checkpoint_to_gcs(call: CheckpointToGcsCall, place: Place) -> Entry:
    """Verify a staged checkpoint against its manifest, commit it, and retire older checkpoints.

    Args:
        call: the request for a segment and its result, which has a staged checkpoint.
        place: where to commit.

    Returns:
        The log entry; the existing one if this commit was made before.

    Raises:
        StaleWriter: another writer moved the tip first.
        DamagedCheckpoint: the stored bytes differ from the manifest; nothing is committed.
    """
    body = Commit.of(call.result, target=call.request.spec.train.known_target)
    place.telemetry.emit(Phase(cause="commit"))
    if place.saves is not None:
        # This process has just written and verified the files. It either runs in the thread that saves, where no
        # signal arrives, or within the uninterrupted work of the relay.
        return commit_staged(place.log, body, spec=call.request.spec, telemetry=place.telemetry, verified=True)
    # A signal here would lose the staged segment, so it is delivered after the commit.
    return run_uninterrupted(
        lambda _: commit_staged(place.log, body, spec=call.request.spec, telemetry=place.telemetry),
        call.request.spec.stop,
    )
