"""Where every save of a train state begins: step 0, within a segment, at its end, and on a stop.

A save has two halves:

- *stage*: `snapshot.py`, then `write.py`. The files and their manifest are in the run's home.
- *commit*: `committer.py`. The files are verified, the log names the checkpoint, older checkpoints are retired.

*In line*, each half returns when its work is done. *Beside the training*, the training thread only takes the snapshot;
the rest runs in the thread of a `Committer`, one save at a time. Until it has landed, the checkpoint is known by a
reference without digests, `CheckpointRef.in_flight`.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from tasks.foundation.checkpoint.committer import Committer, commit_staged, found_by_chief, land
from tasks.foundation.checkpoint.snapshot import reserve_memory, snapshot_bytes, take_snapshot
from tasks.foundation.checkpoint.write import write_snapshot
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Commit, Entry, Head
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import NonFinite
from tasks.foundation.machine.hosts import Hosts
from tasks.foundation.machine.processes import enough_memory_for_snapshot
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.multi_host import require_broadcast_head
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Note, Sink, WithoutPhases
from tasks.foundation.telemetry.formatting import size_words

_WORD_BITS = 32  # a float64 holds such a word exactly


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
        NonFinite: a trainable variable holds NaN or infinity; raised on every host.
        ModelError: the random streams of the replicas could not be restored.
        StaleWriter: another writer moved the tip first, and deleted what was being staged.
        StorageError: the store failed, or holds other bytes than were sent.
        RunLogError: the run's log is gone.
    """
    snapshot = take_snapshot(state, where=where, copy=False)
    staged, fault = None, None
    try:
        if snapshot is not None:
            staged = write_snapshot(snapshot, home, base=base, attempt=attempt)
    except NonFinite as error:
        fault = error  # raised below, once the other hosts know
    if not state.accelerator.all_agree(fault is None):
        raise fault or found_by_chief(state.step, where=where)
    return staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """Saves the train state of one run.

    Attributes:
        log: the run's.
        spec: the run file; its retention policies are applied after each commit.
        telemetry: receives `Committed`.
        committer: saves beside the training; None: every save is made in line.
    """

    log: RunLog
    spec: RunSpec
    telemetry: Sink
    committer: Committer | None = None

    @property
    def home(self) -> Storage:
        """The run's home."""
        return self.log.home

    def stage(self, state: TrainState, *, base: int, attempt: str, where: str = "") -> CheckpointRef | None:
        """Do the first half of a save: see `stage_checkpoint`."""
        return stage_checkpoint(state, self.log.home, base=base, attempt=attempt, where=where)

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
            head = commit_staged(self.log, body, spec=self.spec, telemetry=self.telemetry).head
        return require_broadcast_head(self.log, head, hosts)

    def reserve_memory(self, state: TrainState) -> None:
        """Get memory for the first save beside the training ready, beside the training, unless memory is short.

        Call it when a step has been trained, so that what the step needs is taken already.
        """
        needed = self.committer is not None and state.accelerator.is_chief and not state.page_buffer.size
        if needed and enough_memory_for_snapshot(snapshot_bytes(state)):
            reserve_memory(state)

    def saves_beside(self, state: TrainState, hosts: Hosts) -> bool:
        """Whether the next save runs beside the training. With several hosts, all of them call it, and agree.

        It needs a committer, and memory for a copy of the state. If memory is short, that is reported once.
        """
        if self.committer is None:
            return False
        size = snapshot_bytes(state)
        fits = state.page_buffer.size >= size or enough_memory_for_snapshot(size)
        if hosts.broadcast_from_chief(fits):
            return True
        if not self.committer.memory_was_short:
            self.committer.memory_was_short = True
            text = f"a copy of the train state takes {size_words(size)} of memory, and less is free"
            self.telemetry.emit(Note(text=f"{text}: training waits for each commit", warning=True))
        return False

    def begin(
        self,
        state: TrainState,
        *,
        base: int,
        where: str,
        hosts: Hosts,
        processed: Callable[[float], None] | None = None,
    ) -> CheckpointRef:
        """Take a snapshot and begin to stage it beside the training. With several hosts, all of them call it.

        The save before must have landed. What fails is raised where somebody waits for the save.

        Args:
            state: the train state.
            base: number of the log entry that the work started from.
            where: added to the step in an error message.
            hosts: of the run.
            processed: gets the seconds of a processor that writing takes, in the thread that saves.

        Returns:
            The checkpoint in flight, the same on every host.
        """
        attempt = _agreed_attempt(hosts)
        snapshot = take_snapshot(state, where=where)
        reference = CheckpointRef.in_flight(step=state.step, base=base, attempt=attempt)
        if snapshot is not None and self.committer is not None:
            self.committer.begin(
                lambda: write_snapshot(snapshot, self.log.home, base=base, attempt=attempt, processed=processed)
            )
        return reference

    def commit_beside(self, body_of: Callable[[CheckpointRef], Commit], hosts: Hosts) -> None:
        """Commit the save in flight once it is staged. On hosts other than the chief it does nothing.

        Args:
            body_of: the log entry to write for the staged checkpoint.
            hosts: of the run.
        """
        if self.committer is None or not hosts.is_chief:
            return
        telemetry = WithoutPhases(self.telemetry)

        def commit(staged: CheckpointRef) -> Entry:
            return commit_staged(self.log, body_of(staged), spec=self.spec, telemetry=telemetry, verified=True)

        self.committer.commit(commit)

    def land(self, hosts: Hosts) -> int | None:
        """Wait for the save in flight, see `landing.land`."""
        return land(self.committer, hosts)


def _agreed_attempt(hosts: Hosts) -> str:
    """A new attempt id, the chief's on every host."""
    chosen = uuid.uuid4()
    words = [chosen.int >> shift & (1 << _WORD_BITS) - 1 for shift in (96, 64, 32, 0)]
    agreed = 0
    for word in hosts.gather_from_hosts(words)[0].tolist():
        agreed = agreed << _WORD_BITS | int(word)
    return f"{agreed:032x}"
