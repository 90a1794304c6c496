"""The receipt of a proof, kept below `proofs/` in the home of the run that it is about."""

import uuid
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.storage.base import Storage


class VariableDifference(Contract):
    """A variable of the train state that two trials end with other values of."""

    path: str = Field(description="its key in the checkpoint")
    dtype: str
    shape: tuple[int, ...]
    values: int = Field(ge=0, description="how many of its values differ")
    largest: float | None = Field(description="largest absolute difference of finite values; None where there is none")
    only_in: Literal["", "straight", "cut"] = Field(default="", description="the trial that alone has the variable")


class End(Contract):
    """Where a trial came out."""

    state_digest: str
    content_digest: str = Field(description="sha256 of the examples that it prepared, in their order")


class Receipt(Contract):
    """What was proved, or not, about which run, where, and with what outcome."""

    schema_version: Literal[1] = 1
    time: str = Field(description="UTC, ISO 8601")
    verdict: Literal["same", "different"]
    run: str
    run_file: str = Field(description="the run file's name")
    spec_digest: str = Field(description="sha256 of the run file, with all overrides and defaults, as JSON")
    identity: dict[str, Any] = Field(description="identity keys as a run of this file records them at its origin")
    environment: Environment
    baton: str = Field(description="version")
    steps: int = Field(ge=1)
    cuts: tuple[int, ...] = Field(description="steps of the commits between the first step and the last")
    killed_at_step: int = Field(ge=1, description="step of the tip when SIGKILL ended the first process")
    data_prepared: Literal["for each trial", "once"]
    straight: End
    cut: End
    variables: int = Field(ge=0, description="how many were compared")
    differing: int = Field(ge=0)
    first_difference: VariableDifference | None
    metric_rows: int = Field(ge=0, description="how many were compared")
    first_differing_step: int | None = Field(description="of the rows of metrics")
    repeatable: bool | None = Field(description="whether two straight trials agree; None: not asked")
    causes: tuple[str, ...] = Field(description="what usually leads to such a difference, with remedies")


def store(receipt: Receipt, home: Storage) -> str:
    """Write a receipt under a name of its own; returns its address."""
    moment = datetime.fromisoformat(receipt.time).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    path = f"proofs/{moment}-{uuid.uuid4().hex[:8]}.json"
    home.create(path, receipt.to_json())
    return f"{home.uri}/{path}"
