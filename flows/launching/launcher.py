"""How a stage is run: in this process, or as a Prefect deployment on its own work pool.

A remote stage is a flow run of flows/launching/stage_flows.py. Contracts go in and come back as JSON; the run's log is
what is believed.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from flows.launching.prefect_api import FlowRuns
from flows.launching.remote_stage import Elsewhere, Question
from flows.launching.stage_flows import stage_name
from flows.launching.stage_results import drop_segment, find_segment, hand_on
from flows.relay import Stages
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.log_entry import Commit, Entry, Environment, Evaluation, Head
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.segment import SegmentRequest, SegmentResult
from tasks.foundation.contracts.stage_calls import (
    CheckpointToGcsCall,
    EvaluateCall,
    InitOrRestoreCall,
    PrepareDataCall,
    StageCall,
    TrainSegmentCall,
)
from tasks.foundation.errors import DamagedCheckpoint, InvalidInput
from tasks.foundation.model.code_digest import module_digest
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Committed, Evaluated, Note, Sink

A = TypeVar("A", bound=Contract)

_FILE_REFERENCE = re.compile(r".+\.py:\w+")


def stages_of(
    run: RunFile,
    inline: Callable[[str], Callable[..., Any]],
    *,
    attempt: str | None,
    telemetry: Sink,
    max_seconds: float | None = None,
) -> Stages:
    """The five stages as the run file wants them.

    Args:
        run: the run file; its `stages` say which run elsewhere.
        inline: the stage of a name that runs in this process.
        attempt: a uuid4 made in this process; the stages' attempts name it as the one that waits for them. None: they
            are no part of a run's way, and leave no attempts.
        telemetry: is told what is launched, and what became of it.
        max_seconds: so long, from now, stages may wait for their turn.

    Raises:
        InvalidInput: a deployment is not there.
    """
    elsewhere = run.spec.stages.elsewhere()
    chosen = {name: inline(name) for name in Stages.names() if name not in elsewhere}
    if elsewhere:
        flow_runs = FlowRuns(telemetry=telemetry)
        for name, stage in elsewhere.items():
            require_flow_of(name, stage.deployment or "")
            flow_runs.require_deployment(stage.deployment or "", of=f"stages.{name}.deployment")
        launcher = Launcher(run, Elsewhere.within(max_seconds, flow_runs=flow_runs, attempt=attempt))
        chosen |= {name: getattr(launcher, name) for name in elsewhere}
    if {"train_segment", "checkpoint_to_gcs"} & elsewhere.keys():
        chosen["checkpoint_to_gcs"] = forgetting(chosen["checkpoint_to_gcs"])
    return Stages(**chosen, elsewhere=frozenset(elsewhere))


def require_flow_of(stage: str, deployment: str) -> None:
    """Refuse a deployment of another flow, which would make nothing of what it is told.

    Raises:
        InvalidInput: the flow is not the stage's.
    """
    flow, _, name = deployment.partition("/")
    if flow != stage_name(stage):
        raise InvalidInput(
            f"stages.{stage}.deployment = {deployment} is of the flow {flow}, and the stage's is {stage_name(stage)}, "
            f"of flows/launching/stage_flows.py; name {stage_name(stage)}/{name}, if there is one"
        )


@dataclass(frozen=True, slots=True)
class Launcher:
    """The stages of one relay that run elsewhere, each method as the stage of its name."""

    run: RunFile
    elsewhere: Elsewhere

    def prepare_data(self, _spec: RunSpec, *, code_folder: Path, storage: Storage, telemetry: Sink) -> DatasetRef:  # noqa: ARG002 - as the stage
        """As the stage."""
        call = PrepareDataCall(**self._told("prepare_data", storage))
        return self._ask("prepare_data", call, DatasetRef, storage, telemetry)

    def init_or_restore(
        self,
        _spec: RunSpec,
        dataset: DatasetRef,
        *,
        code_folder: Path,  # noqa: ARG002 - as the stage
        storage: Storage,
        telemetry: Sink,
        accept: Sequence[str] = (),
        suspicious: bool = False,
    ) -> Head:
        """As the stage."""
        told = self._told("init_or_restore", storage)
        call = InitOrRestoreCall(**told, dataset=dataset, accept=tuple(accept), suspicious=suspicious)
        return self._ask("init_or_restore", call, Head, storage, telemetry)

    def train_segment(
        self,
        request: SegmentRequest,
        *,
        code_folder: Path,  # noqa: ARG002 - as the stage
        storage: Storage,
        recorded: Environment,
        telemetry: Sink,
    ) -> SegmentResult:
        """As the stage; superseded, if an earlier try or somebody else has moved the tip before it is trained.

        A segment that an attempt before has left behind, staged on the tip, is taken as it is.
        """
        log = RunLog(storage.at(request.spec.run))
        if request.number == 1:

            def ours(parameters: Mapping[str, Any]) -> bool:
                return _is_of(parameters, request.spec.run, storage)

            self.elsewhere.end_orphans("train_segment", request.spec, ours, telemetry=telemetry)

        def is_there() -> SegmentResult | None:
            if log.require_head().base != request.base:
                return SegmentResult.superseded(request)
            found = find_segment(log.home, request)
            if found is not None and found.staged is not None:
                telemetry.emit(
                    Note(text=f"step {found.staged.step} was staged for an earlier attempt; it is taken now")
                )
            return found

        told, asked_at = self._told("train_segment", storage), datetime.now(UTC).isoformat(timespec="milliseconds")
        call = TrainSegmentCall(**told, request=request, recorded=recorded, asked_at=asked_at)
        question = self._question("train_segment", call, aim=f"to step {request.until_step}")
        return self.elsewhere.ask(question, SegmentResult, log.home, telemetry=telemetry, instead=is_there)

    def checkpoint_to_gcs(
        self, request: SegmentRequest, result: SegmentResult, *, storage: Storage, telemetry: Sink
    ) -> Entry:
        """As the stage."""
        # No code of the user's is needed there.
        told = {**self._told("checkpoint_to_gcs", storage), "code": {}}
        home = storage.at(self.run.spec.run)
        call = CheckpointToGcsCall(**told, request=request, result=hand_on(home, result))
        aim = "" if result.staged is None else f"step {result.staged.step}"
        question = self._question("checkpoint_to_gcs", call, aim=aim, keeps=True)
        entry = self.elsewhere.ask(question, Entry, home, telemetry=telemetry)
        if isinstance(entry.body, Commit):
            made = entry.body.checkpoint
            metrics = entry.body.history[-1].metrics if entry.body.history else {}
            telemetry.emit(Committed(step=made.step, path=made.path, size=made.size, metrics=metrics))
        return entry

    def evaluate(
        self,
        _spec: RunSpec,
        dataset: DatasetRef,
        checkpoint: CheckpointRef,
        *,
        code_folder: Path,  # noqa: ARG002 - as the stage
        storage: Storage,
        recorded: Environment,
        telemetry: Sink,
    ) -> Evaluation:
        """As the stage, on devices of its own if the run file names some."""
        told = self._told("evaluate", storage)
        devices = self.run.spec.stages.evaluate.accelerator
        if devices is not None:
            told["spec"] = told["spec"].model_copy(update={"accelerator": devices})
        call = EvaluateCall(**told, dataset=dataset, checkpoint=checkpoint, recorded=recorded)
        done = self._ask("evaluate", call, Evaluation, storage, telemetry, aim=f"step {checkpoint.step}")
        telemetry.emit(Evaluated(step=checkpoint.step, metrics=done.metrics, examples=done.examples))
        return done

    def _told(self, name: str, storage: Storage) -> dict[str, Any]:
        """What every call says; the storage by an address that is the same wherever it is looked up from."""
        spec, folder = self.run.spec, self.run.folder.resolve()
        there: str | None = getattr(spec.stages, name).code_folder
        return {
            "spec": spec.model_copy(update={"storage": storage.uri}),
            "code_folder": there or str(folder),
            "code": code_digests(spec, folder),
            "attempt": self.elsewhere.attempt,
        }

    def _question(self, name: str, call: StageCall, *, aim: str = "", keeps: bool = False) -> Question:
        deployment = getattr(self.run.spec.stages, name).deployment
        return Question(stage=name, deployment=deployment, call=call, aim=aim, keeps=keeps)

    def _ask(self, name: str, call: StageCall, kind: type[A], storage: Storage, telemetry: Sink, *, aim: str = "") -> A:
        home = storage.at(self.run.spec.run)
        return self.elsewhere.ask(self._question(name, call, aim=aim), kind, home, telemetry=telemetry)


def _is_of(parameters: Mapping[str, Any], run: str, storage: Storage) -> bool:
    """Whether a flow run is a stage of this very run; another version of Baton may have started it."""
    try:
        spec = json.loads(parameters["call"])["spec"]
        return bool(spec["run"] == run and spec["storage"] == storage.uri)
    except (KeyError, TypeError, ValueError):
        return False


def forgetting(commit: Callable[..., Entry]) -> Callable[..., Entry]:
    """The stage checkpoint-to-GCS; what was handed on to it is forgotten once it is committed, or proves damaged.

    Not before: whoever goes in between leaves it to the next attempt.
    """

    def work(request: SegmentRequest, result: SegmentResult, *, storage: Storage, telemetry: Sink) -> Entry:
        home = storage.at(request.spec.run)
        try:
            entry = commit(request, result, storage=storage, telemetry=telemetry)
        except DamagedCheckpoint:
            drop_segment(home, result)
            raise
        drop_segment(home, result)
        return entry

    return work


def code_digests(spec: RunSpec, folder: Path) -> dict[str, str]:
    """Digest of each function of the run file's folder that it names; layout and comments do not count."""
    named = [spec.model.build, spec.data.source, spec.train.callbacks, *(each.source for each in spec.init.weights)]
    files = [reference for reference in named if reference is not None and _FILE_REFERENCE.fullmatch(reference)]
    return {reference: module_digest(reference, folder) for reference in files}
