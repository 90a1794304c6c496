"""Stages as Prefect deployments: each try is a flow run, started and waited for until there is an answer.

`runner_for` chooses where each stage of a run file runs. Whatever becomes of a flow run (it fails, crashes, vanishes,
is cancelled, runs twice, or outlives this process), the next step is the same: read the log, and start another flow
run for what is missing there.

Prefect is not imported here. `FlowRuns` asks for one request after the other, which `with_prefect/flow_runs.py` makes,
in this process or in the one that started it. If Prefect is unreachable, they are repeated for a while: flow runs go on
without it.
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, TypeVar

from pydantic import TypeAdapter

from baton.flows.runner import Runner, StageStopped
from baton.tasks.foundation import errors
from baton.tasks.foundation.contracts.attempt import LAUNCH
from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.log_entry import SegmentResult
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import ErrorReport, RemoteContext, StageCall, pack
from baton.tasks.foundation.errors import (
    AcceleratorLost,
    AnotherVersion,
    BatonError,
    DamagedCheckpoint,
    InvalidInput,
    NoProgress,
    RunLogError,
    StageLost,
    StorageError,
    StoreUnreachable,
)
from baton.tasks.foundation.log.attempts import require_progress
from baton.tasks.foundation.log.stage_results import has_answer, take_answer, take_error
from baton.tasks.foundation.machine.processes import HASH_SEED, hash_seed
from baton.tasks.foundation.machine.stops import Stop, Stops
from baton.tasks.foundation.machine.threads import last_stop, run_uninterrupted
from baton.tasks.foundation.model.saved_code import file_references, module_digest
from baton.tasks.foundation.stage import Place, Stage, label_of
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.telemetry.events import Ask, Note, Phase, Sink, Unreachable
from baton.tasks.foundation.text import command, listed, with_place
from baton.tasks.stages import CHECKPOINT_TO_GCS, STAGES, TRAIN_SEGMENT

C = TypeVar("C", bound=StageCall)
A = TypeVar("A", bound=Contract)

# If one of them is remote, a segment's result is handed from one to the other by a file in the home.
_HAND_ON = {TRAIN_SEGMENT.name, CHECKPOINT_TO_GCS.name}
_LONGEST_PAUSE_SECONDS = 30.0
# Another try may help: the stage lost its machine, its devices or the way to the store.
_ANOTHER_TRY = frozenset(kind.__name__ for kind in (AcceleratorLost, StageLost, StoreUnreachable))
# A restarted server is back by then; one that is gone must not block the command.
_RETRY_SECONDS = 600.0
# In a process that was asked to stop.
_RETRY_SECONDS_ON_STOP = 5.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 15.0
# A flow run that was cancelled longer ago has lost its worker, and its end will not be reported.
_LONGEST_CANCELLING = timedelta(minutes=10)
_POLL_SECONDS = 1.0
# A cancelled stage commits within its grace period; this is for the news of it.
_NEWS_SECONDS = 30.0
# A running segment knows the time budget itself and commits in order; SIGTERM would leave it the grace period only.
_ORDERLY_SECONDS = 300.0
# Longer than a container takes to start; a machine may take longer, so it is a warning and no more.
_QUEUE_SECONDS = 120.0
# What this process needs of its own grace period, to say where the run stands.
_TO_LEAVE_SECONDS = 2.0
_OVER: Final = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})


def runner_for(
    spec: RunSpec,
    local: Runner,
    *,
    ask: Ask | None,
    attempt: str | None,
    telemetry: Sink,
    max_seconds: float | None = None,
) -> Runner:
    """The runner for the stages of a run file.

    Args:
        spec: the run file; its `stages` name the deployments.
        local: runs the other stages, in this process.
        ask: asks Prefect's API, as `with_prefect/flow_runs.py` answers; None: nobody does.
        attempt: the attempt that the stages belong to, a uuid4 made in this process. None outside a training run; no
            attempt record is written.
        telemetry: receives warnings about Prefect's API.
        max_seconds: time budget of the command, from now; a stage that has not started by then is not waited for.

    Raises:
        InvalidInput: a deployment does not exist, or belongs to another flow; or nobody asks Prefect.
    """
    placements = spec.stages.remote()
    if not placements:
        return local
    keys = {name: f"stages.{name}.deployment" for name in placements}
    if ask is None:
        raise InvalidInput(
            f"{listed(list(keys.values()))}: nothing here starts flow runs of deployments; train with "
            + command("run")
            + ", or remove the key to run the stage in this process"
        )
    flow_runs = FlowRuns(ask=ask, telemetry=telemetry)
    for name, placement in placements.items():
        deployment = placement.deployment or ""
        require_flow_of(name, deployment)
        flow_runs.require_deployment(deployment, of=keys[name])
    until = None if max_seconds is None else time.monotonic() + max_seconds
    stages = RemoteStages(flow_runs=flow_runs, attempt=attempt, until=until, remote=frozenset(placements))
    return Launcher(local=local, stages=stages)


def require_flow_of(stage: str, deployment: str) -> None:
    """Refuse a deployment of another flow, which could not read the stage's call.

    Args:
        deployment: FLOW/DEPLOYMENT.

    Raises:
        InvalidInput: the flow is not the stage's.
    """
    flow, _, name = deployment.partition("/")
    if flow != label_of(stage):
        raise InvalidInput(
            f"stages.{stage}.deployment = {deployment} is of the flow {flow}, but the stage's flow is "
            f"{label_of(stage)}, of flows/with_prefect/stage_flows.py; use {label_of(stage)}/{name} if it exists"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Runs some stages as deployments, and the others in this process."""

    local: Runner
    stages: "RemoteStages"

    @property
    def remote(self) -> frozenset[str]:
        """Names of the stages that run as deployments."""
        return self.stages.remote

    def run(self, stage: Stage[C, A], call: C, place: Place) -> A:
        """Run a stage where the run file says."""
        runner: Runner = self.stages if stage.name in self.remote else self.local
        if not self.remote & _HAND_ON:
            return runner.run(stage, call, place)
        # Another error, or a kill, leaves the input to the next attempt.
        try:
            answer = runner.run(stage, call, place)
        except DamagedCheckpoint:
            stage.remote.drop_input(call, place)
            raise
        stage.remote.drop_input(call, place)
        return answer


