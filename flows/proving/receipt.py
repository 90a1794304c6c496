"""The receipt of a proof, stored under `proofs/` in the home of the proved run."""

import uuid
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.storage.base import Storage


class VariableDifference(Contract):
    """A variable of the train state whose final values differ between two trials."""

    path: str = Field(description="its key in the checkpoint")
    dtype: str
    shape: tuple[int, ...]
    values: int = Field(ge=0, description="number of its values that differ")
    largest: float | None = Field(description="largest absolute difference of finite values, if any")
    only_in: Literal["", "straight", "cut"] = Field(default="", description="the only trial that has the variable")


class TrialEnd(Contract):
    """Digests of a trial's final state and of its data."""

    state_digest: str
    content_digest: str = Field(description="sha256 of the prepared examples, in their order")


class Receipt(Contract):
    """What a proof compared, in which environment, and its verdict."""

    schema_version: Literal[1] = 1
    time: str = Field(description="UTC, ISO 8601")
    verdict: Literal["same", "different"]
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
    straight: TrialEnd
    cut: TrialEnd
    variables: int = Field(ge=0, description="number of compared variables")
    differing: int = Field(ge=0)
    first_difference: VariableDifference | None
    metric_rows: int = Field(ge=0, description="number of compared rows")
    first_differing_step: int | None = Field(description="first step whose logged metrics differ")
    repeatable: bool | None = Field(description="whether two straight trials agree; None if only one was made")
    causes: tuple[str, ...] = Field(description="usual causes of such a difference, with remedies")


def store(receipt: Receipt, home: Storage) -> str:
    """Write a receipt under a new name in `home`, and return its address.

    Raises:
        StorageError: the storage refuses or fails.
    """
    moment = datetime.fromisoformat(receipt.time).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    path = f"proofs/{moment}-{uuid.uuid4().hex[:8]}.json"
    home.create(path, receipt.to_json())
    return f"{home.uri}/{path}"
