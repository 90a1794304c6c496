"""Where every save of a train state begins: step 0, within a segment, at its end, and on a stop.

A save has two halves, and so far each returns when its work is done:

- *stage*: `snapshot.py`, then `write.py`. The files and their manifest are in the run's home.
- *commit*: `commit.py`. The files are verified, the log names the checkpoint, older checkpoints are retired.

At the end of a segment the stage train-segment does the first half, and checkpoint-to-GCS does the second. A save that
runs beside training belongs here.
"""

from dataclasses import dataclass

from tasks.foundation.checkpoint.commit import commit_staged
from tasks.foundation.checkpoint.snapshot import take_snapshot
from tasks.foundation.checkpoint.write import write_snapshot
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Commit, Head
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.hosts import Hosts
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.multi_host import require_broadcast_head
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Sink


def stage_checkpoint(
    state: TrainState, home: Storage, *, base: int, attempt: str, where: str = ""
) -> CheckpointRef | None:
    """Write the train state to a run's home. With several hosts, all of them call it at the same step.

    Args:
        state: the train state.
        home: the run's home.
        base: number of the log entry that the work started from.
        attempt: the writer, a uuid4.
        where: added to the step in an error message, for example ", in segment 2".

    Returns:
        The staged checkpoint; None on hosts other than the chief, because only the chief writes.

    Raises:
        NonFinite: a trainable variable holds NaN or infinity.
        ModelError: the random streams of the replicas could not be restored.
        StaleWriter: another writer moved the tip first, and deleted what was being staged.
        StorageError: the store or the temporary folder failed, or the store holds other bytes than were sent.
        RunLogError: the run's log is gone.
    """
    snapshot = take_snapshot(state, where=where)
    return None if snapshot is None else write_snapshot(snapshot, home, base=base, attempt=attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """Saves the train state of one run.

    Attributes:
        home: the run's home.
        spec: the run file; its retention policies are applied after each commit.
        telemetry: receives `Committed`.
    """

    home: Storage
    spec: RunSpec
    telemetry: Sink

    def stage(self, state: TrainState, *, base: int, attempt: str, where: str = "") -> CheckpointRef | None:
        """Do the first half of a save: see `stage_checkpoint`."""
        return stage_checkpoint(state, self.home, base=base, attempt=attempt, where=where)

    def commit(self, body: Commit | None, hosts: Hosts) -> Head:
        """Do the second half of a save. With several hosts, all of them call it.

        Args:
            body: the log entry to write; None on hosts other than the chief, because only the chief commits.
            hosts: of the run.

        Returns:
            The head after the commit, on every host.

        Raises:
            StaleWriter: another writer moved the tip first.
            DamagedCheckpoint: the store holds other bytes than the manifest says; nothing is committed.
        """
        head = None
        if body is not None:
            head = commit_staged(self.home, body, spec=self.spec, telemetry=self.telemetry).head
        return require_broadcast_head(RunLog(self.home), head, hosts)
