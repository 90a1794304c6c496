"""A stage that is asked of other processes, until there is an answer.

Each try is a flow run of the stage's deployment. Whatever becomes of it (it fails, crashes, vanishes, is cancelled, is
executed twice, goes on after this process died), the next step is the same: look at the log, and ask again for what is
missing there.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

from prefect.client.schemas.objects import State, StateType

from flows.launching.prefect_api import FlowRuns
from flows.launching.stage_flows import stage_name, tags_of
from flows.launching.stage_results import has_answer, take_answer
from flows.relay import StageStopped
from tasks.foundation import errors
from tasks.foundation.contracts.attempt import LAUNCH
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.segment import SegmentResult
from tasks.foundation.contracts.stage_calls import StageCall
from tasks.foundation.errors import (
    AcceleratorLost,
    AnotherVersion,
    BatonError,
    BlowUp,
    NoProgress,
    RunLogError,
    StageLost,
    StorageError,
    StoreUnreachable,
)
from tasks.foundation.messages import with_place
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.progress import require_progress
from tasks.foundation.stops.stops import Stop, Stops
from tasks.foundation.stops.uninterrupted import run_uninterrupted
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Note, Phase, Sink

A = TypeVar("A", bound=Contract)

_LOOK_AGAIN_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
# Cancelled, a stage commits within its grace period; this is for the news of it.
_NEWS_SECONDS = 30.0
# A stage that runs knows the time budget itself, and commits in order; SIGTERM would leave it the grace period only.
_ORDERLY_SECONDS = 300.0
# Longer than a container takes to start; a machine may take longer, so it is said and no more.
_QUEUE_SECONDS = 120.0
# Of this process's own grace period, to say where the run stands.
_TO_LEAVE_SECONDS = 2.0
# The stage's machine or its devices went: nothing is wrong with the run.
_MACHINES_FAULT = {AcceleratorLost.__name__, StageLost.__name__, StoreUnreachable.__name__}


class _Lost(Exception):
    """A flow run ended without an answer, and not by an error of Baton's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a stage.

    Attributes:
        stage: its name, as train_segment.
        deployment: FLOW/DEPLOYMENT.
        call: what it is told.
        aim: what it is to reach, for people.
        keeps: it keeps what is trained already, and is not told to go: that would lose it.
    """

    stage: str
    deployment: str
    call: StageCall
    aim: str = ""
    keeps: bool = False

    def __str__(self) -> str:
        return f"{stage_name(self.stage)} {self.aim}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Asks for the stages of one relay.

    Attributes:
        flow_runs: of Prefect's API.
        attempt: a uuid4 made in this process; None: what is asked for is not part of a run's way.
        clock: seconds, never going back.
        until: when the time budget is used up, by `clock`: what has not begun by then is not waited for.
    """

    flow_runs: FlowRuns
    attempt: str | None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    until: float | None = None
    _tries: list[UUID] = field(default_factory=list)
    _asker: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def within(cls, seconds: float | None, *, flow_runs: FlowRuns, attempt: str | None) -> "Elsewhere":
        """With a time budget that counts from now."""
        until = None if seconds is None else time.monotonic() + seconds
        return cls(flow_runs=flow_runs, attempt=attempt, until=until)

    def ask(
        self,
        question: Question,
        kind: type[A],
        home: Storage,
        *,
        telemetry: Sink,
        instead: Callable[[], A | None] = lambda: None,
    ) -> A:
        """Ask until there is an answer: what is lost is asked for again, as long as the run gets further.

        Args:
            question: the stage and what it is told.
            kind: of the answer.
            home: the run's.
            telemetry: is told what is launched, and what became of it.
            instead: looked at before each try: the answer, if nothing is to be asked for any more.

        Raises:
            BatonError: what the stage raised.
            StageStopped: it was told to go.
            NoProgress: it is lost again and again.
        """

        def work(stops: Stops) -> A:
            tries = 0
            while True:
                moved_on = instead()
                if moved_on is not None:
                    return moved_on
                if stops.asked is not None and not question.keeps:
                    reason = stops.asked.reason
                    raise StageStopped(reason, f"{question} was not begun ({reason.replace('_', ' ')})")
                try:
                    return self._ask_once(question, kind, home, stops, telemetry)
                except _Lost as lost:
                    tries += 1
                    _require_another_try(home, question.call, tries, str(lost))
                    telemetry.emit(Note(text=f"{lost}; looking at the log and trying again", warning=True))
                self._pause(min(2.0 ** (tries - 1), _LONGEST_PAUSE_SECONDS), stops)

        left = None if self.until is None else max(self.until - self.clock(), 0.0)
        return run_uninterrupted(work, question.call.spec.stop, within_seconds=left, telemetry=telemetry)

    def end_orphans(
        self, stage: str, spec: RunSpec, ours: Callable[[Mapping[str, Any]], bool], *, telemetry: Sink
    ) -> None:
        """Have flow runs of a stage go that an earlier attempt left behind.

        Cancelled, they commit what they have trained; left alone, they would hold an accelerator for a segment that
        nobody takes from them any more.

        Args:
            stage: its name.
            spec: the run file.
            ours: whether a flow run with these parameters is of this very run.
            telemetry: is told of each.
        """
        for flow_run in self.flow_runs.unfinished(tags_of(spec.run, stage), ours):
            state = self.flow_runs.state(flow_run)
            told = state is not None and state.type is StateType.CANCELLING
            what = "is waited for, as it was told to go" if told else "is told to commit and go"
            said = f"flow run {flow_run} of an earlier attempt is still there; it {what}"
            telemetry.emit(Note(text=said, warning=True))
            if not told:
                self.flow_runs.cancel(flow_run)
            until = self.clock() + spec.stop.grace_seconds + _NEWS_SECONDS
            while self.clock() < until and not _is_over(self.flow_runs.state(flow_run)):
                self.sleep(_LOOK_AGAIN_SECONDS)

    def _ask_once(self, question: Question, kind: type[A], home: Storage, stops: Stops, telemetry: Sink) -> A:
        telemetry.emit(Phase(cause=LAUNCH))
        flow_run = self.flow_runs.start(
            question.deployment,
            {"call": question.call.model_dump_json()},  # text: a metric may be NaN, which Prefect's JSON does not know
            name=f"{question.call.spec.run} {question}",
            tags=tags_of(question.call.spec.run, question.stage),
            # Of this attempt and this try only: a flow run of another has another base, or is dead.
            key=f"{self.attempt or self._asker}/{len(self._tries)}",
        )
        self._tries.append(flow_run)
        telemetry.emit(Note(text=f"{question} runs as flow run {flow_run} of {question.deployment}"))
        try:
            state = self._wait(flow_run, stops, question, home, telemetry)
        except StageStopped:
            # What is staged stays, for the next attempt; the rest is litter, and no reason to stay any longer.
            with suppress(StorageError, RunLogError, AnotherVersion):
                take_answer(home.with_deadline(_TO_LEAVE_SECONDS), str(flow_run), kind)
            raise
        answer = take_answer(home, str(flow_run), kind)
        if answer is not None and not _was_told_to_go(answer):
            return answer
        told = f"{question} (flow run {flow_run} of {question.deployment})"
        if state is None:
            raise _Lost(f"{told} is not known to Prefect any more")
        if state.type is StateType.FAILED and state.name not in _MACHINES_FAULT:
            raise _error(state, told)
        if state.type is StateType.CANCELLED:
            raise StageStopped("cancelled", f"{told} was cancelled; the same command goes on")
        if state.type is StateType.COMPLETED:
            raise _Lost(f"{told} has completed, and its answer is not in {home.uri}: that is another place there")
        raise _Lost(f"{told} ended without an answer ({state.name}: {state.message or 'no message'})")

    def _wait(self, flow_run: UUID, stops: Stops, question: Question, home: Storage, telemetry: Sink) -> State | None:
        """Until it has ended, or has been told to go because this process is.

        Raises:
            StageStopped: this process was told to go, and has told the stage.
        """
        grace_seconds = question.call.spec.stop.grace_seconds
        told_at: float | None = None
        began, said, ran = self.clock(), False, False
        leaving_since: float | None = None
        while True:
            state = self.flow_runs.state(flow_run)
            ran = ran or (state is not None and state.type is StateType.RUNNING)
            if ran and _has_not_begun(state) and has_answer(home, str(flow_run)):
                # Its machine went, and Prefect has scheduled it again; it would find nothing to do there.
                self.flow_runs.cancel(flow_run)
                return state
            if not said and not ran and _has_not_begun(state) and self.clock() >= began + _QUEUE_SECONDS:
                said = True
                why = "is a worker of its work pool there, and is neither paused nor full?"
                telemetry.emit(Note(text=f"{question} has not begun after {_QUEUE_SECONDS:.0f} s; {why}", warning=True))
            leaving_since = _since(StateType.CANCELLING, state, leaving_since, self.clock())
            if leaving_since is not None and self.clock() >= leaving_since + grace_seconds + _NEWS_SECONDS:
                raise StageStopped("cancelled", f"{question} was cancelled, and its end was not heard of")
            asked = stops.asked
            if _is_over(state) and (told_at is None or question.keeps):
                return state
            if asked is not None and told_at is not None:
                long = self.clock() >= told_at + grace_seconds + _NEWS_SECONDS
                if _is_over(state) or long or stops.grace_left() <= _TO_LEAVE_SECONDS:
                    how = "goes on by itself" if question.keeps else "was told to go"
                    raise StageStopped(asked.reason, f"{question} {how} ({asked.reason.replace('_', ' ')})")
            elif asked is not None and not _sees_to_it(asked, state, question, self.clock()):
                if not question.keeps:
                    self.flow_runs.cancel(flow_run)
                told_at = self.clock()
            self.sleep(_LOOK_AGAIN_SECONDS)

    def _pause(self, seconds: float, stops: Stops) -> None:
        until = self.clock() + seconds
        while stops.asked is None and self.clock() < until:
            self.sleep(min(_LOOK_AGAIN_SECONDS, seconds))


