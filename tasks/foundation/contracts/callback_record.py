"""What Baton does in place of a run's callbacks, as its log records it beside the identity."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.run_spec import KeepBest, RunSpec

# For information, as `data.source`: the code of the callbacks decides whether they changed.
CALLBACK_RECORD = "callbacks.record"
# In what the identity has of callbacks; it counts unless they ignore rows.
LOG_EVERY = "train.log_every_steps"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError("use letters, digits, '.', '_' and '-' in the name of a file")
    return name


class CsvFile(Contract):
    """A CSV file of the epochs, written from the log."""

    name: Annotated[str, AfterValidator(_file_name)] = Field(description="file name in the folder callbacks/ of a home")
    separator: str = Field(default=",", min_length=1, max_length=1)


class CallbackRecord(Contract):
    """What Baton does in place of callbacks, and which of their hooks need a call at the end of a run."""

    keep_best: KeepBest | None = Field(default=None, description="of ModelCheckpoint, or of restore_best_weights")
    csv_files: tuple[CsvFile, ...] = Field(default=(), description="of CSVLogger")
    on_train_end: bool = Field(default=False, description="whether a callback has its own on_train_end")
    sees_rows: bool | None = Field(
        default=None,
        description="whether callbacks depend on the steps of rows: they act at them, have batch hooks, or monitor a "
        "training metric; None: not recorded",
    )

    @property
    def ignores_rows(self) -> bool:
        """Whether another `train.log_every_steps` has the same callbacks."""
        return self.sees_rows is False


def recorded_callbacks(identity: Mapping[str, Any]) -> CallbackRecord:
    """Return what a run's identity has of its callbacks; logs of earlier versions have nothing."""
    return CallbackRecord.model_validate_json(json.dumps(identity.get(CALLBACK_RECORD, {})), extra="ignore")


def keep_best_of(spec: RunSpec, identity: Mapping[str, Any]) -> KeepBest | None:
    """Return which checkpoint counts as the best: by the run file, or else by its callbacks."""
    if spec.checkpoint.keep_best is not None or spec.train.callbacks is None:
        return spec.checkpoint.keep_best
    return recorded_callbacks(identity).keep_best
