"""The segments of a command: train one, begin its commit, and say what comes next."""

from collections.abc import Callable
from dataclasses import dataclass

from flows.commits import Commits
from flows.goal import Goal
from tasks.foundation.contracts.callback_record import recorded_callbacks
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.log_entry import Head, Rewind
from tasks.foundation.contracts.schedule import callbacks_act_at_end, next_border
from tasks.foundation.contracts.segment import SegmentRequest, SegmentResult
from tasks.foundation.contracts.stage_calls import TrainSegmentCall
from tasks.foundation.errors import RunLogError
from tasks.foundation.hosts import Hosts
from tasks.foundation.stage import Place
from tasks.foundation.stops.agreement import agreed_stop
from tasks.foundation.stops.stops import Stops
from tasks.foundation.stops.uninterrupted import run_uninterrupted
from tasks.stages import TRAIN_SEGMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Trains and commits segments.

    Attributes:
        goal: of the command.
        commits: commits what a segment has staged.
        hosts: of the run.
        seconds_left: of the command's time budget; None: no limit.
        accept: identity keys whose change the command accepts.
    """

    goal: Goal
    commits: Commits
    hosts: Hosts
    seconds_left: Callable[[], float | None]
    accept: tuple[str, ...]

    def train_and_commit(self, dataset: DatasetRef, head: Head, *, number: int) -> tuple[str | None, Head, bool]:
        """Train and commit one segment; signals that arrive meanwhile are delivered afterwards.

        A signal between the last step and the commit would lose a trained segment. A host that exits before the other
        hosts know the head would look like a lost one.

        Returns:
            The reason to stop after the segment, or None; the new head; whether any step was trained.
        """
        request = self._next_segment(dataset, head, number=number)

        def work(stops: Stops) -> tuple[str | None, Head, bool]:
            result = self.commits.runner.run(
                TRAIN_SEGMENT, TrainSegmentCall.of(request, head.environment, self.accept), self.commits.place
            )
            self.commits.commit(request, result)
            stop = agreed_stop(stops, self.hosts)
            if stop is None and result.exit_reason == "time_budget":
                # The clock of the stage's machine is ahead of this one, so each further segment would stop at once.
                stop = "time_budget"
            if result.in_flight is None:
                newest = self.commits.agreed_head()
                return stop, newest, self._has_trained(request, result, newest)
            ahead = self.commits.head_in_flight(head, result)
            return stop, ahead if stop is None else self.commits.landed(ahead), True

        seconds_left, telemetry = request.stop_within_seconds, self.commits.place.telemetry
        return run_uninterrupted(work, request.spec.stop, within_seconds=seconds_left, telemetry=telemetry)

    def _next_segment(self, dataset: DatasetRef, head: Head, *, number: int) -> SegmentRequest:
        spec, tip = self.commits.spec, _tip_of(head, self.commits.place)
        return SegmentRequest(
            spec=spec,
            dataset=dataset,
            start=tip,
            base=head.base,
            skipped_batches=head.skipped_batches,
            until_step=next_border(spec, tip.step, self.goal.next_cut(spec, tip.step)),
            stop_within_seconds=self.seconds_left(),
            number=number,
        )

    def _has_trained(self, request: SegmentRequest, result: SegmentResult, newest: Head) -> bool:
        """Whether a segment counts. One that was dropped because the save before it failed does not."""
        if result.exit_reason != "rewind":
            return result.exit_reason not in {"finished", "superseded"}
        rewound = self.commits.place.log.entry(newest.base).body
        return not isinstance(rewound, Rewind) or rewound.blown_up_at > request.start.step

    def end_epoch_of_callbacks(self, dataset: DatasetRef, head: Head, *, number: int) -> None:
        """Report the run's last evaluation and its end to the callbacks, because no later segment does.

        Their state after this report is not saved. If the run is extended, they receive the same report after the
        restore.
        """
        spec, tip = self.commits.spec, head.tip
        if tip is None or head.finished is not None or spec.train.callbacks is None or tip.step != spec.train.target:
            return
        if callbacks_act_at_end(spec, tip.step) or recorded_callbacks(head.identity).on_train_end:
            self.train_and_commit(dataset, head, number=number)


def _tip_of(head: Head, place: Place) -> CheckpointRef:
    if head.tip is None:
        raise RunLogError(f"{place.home.uri}: the run has no tip, although init-or-restore has ended; run again")
    return head.tip
