"""The confusion matrix of a checkpoint, as a run's home has it."""

from typing import Final, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.safe_names import CheckpointPath

CONFUSION: Final = "confusion"  # the folder in a home


def confusion_path(checkpoint: str) -> str:
    """Return the file's path in the home, from the checkpoint's."""
    return f"{CONFUSION}/{checkpoint.rpartition('/')[2]}.json"


class ConfusionMatrix(Contract):
    """How often a classifier takes one class for another, over the validation examples."""

    schema_version: Literal[1] = 1
    checkpoint: CheckpointPath
    step: int = Field(ge=0)
    counts: tuple[tuple[NonNegativeInt, ...], ...] = Field(
        description="examples; a row for each label, a column for each predicted class"
    )

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        if any(len(row) != len(self.counts) for row in self.counts):
            raise ValueError("the rows of counts have different lengths")
        return self
