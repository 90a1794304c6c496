"""The sets that a model is evaluated on: `data.validation` and `data.test` in the run file, and their references."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.code_reference import check_code_reference
from tasks.foundation.contracts.safe_names import DatasetPath

SetName = Literal["validation", "test"]


def check_source(source: str) -> str:
    """Check the form of a source: a built-in one has no colon, a function is `data.py:load`.

    Raises:
        ValueError: it names no function.
    """
    return check_code_reference(source) if ":" in source else source


class SetSpec(Contract):
    """Where the examples of an own validation or test set come from. The keys are those of `data`."""

    source: Annotated[str, AfterValidator(check_source)] = Field(
        description="a built-in source or a function, as data.source"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="settings of the source, as data.options")
    version: str | int = Field(default=0, description="as data.version")
    batched: bool | None = Field(default=None, description="as data.batched")
    examples: Annotated[int, Field(ge=1)] | None = Field(default=None, description="as data.examples")


def _from_string(value: object) -> object:
    return {"source": value} if isinstance(value, str) else value


SetField = Annotated[SetSpec | None, BeforeValidator(_from_string)]


class SetRef(Contract):
    """A reference to a prepared set: a dataset of its own, of which every example is used."""

    folder: DatasetPath = Field(description="datasets/<digest>, relative to the storage root")
    content_digest: str
    examples: int = Field(ge=1)
