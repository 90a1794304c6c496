"""The receipt of an audit, stored under `audits/` in the home of the audited run."""

from typing import Literal

from pydantic import Field

from tasks.foundation.contracts.base import Contract

Verdict = Literal["same", "different"]
Agreement = Literal["log", "first", "neither"]


class AuditedVariable(Contract):
    """The first variable that differs between the logged checkpoint and the first execution."""

    path: str = Field(description="its key in the checkpoint")
    dtype: str
    shape: tuple[int, ...]
    values: int = Field(ge=0, description="number of its values that differ")
    bits: int | None = Field(
        description="number of its bits that differ; None: other shapes, or only in one of the two"
    )
    largest: float | None = Field(description="largest absolute difference of finite values, if any")
    only_in: Literal["", "log", "execution"] = ""


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
    first_difference: AuditedVariable | None = None
    environment: tuple[str, ...] = Field(default=(), description="how the environment differs from the log's")


class AuditReceipt(Contract):
    """What an audit executed, and its verdict."""

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