def code_digests(spec: RunSpec, folder: Path) -> dict[str, str]:
    """Digest of each function of the run file's folder that it names; layout and comments do not count."""
    return {reference: module_digest(reference, folder) for reference in file_references(spec)}


class _Lost(Exception):
    """A flow run ended without an answer, and not because of an error of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStages:
    """Runs stages as Prefect deployments.

    Attributes:
        flow_runs: Prefect's API.
        attempt: the attempt that the stages belong to, a uuid4 made in this process. None outside a training run; no
            attempt record is written.
        until: end of the time budget, by the clock of `flow_runs`; a stage that has not started is not waited for then.
        remote: names of the stages.
    """

    flow_runs: "FlowRuns"
    attempt: str | None
    until: float | None = None
    remote: frozenset[str] = frozenset(stage.name for stage in STAGES)
    _tries: list[str] = field(default_factory=list)
    _key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def run(self, stage: Stage[C, A], call: C, place: Place) -> A:
        """Run a stage in another process; a stage that is lost is started again, as long as the run advances.

        Raises:
            BatonError: what the stage raised.
            StageStopped: the stage was stopped.
            NoProgress: it was lost again and again.
        """
        if stage.remote.starts_command(call):
            self._end_orphans(stage.name, call.spec, place)
        remote_call = self.remote_call(stage, call, place)

        def work(stops: Stops) -> A:
            tries = 0
            while True:
                ready = stage.remote.ready_answer(call, place)
                if ready is not None:
                    return ready
                if stops.requested is not None and remote_call.cancellable:
                    reason = stops.requested.reason
                    raise StageStopped(reason, f"{remote_call} was not started ({reason.replace('_', ' ')})")
                try:
                    return self._try_once(remote_call, stage.answer, place, stops)
                except _Lost as lost:
                    tries += 1
                    self._require_another_try(call.spec, place, tries, str(lost))
                    text = f"{lost}; reading the log and trying again"
                    place.telemetry.emit(Note(text=text, warning=True))
                self._pause(min(2.0 ** (tries - 1), _LONGEST_PAUSE_SECONDS), stops)

        left = None if self.until is None else max(self.until - self.flow_runs.clock(), 0.0)
        answer = run_uninterrupted(work, call.spec.stop, within_seconds=left, telemetry=place.telemetry)
        stage.remote.on_answer(answer, place)
        return answer

    def remote_call(self, stage: Stage[C, A], call: C, place: Place) -> "RemoteCall":
        """A call as it is sent: storage and code by addresses that hold in other processes."""
        placement = call.spec.stages.remote()[stage.name]
        folder = place.code_folder.resolve()
        remote = stage.remote.remote_call(call, place)
        remote = remote.model_copy(update={"spec": remote.spec.model_copy(update={"storage": place.root.uri})})
        context = RemoteContext(
            code_folder=placement.code_folder or str(folder),
            code=code_digests(call.spec, folder) if stage.remote.needs_code else {},
            attempt=self.attempt,
        )
        return RemoteCall(
            stage=stage.name,
            deployment=placement.deployment or "",
            spec=call.spec,
            text=pack(remote, context),
            aim=stage.aim(call),
            cancellable=stage.remote.cancellable,
        )

    def _end_orphans(self, stage: str, spec: RunSpec, place: Place) -> None:
        """Cancel flow runs of a stage that an earlier attempt left behind, and wait for their end.

        A cancelled segment commits what it has trained. Left alone, it would hold an accelerator, and nobody would use
        its result.
        """
        for flow_run in self.flow_runs.unfinished(tags_of(spec.run, stage), lambda each: _is_of(each, spec.run, place)):
            state = self.flow_runs.state(flow_run)
            cancelled = state is not None and state.type == "CANCELLING"
            what = "waiting for it to end, since it is cancelled" if cancelled else "cancelling it; it commits first"
            text = f"flow run {flow_run} of an earlier attempt is still active; {what}"
            place.telemetry.emit(Note(text=text, warning=True))
            if not cancelled:
                self.flow_runs.cancel(flow_run)
            until = self.flow_runs.clock() + spec.stop.grace_seconds + _NEWS_SECONDS
            while self.flow_runs.clock() < until and not is_over(self.flow_runs.state(flow_run)):
                self.flow_runs.sleep(_POLL_SECONDS)

    def _try_once(self, call: "RemoteCall", kind: type[A], place: Place, stops: Stops) -> A:
        home, telemetry = place.home, place.telemetry
        telemetry.emit(Phase(cause=LAUNCH))
        flow_run = self.flow_runs.start(
            call.deployment,
            {"call": call.text},  # text: a metric may be NaN, which Prefect's JSON does not allow
            name=f"{call.spec.run} {call}",
            tags=tags_of(call.spec.run, call.stage),
            # One key for each try: a flow run of another attempt has another base, or is dead.
            key=f"{self.attempt or self._key}/{len(self._tries)}",
            environment=_hashes_of(place),
        )
        self._tries.append(flow_run)
        telemetry.emit(Note(text=f"{call} runs as flow run {flow_run} of {call.deployment}"))
        wait = FlowRunWait(flow_run=flow_run, call=call, home=home, telemetry=telemetry, flow_runs=self.flow_runs)
        try:
            state = wait.until_over(stops)
        except StageStopped:
            # A staged segment stays for the next attempt; any other answer is deleted, if that is quick.
            with suppress(StorageError, RunLogError, AnotherVersion):
                take_answer(home.with_deadline(_TO_LEAVE_SECONDS), flow_run, kind)
            raise
        answer = take_answer(home, flow_run, kind)
        if answer is not None and not _was_stopped(answer):
            return answer
        what = f"{call} (flow run {flow_run} of {call.deployment})"
        if state is None:
            raise _Lost(f"{what} is not known to Prefect any more")
        if state.type == "FAILED":
            fault = _error(state, place, flow_run, what)
            if type(fault).__name__ not in _ANOTHER_TRY:
                raise fault
        if state.type == "CANCELLED":
            raise StageStopped("cancelled", f"{what} was cancelled; the same command continues the run")
        if state.type == "COMPLETED":
            raise _Lost(f"{what} has completed, but its answer is not in {home.uri}; it writes to another folder")
        raise _Lost(f"{what} ended without an answer ({state.name}: {state.message or 'no message'})")

    def _require_another_try(self, spec: RunSpec, place: Place, tries: int, why: str) -> None:
        """Refuse to rent an accelerator for a stage that is lost again and again.

        Raises:
            NoProgress: `stop.attempts_without_progress` tries in a row had no result.
        """
        limit = spec.stop.attempts_without_progress
        head = place.log.head()
        if head is not None and self.attempt is not None:
            require_progress(place.home, head, limit=limit, now=datetime.now(UTC))
        if tries >= limit:
            raise NoProgress(f"{why}; {tries} tries in a row had no result. See the log of its work pool's worker")

    def _pause(self, seconds: float, stops: Stops) -> None:
        until = self.flow_runs.clock() + seconds
        while stops.requested is None and self.flow_runs.clock() < until:
            self.flow_runs.sleep(min(_POLL_SECONDS, seconds))


def _hashes_of(place: Place) -> dict[str, str]:
    """The variable that gives a stage's process the hash seed of the run."""
    head = place.log.head()
    seed = hash_seed() if head is None else head.environment.hash_seed
    return {} if seed is None else {HASH_SEED: str(seed)}