def _require_another_try(home: Storage, call: StageCall, tries: int, why: str) -> None:
    """Refuse to rent for what is lost again and again.

    Raises:
        NoProgress: as many tries in a row as `stop.attempts_without_progress` brought nothing.
    """
    limit = call.spec.stop.attempts_without_progress
    head = RunLog(home).head()
    if head is not None and call.attempt is not None:
        require_progress(home, head, limit=limit, now=datetime.now(UTC))
    if tries >= limit:
        raise NoProgress(f"{why}; {tries} tries in a row brought nothing. See the log of its work pool's worker")


def _since(kind: StateType, state: State | None, before: float | None, now: float) -> float | None:
    """Since when it has been in a state of that kind, as far as was seen here."""
    if state is None or state.type is not kind:
        return None
    return now if before is None else before


def _has_not_begun(state: State | None) -> bool:
    return state is not None and state.type in {StateType.SCHEDULED, StateType.PENDING}


def _is_over(state: State | None) -> bool:
    return state is None or state.is_final()


def _sees_to_it(asked: Stop, state: State | None, question: Question, now: float) -> bool:
    """Whether the stage can be left alone with this stop: with the time budget, which it was given, once it runs."""
    if asked.reason != "time_budget" or state is None or state.type is not StateType.RUNNING:
        return False
    return question.stage != "train_segment" or now < asked.at + max(
        question.call.spec.stop.grace_seconds, _ORDERLY_SECONDS
    )


def _was_told_to_go(answer: Contract) -> bool:
    """Whether the answer says no more than that its process had to go, and has committed what it had."""
    return isinstance(answer, SegmentResult) and answer.staged is None and answer.exit_reason in {"sigterm", "sigint"}


def _error(state: State, told: str) -> BatonError:
    """What the stage raised, as the same class here: its exit code and whether a retry can help are that one's."""
    kind = getattr(errors, state.name or "", None)
    if not (isinstance(kind, type) and issubclass(kind, BatonError)):
        return BatonError(f"{told} failed: {state.message or state.name}")
    message = with_place(state.message or "", f"in {told}")
    # Where exactly is in the message.
    return kind(message, step=0) if issubclass(kind, BlowUp) else kind(message)
