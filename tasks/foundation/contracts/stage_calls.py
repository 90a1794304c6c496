"""What a stage is given that runs elsewhere: in a flow run of its own, on another machine or in a container.

Its answer is a contract too: DatasetRef, Head, SegmentResult, Entry or Evaluation.
"""

from typing import Literal

from pydantic import Field

from tasks.foundation.contracts.attempt import Time
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.safe_names import AnswerPath, AttemptId
from tasks.foundation.contracts.segment import SegmentRequest


class StageCall(Contract):
    """What every stage is told."""

    schema_version: Literal[1] = 1
    spec: RunSpec = Field(description="the run file; its storage is an address that holds elsewhere too")
    code_folder: str = Field(description="the run file's folder, as the stage finds it")
    code: dict[str, str] = Field(
        default_factory=dict, description="digest of each function of that folder that the run file names, by reference"
    )
    attempt: AttemptId | None = Field(
        default=None,
        description="the attempt that the stage is a part of; None: it is none's, and leaves none itself",
    )


class PrepareDataCall(StageCall):
    """`prepare_data`, which answers with a DatasetRef."""


class InitOrRestoreCall(StageCall):
    """`init_or_restore`, which answers with the Head."""

    dataset: DatasetRef
    accept: tuple[str, ...] = ()
    suspicious: bool = False


class TrainSegmentCall(StageCall):
    """`train_segment`, which answers with a SegmentResult."""

    request: SegmentRequest
    recorded: Environment
    asked_at: Time | None = Field(
        default=None, description="when it was asked for, UTC: the request's time budget counts from then"
    )


class CheckpointToGcsCall(StageCall):
    """`checkpoint_to_gcs`, which answers with the Entry."""

    request: SegmentRequest
    result: AnswerPath = Field(
        description="path of the SegmentResult in the run's home: a long segment's curves are more than Prefect takes"
    )


class EvaluateCall(StageCall):
    """`evaluate`, which answers with an Evaluation."""

    dataset: DatasetRef
    checkpoint: CheckpointRef
    recorded: Environment
