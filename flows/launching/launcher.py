"""Chooses how each stage of a run file runs: in this process, or as a Prefect deployment."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from flows.launching.runner import Runner
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.stage_calls import StageCall
from tasks.foundation.errors import DamagedCheckpoint, InvalidInput
from tasks.foundation.stage import Place, Stage, label_of
from tasks.foundation.telemetry.events import Sink
from tasks.stages import CHECKPOINT_TO_GCS, TRAIN_SEGMENT

if TYPE_CHECKING:
    from flows.launching.remote_stage import RemoteStages

C = TypeVar("C", bound=StageCall)
A = TypeVar("A", bound=Contract)

# If one of them is remote, a segment's result is handed from one to the other by a file in the home.
_HAND_ON = {TRAIN_SEGMENT.name, CHECKPOINT_TO_GCS.name}


def runner_for(
    spec: RunSpec, local: Runner, *, attempt: str | None, telemetry: Sink, max_seconds: float | None = None
) -> Runner:
    """The runner for the stages of a run file.

    Args:
        spec: the run file; its `stages` name the deployments.
        local: runs the other stages, in this process.
        attempt: the attempt that the stages belong to, a uuid4 made in this process. None outside a training run; no
            attempt record is written.
        telemetry: receives warnings about Prefect's API.
        max_seconds: time budget of the command, from now; a stage that has not started by then is not waited for.

    Raises:
        InvalidInput: a deployment does not exist, or belongs to another flow.
    """
    placements = spec.stages.remote()
    if not placements:
        return local
    from flows.launching.prefect_api import FlowRuns  # imports Prefect
    from flows.launching.remote_stage import RemoteStages

    flow_runs = FlowRuns(telemetry=telemetry)
    for name, placement in placements.items():
        deployment = placement.deployment or ""
        require_flow_of(name, deployment)
        flow_runs.require_deployment(deployment, of=f"stages.{name}.deployment")
    until = None if max_seconds is None else time.monotonic() + max_seconds
    stages = RemoteStages(flow_runs=flow_runs, attempt=attempt, until=until, remote=frozenset(placements))
    return Launcher(local=local, stages=stages)


def require_flow_of(stage: str, deployment: str) -> None:
    """Refuse a deployment of another flow, which could not read the stage's call.

    Args:
        stage: name of the stage.
        deployment: FLOW/DEPLOYMENT.

    Raises:
        InvalidInput: the flow is not the stage's.
    """
    flow, _, name = deployment.partition("/")
    if flow != label_of(stage):
        raise InvalidInput(
            f"stages.{stage}.deployment = {deployment} is of the flow {flow}, but the stage's flow is "
            f"{label_of(stage)}, of flows/launching/stage_flows.py; use {label_of(stage)}/{name} if it exists"
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