def tags_of(run: str, stage: str) -> tuple[str, ...]:
    """Tags of a stage's flow runs."""
    return ("baton", f"run:{run}", f"stage:{label_of(stage)}")


def _is_of(parameters: Mapping[str, object], run: str, place: Place) -> bool:
    """Whether a flow run belongs to this run; another version of Baton may have started it."""
    try:
        spec = json.loads(str(parameters["call"]))["spec"]
        return bool(spec["run"] == run and spec["storage"] == place.root.uri)
    except (KeyError, TypeError, ValueError):
        return False


def _was_stopped(answer: Contract) -> bool:
    """Whether the answer only says that the stage was stopped by a signal and has committed what it had."""
    return isinstance(answer, SegmentResult) and answer.staged is None and answer.exit_reason in {"sigterm", "sigint"}


def _error(state: "FlowRunState", place: Place, flow_run: str, what: str) -> BatonError:
    """The error that the stage raised, with the flow run in its message."""
    with suppress(StorageError, RunLogError, AnotherVersion):
        report = take_error(place.home, flow_run)
        if report is not None:
            return report.model_copy(update={"message": with_place(report.message, f"in {what}")}).to_error()
    # A stage that cannot open the home reports no more than the class, as the name of the state.
    kind = getattr(errors, state.name or "", None)
    if not (isinstance(kind, type) and issubclass(kind, BatonError)):
        return BatonError(f"{what} failed: {state.message or state.name}")
    names = [each.__name__ for each in kind.__mro__ if issubclass(each, BatonError)]
    message = with_place(state.message or "", f"in {what}")
    return ErrorReport(error=names[0], bases=tuple(names[1:]), message=message).to_error()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRunState:
    """A state of a flow run, as Prefect has it.

    Attributes:
        type: such as RUNNING.
        name: such as Running; other names have a meaning of their own.
        message: such as that of the error.
        timestamp: since when, in ISO format.
    """

    type: str
    name: str | None
    message: str | None
    timestamp: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedFlowRun:
    """A flow run that has not ended, by its id, and what it was started with."""

    id: str
    parameters: Mapping[str, object]
    state: FlowRunState | None


