"""The receipts of `baton prove` and `baton audit`, which lie in the home of a run: what was compared, the verdict."""

from typing import Any, Literal

from pydantic import Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.log_entry import Environment

Verdict = Literal["same", "different"]
Agreement = Literal["log", "first", "neither"]
OnlyIn = Literal["", "straight", "cut", "log", "execution"]


class VariableDifference(Contract):
    """A variable of the train state whose values differ between two trainings."""

    path: str = Field(description="its key in the checkpoint")
    dtype: str
    shape: tuple[int, ...]
    values: int = Field(ge=0, description="number of its values that differ")
    bits: int | None = Field(
        default=None, description="number of its bits that differ; None: other shapes, or only in one of the two"
    )
    largest: float | None = Field(description="largest absolute difference of finite values, if any")
    only_in: OnlyIn = Field(default="", description="the only one of the two that has the variable")


class TrainingEnd(Contract):
    """Digests of the final state of a training and of its data."""

    state_digest: str
    content_digest: str = Field(description="sha256 of the prepared examples, in their order")


class ProofReceipt(Contract):
    """What a proof compared, in which environment, and its verdict; below `proofs/`."""

    schema_version: Literal[1] = 1
    time: str = Field(description="UTC, ISO 8601")
    verdict: Verdict
    run: str
    run_file: str = Field(description="name of the run file")
    spec_digest: str = Field(description="sha256 of the run file with all overrides and defaults, as JSON")
    identity: dict[str, Any] = Field(description="identity keys, as the log of a run of this file records them")
    environment: Environment
    baton: str = Field(description="version")
    steps: int = Field(ge=1)
    cuts: tuple[int, ...] = Field(description="steps of the commits between the first step and the last")
    killed_at_step: int = Field(ge=1, description="step of the tip when SIGKILL ended the first process")
    data_prepared: Literal["for each trial", "once"]
    straight: TrainingEnd
    cut: TrainingEnd
    variables: int = Field(ge=0, description="number of compared variables")
    differing: int = Field(ge=0)
    first_difference: VariableDifference | None
    metric_rows: int = Field(ge=0, description="number of compared rows")
    first_differing_step: int | None = Field(description="first step whose logged metrics differ")
    repeatable: bool | None = Field(description="whether two straight trainings agree; None if only one was made")
    causes: tuple[str, ...] = Field(description="usual causes of such a difference, with remedies")


class AuditedStretch(Contract):
    """What the execution of the steps between two retained checkpoints gave."""

    start: int = Field(ge=0, description="step of the checkpoint that it started from")
    end: int = Field(ge=1, description="step of the next retained checkpoint")
    verdict: Verdict
    commits: int = Field(ge=1, description="commits of the log from start to end")
    compared: int = Field(
        ge=1, description="those whose digest was compared: the last one, and those at the same steps"
    )
    first_differing_step: int | None = None
    second_agrees_with: Agreement | None = Field(
        default=None, description="what a second execution agrees with; None: the first one agrees with the log"
    )
    variables: int = Field(default=0, ge=0, description="compared variables; 0 if no digest differs at the end")
    differing: int = Field(default=0, ge=0)
    first_difference: VariableDifference | None = None
    environment: tuple[str, ...] = Field(default=(), description="how the environment differs from the log's")


class AuditReceipt(Contract):
    """What an audit executed, and its verdict; below `audits/`."""

    schema_version: Literal[1] = 1
    time: str = Field(description="UTC, ISO 8601")
    verdict: Verdict
    run: str
    run_file: str = Field(description="name of the run file")
    spec_digest: str = Field(description="sha256 of the run file with all overrides and defaults, as JSON")
    baton: str = Field(description="version")
    seed: int | None = Field(description="that drew the sample; None: --last or --all")
    auditable: int = Field(ge=1, description="stretches between retained checkpoints that could be executed")
    stretches: tuple[AuditedStretch, ...]
    left_out: tuple[str, ...] = Field(default=(), description="stretches that cannot be executed again, and why")
