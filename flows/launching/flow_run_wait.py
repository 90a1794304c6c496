"""Waiting for the flow run of a stage, also while this process is asked to stop."""

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from prefect.client.schemas.objects import State, StateType

from flows.launching.prefect_api import FlowRuns
from flows.launching.runner import StageStopped
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.machine.stops import Stop, Stops
from tasks.foundation.runlog.stage_results import has_answer
from tasks.foundation.stage import label_of
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Note, Sink

_POLL_SECONDS = 1.0
# A cancelled stage commits within its grace period; this is for the news of it.
_NEWS_SECONDS = 30.0
# A running segment knows the time budget itself and commits in order; SIGTERM would leave it the grace period only.
_ORDERLY_SECONDS = 300.0
# Longer than a container takes to start; a machine may take longer, so it is a warning and no more.
_QUEUE_SECONDS = 120.0
# What this process needs of its own grace period, to say where the run stands.
_TO_LEAVE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCall:
    """A call to a stage in another process.

    Attributes:
        stage: its name, such as train_segment.
        deployment: FLOW/DEPLOYMENT.
        spec: the run file.
        text: the call as JSON.
        aim: what the stage is to reach, for messages.
        cancellable: whether to cancel the stage when this process is asked to stop.
    """

    stage: str
    deployment: str
    spec: RunSpec
    text: str
    aim: str
    cancellable: bool

    def __str__(self) -> str:
        return f"{label_of(self.stage)} {self.aim}".strip()


@dataclass(slots=True, kw_only=True)
class FlowRunWait:
    """Waits for one flow run.

    Attributes:
        flow_run: id of the flow run.
        call: what it was started with.
        home: the run's home, where it leaves its answer.
        telemetry: receives a warning if the flow run stays queued.
        flow_runs: Prefect's API.
        clock: seconds, never going back.
    """

    flow_run: UUID
    call: RemoteCall
    home: Storage
    telemetry: Sink
    flow_runs: FlowRuns
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    _warned: bool = False
    _has_run: bool = False
    _cancelling_since: float | None = None
    _stopping_since: float | None = None

    def until_over(self, stops: Stops) -> State | None:
        """Wait until it is over.

        Args:
            stops: requests to stop this process; a cancellable stage is cancelled then.

        Returns:
            The last state; None if Prefect does not know the flow run any more.

        Raises:
            StageStopped: this process was asked to stop, or the flow run was cancelled and its end was not reported.
        """
        began = self.clock()
        while True:
            state = self.flow_runs.state(self.flow_run)
            self._has_run = self._has_run or (state is not None and state.type is StateType.RUNNING)
            if self._has_run and _is_queued(state) and has_answer(self.home, str(self.flow_run)):
                # Its machine was lost, and Prefect has scheduled it again; there is nothing left to do for it.
                self.flow_runs.cancel(self.flow_run)
                return state
            self._warn_of_queue(state, self.clock() - began)
            self._require_end_of_cancelled(state)
            if is_over(state) and (self._stopping_since is None or not self.call.cancellable):
                return state
            if stops.requested is not None:
                self._stop(stops.requested, stops.grace_left(), state)
            self.sleep(_POLL_SECONDS)

    def _warn_of_queue(self, state: State | None, waited_seconds: float) -> None:
        if self._warned or self._has_run or not _is_queued(state) or waited_seconds < _QUEUE_SECONDS:
            return
        self._warned = True
        hint = "check that its work pool has a worker and is neither paused nor full"
        self.telemetry.emit(
            Note(text=f"{self.call} has not started after {_QUEUE_SECONDS:.0f} s; {hint}", warning=True)
        )

    def _require_end_of_cancelled(self, state: State | None) -> None:
        if state is None or state.type is not StateType.CANCELLING:
            self._cancelling_since = None
            return
        if self._cancelling_since is None:
            self._cancelling_since = self.clock()
        if self.clock() >= self._cancelling_since + self.call.spec.stop.grace_seconds + _NEWS_SECONDS:
            raise StageStopped("cancelled", f"{self.call} was cancelled, and its end was not reported")

    def _stop(self, stop: Stop, grace_left: float, state: State | None) -> None:
        """Cancel the flow run, if it has not been done; give up waiting when the time for that is over."""
        if self._stopping_since is None:
            if not self._sees_to_it(stop, state):
                if self.call.cancellable:
                    self.flow_runs.cancel(self.flow_run)
                self._stopping_since = self.clock()
            return
        too_long = self.clock() >= self._stopping_since + self.call.spec.stop.grace_seconds + _NEWS_SECONDS
        if is_over(state) or too_long or grace_left <= _TO_LEAVE_SECONDS:
            how = "was cancelled" if self.call.cancellable else "continues by itself"
            raise StageStopped(stop.reason, f"{self.call} {how} ({stop.reason.replace('_', ' ')})")

    def _sees_to_it(self, stop: Stop, state: State | None) -> bool:
        """Whether the stage handles this stop itself: it was given the time budget, once it runs."""
        if stop.reason != "time_budget" or state is None or state.type is not StateType.RUNNING:
            return False
        orderly_seconds = max(self.call.spec.stop.grace_seconds, _ORDERLY_SECONDS)
        return self.call.stage != "train_segment" or self.clock() < stop.at + orderly_seconds


def is_over(state: State | None) -> bool:
    """Whether a flow run has ended, or is not known any more."""
    return state is None or state.is_final()


def _is_queued(state: State | None) -> bool:
    return state is not None and state.type in {StateType.SCHEDULED, StateType.PENDING}