_STATE: Final = TypeAdapter[FlowRunState | None](FlowRunState | None)
_UNFINISHED: Final = TypeAdapter(list[UnfinishedFlowRun])


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRuns:
    """Flow runs of deployments: the requests of `with_prefect/flow_runs.py`, retried while Prefect is unreachable."""

    ask: Ask
    telemetry: Sink
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def require_deployment(self, name: str, *, of: str) -> None:
        """Refuse a deployment that does not exist, before anything begins.

        Args:
            name: FLOW/DEPLOYMENT.
            of: the run file's key that names it.

        Raises:
            InvalidInput: the API does not know it.
        """
        self._ask("require_deployment", name=name, of=of)

    def start(
        self,
        deployment: str,
        parameters: Mapping[str, object],
        *,
        name: str,
        tags: Sequence[str],
        key: str,
        environment: Mapping[str, str],
    ) -> str:
        """Schedule a flow run of a deployment, as a child of the command's, and return its id.

        Args:
            deployment: FLOW/DEPLOYMENT.
            name: name of the flow run.
            tags: tags of the flow run.
            key: idempotency key; a second request with the same key starts no second flow run.
            environment: variables of the flow run's process, besides those of its deployment.

        Raises:
            InvalidInput: the API does not know the deployment any more.
        """
        facts = {"name": name, "tags": list(tags), "key": key, "environment": environment}
        return str(self._ask("start", deployment=deployment, parameters=parameters, **facts))

    def state(self, flow_run: str) -> FlowRunState | None:
        """The state of a flow run; None if the API does not know it any more."""
        return _STATE.validate_python(self._ask("state", flow_run=flow_run))

    def cancel(self, flow_run: str) -> None:
        """Cancel a flow run: its process receives SIGTERM; a flow run that has not started never starts."""
        self._ask("cancel", flow_run=flow_run)

    def unfinished(self, tags: Sequence[str], wanted: Callable[[Mapping[str, object]], bool]) -> list[str]:
        """Flow runs that have not ended; some of them may be about to.

        Args:
            tags: only flow runs with all of these tags.
            wanted: only flow runs for whose parameters it returns true.
        """
        found = _UNFINISHED.validate_python(self._ask("unfinished", tags=list(tags)))
        return [each.id for each in found if wanted(each.parameters) and not _is_stuck(each.state)]

    def _ask(self, request: str, **arguments: object) -> object:
        """Make a request, and retry it while the API is unreachable.

        Raises:
            InvalidInput: the API refuses the credentials.
            StageLost: the API was unreachable for too long.
        """
        began, wait = self.clock(), _FIRST_WAIT_SECONDS
        while True:
            try:
                return self.ask(request, arguments)
            except Unreachable as absent:
                waited = self.clock() - began
                if waited >= (_RETRY_SECONDS if last_stop() is None else _RETRY_SECONDS_ON_STOP):
                    raise StageLost(
                        f"{absent}, for {waited:.0f} seconds now; committed checkpoints are kept. Run the same command "
                        "again when it responds"
                    ) from absent
                if wait == _FIRST_WAIT_SECONDS:
                    self.telemetry.emit(Note(text=f"{absent}; retrying", warning=True))
            self.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


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
    """

    flow_run: str
    call: RemoteCall
    home: Storage
    telemetry: Sink
    flow_runs: FlowRuns
    _warned: bool = False
    _has_run: bool = False
    _cancelling_since: float | None = None
    _stopping_since: float | None = None

    def until_over(self, stops: Stops) -> FlowRunState | None:
        """Wait until it is over.

        Args:
            stops: requests to stop this process; a cancellable stage is cancelled then.

        Returns:
            The last state; None if Prefect does not know the flow run any more.

        Raises:
            StageStopped: this process was asked to stop, or the flow run was cancelled and its end was not reported.
        """
        began = self.flow_runs.clock()
        while True:
            state = self.flow_runs.state(self.flow_run)
            self._has_run = self._has_run or (state is not None and state.type == "RUNNING")
            if self._has_run and _is_queued(state) and has_answer(self.home, self.flow_run):
                # Its machine was lost, and Prefect has scheduled it again; there is nothing left to do for it.
                self.flow_runs.cancel(self.flow_run)
                return state
            self._warn_of_queue(state, self.flow_runs.clock() - began)
            self._require_end_of_cancelled(state)
            if is_over(state) and (self._stopping_since is None or not self.call.cancellable):
                return state
            if stops.requested is not None:
                self._stop(stops.requested, stops.grace_left(), state)
            self.flow_runs.sleep(_POLL_SECONDS)

    def _warn_of_queue(self, state: FlowRunState | None, waited_seconds: float) -> None:
        if self._warned or self._has_run or not _is_queued(state) or waited_seconds < _QUEUE_SECONDS:
            return
        self._warned = True
        hint = "check that its work pool has a worker and is neither paused nor full"
        self.telemetry.emit(
            Note(text=f"{self.call} has not started after {_QUEUE_SECONDS:.0f} s; {hint}", warning=True)
        )

    def _require_end_of_cancelled(self, state: FlowRunState | None) -> None:
        if state is None or state.type != "CANCELLING":
            self._cancelling_since = None
            return
        if self._cancelling_since is None:
            self._cancelling_since = self.flow_runs.clock()
        if self.flow_runs.clock() >= self._cancelling_since + self.call.spec.stop.grace_seconds + _NEWS_SECONDS:
            raise StageStopped("cancelled", f"{self.call} was cancelled, and its end was not reported")

    def _stop(self, stop: Stop, grace_left: float, state: FlowRunState | None) -> None:
        """Cancel the flow run, if it has not been done; give up waiting when the time for that is over."""
        if self._stopping_since is None:
            if not self._sees_to_it(stop, state):
                if self.call.cancellable:
                    self.flow_runs.cancel(self.flow_run)
                self._stopping_since = self.flow_runs.clock()
            return
        too_long = self.flow_runs.clock() >= self._stopping_since + self.call.spec.stop.grace_seconds + _NEWS_SECONDS
        if is_over(state) or too_long or grace_left <= _TO_LEAVE_SECONDS:
            how = "was cancelled" if self.call.cancellable else "continues by itself"
            raise StageStopped(stop.reason, f"{self.call} {how} ({stop.reason.replace('_', ' ')})")

    def _sees_to_it(self, stop: Stop, state: FlowRunState | None) -> bool:
        """Whether the stage handles this stop itself: it was given the time budget, once it runs."""
        if stop.reason != "time_budget" or state is None or state.type != "RUNNING":
            return False
        orderly_seconds = max(self.call.spec.stop.grace_seconds, _ORDERLY_SECONDS)
        return self.call.stage != "train_segment" or self.flow_runs.clock() < stop.at + orderly_seconds


def is_over(state: FlowRunState | None) -> bool:
    """Whether a flow run has ended, or is not known any more."""
    return state is None or state.type in _OVER


def _is_queued(state: FlowRunState | None) -> bool:
    return state is not None and state.type in {"SCHEDULED", "PENDING"}


def _is_stuck(state: FlowRunState | None) -> bool:
    if state is None or state.type != "CANCELLING":
        return False
    return datetime.now(UTC) - datetime.fromisoformat(state.timestamp) > _LONGEST_CANCELLING
