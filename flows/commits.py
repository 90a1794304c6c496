"""The commits of a command's segments: beside the training of the next segment, or in line.

While a save is in flight, the relay plans with the head as it will be. That head is never written anywhere.
"""

import dataclasses
from dataclasses import dataclass

from flows.launching.runner import Runner
from tasks.foundation.checkpoint.committer import land
from tasks.foundation.checkpoint.retention import rewind_run
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Commit, Entry, Head, SegmentRequest, SegmentResult
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.stage_calls import CheckpointToGcsCall
from tasks.foundation.errors import BlowUp
from tasks.foundation.machine.hosts import Hosts
from tasks.foundation.runlog.folding import fold
from tasks.foundation.runlog.multi_host import require_broadcast_head
from tasks.foundation.stage import Place
from tasks.foundation.telemetry.events import Phase, WithoutPhases
from tasks.foundation.telemetry.tensorboard import CurveFiles
from tasks.stages import CHECKPOINT_TO_GCS


@dataclass(frozen=True, slots=True, kw_only=True)
class Commits:
    """Commits what segments have staged.

    Attributes:
        spec: the run file.
        runner: runs the stage checkpoint-to-GCS.
        place: where it runs.
        hosts: of the run; only the chief commits.
        curves: the TensorBoard files of the run.
    """

    spec: RunSpec
    runner: Runner
    place: Place
    hosts: Hosts
    curves: CurveFiles

    def commit(self, request: SegmentRequest, result: SegmentResult) -> None:
        """Commit the checkpoint of a segment, if it has one; beside the training, if it is still being written.

        On hosts other than the chief it does nothing.

        Raises:
            BatonError: a commit in line failed. What fails beside the training is raised where somebody waits for it.
        """
        committer = self.place.committer
        if not self.hosts.is_chief:
            return
        if result.in_flight is not None and committer is not None:
            beside = dataclasses.replace(self.place, telemetry=WithoutPhases(self.place.telemetry))

            def commit(staged: CheckpointRef) -> Entry:
                return self.runner.run(
                    CHECKPOINT_TO_GCS, CheckpointToGcsCall.of(request, result.landed(staged)), beside
                )

            committer.commit(commit)
        elif result.staged is not None:
            self.runner.run(CHECKPOINT_TO_GCS, CheckpointToGcsCall.of(request, result), self.place)

    def head_in_flight(self, head: Head, result: SegmentResult) -> Head:
        """The head as it will be once the save in flight has landed, apart from the numbers of entries.

        Args:
            head: the head that the segment started from; its save may still have been in flight then.
            result: of the segment.
        """
        if result.in_flight is None:
            raise AssertionError("no save is in flight")
        committer = self.place.committer
        if is_in_flight(head) and committer is not None and committer.landed is not None:
            head = committer.landed.head  # of the save before, which has landed meanwhile
        return fold(head, Commit.of(result.landed(result.in_flight), target=self.spec.train.known_target))

    def landed(self, head: Head) -> Head:
        """Wait for the save in flight. With several hosts, all of them call it.

        Args:
            head: as it will be once the save has landed.

        Returns:
            The head of the log. If the save has found weights that are not finite, the run is rewound.

        Raises:
            NonFinite: such weights, and `train.on_blowup` is stop, or no rewind is left.
            BatonError: the save failed.
        """
        if not is_in_flight(head):
            return head
        self.place.telemetry.emit(Phase(cause="commit"))
        try:
            land(self.place.committer, self.hosts)
        except BlowUp as fault:
            return self.rewound(head, fault)
        return self.agreed_head()

    def rewound(self, head: Head, fault: BlowUp) -> Head:
        """Rewind the run after its save in flight has found weights that are not finite.

        Args:
            head: as it would have been once the save had landed.
            fault: what the save found.

        Raises:
            NonFinite: `fault`, if `train.on_blowup` is stop, or no rewind is left.
        """
        if self.spec.train.on_blowup == "stop" or head.tip is None:
            raise fault
        if self.hosts.is_chief:
            telemetry = self.place.telemetry
            rewind_run(self.place.log, fault, base=head.tip.base, spec=self.spec, telemetry=telemetry)
        return self.agreed_head()

    def agreed_head(self) -> Head:
        """The newest head. With several hosts, the chief reads it and broadcasts it."""
        newest = self.place.log.require_head() if self.hosts.is_chief else None
        return require_broadcast_head(self.place.log, newest, self.hosts)

    def write_curves(self, head: Head) -> None:
        """Bring the TensorBoard files up to date; beside the training, if a save is in flight."""
        committer, curves = self.place.committer, self.curves
        if not self.hosts.is_chief:
            return
        if committer is not None and is_in_flight(head):
            committer.then(lambda entry: curves.update(entry.head))
        else:
            curves.update(head)


def is_in_flight(head: Head) -> bool:
    """Whether a head is one that will be, because the save of its tip is in flight."""
    return head.tip is not None and head.tip.is_in_flight
