"""Find the newest whole checkpoint of a run, and quarantine the damaged ones after it."""

from tasks.foundation.checkpoint.prefetch import PREFETCHED_CHECKPOINT
from tasks.foundation.checkpoint.verify import find_damage
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.errors import NothingToRestore
from tasks.foundation.messages import listed
from tasks.foundation.runlog.commits import quarantine
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.telemetry.events import Note, Sink


def quarantine_damaged_tips(log: RunLog, *, attempt: str, telemetry: Sink, verify_bytes: bool = False) -> Head | None:
    """Quarantine the tip while it is damaged, and return the head.

    A checkpoint that this process reads ahead is not asked about: `restore` compares all its bytes with the manifest.

    If every retained checkpoint is damaged, none is quarantined. So the run can continue once the files are restored
    from a backup.

    Args:
        log: the run's.
        attempt: the writer, a uuid4.
        telemetry: receives a warning for each quarantined checkpoint.
        verify_bytes: whether to read all bytes, instead of asking the store for sizes and checksums.

    Returns:
        The head, whose tip is whole or about to be restored and verified; None if there is no run.

    Raises:
        NothingToRestore: every retained checkpoint is damaged, and training had gone beyond step 0.
    """
    while True:
        head = log.head()
        if head is None or head.tip is None:
            return head
        if not verify_bytes and PREFETCHED_CHECKPOINT.looks_whole(log.home, head.tip):
            return head
        reason = find_damage(log.home, head.tip, read_bytes=verify_bytes)
        if reason is None:
            return head
        older = reversed(head.retained[:-1])
        trained = any(ref.step > 0 for ref in (*head.retained, *head.quarantined))
        if trained and all(find_damage(log.home, ref, read_bytes=verify_bytes) is not None for ref in older):
            raise NothingToRestore(
                f"{log.home.uri}: every retained checkpoint is damaged: "
                f"{listed([ref.path for ref in head.retained])}. Restore their files from a backup, or start a run "
                f"of another name ({reason})"
            )
        telemetry.emit(Note(text=f"checkpoint {head.tip.path} is damaged and quarantined: {reason}", warning=True))
        quarantine(log, head.tip, reason, attempt=attempt)
